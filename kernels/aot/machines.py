"""The machines that programs are compiled for, and how to describe them to a compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from da_jax.kernels.chips import CHIPS, Chip

INSTALL = "not installed: pip install 'da-jax[aot]'"


@dataclass(frozen=True)
class Gpu:
    """What the CUDA compiler asks about a GPU beyond what `Chip` knows.

    Attributes:
        capability: CUDA compute capability.
        threads: threads a multiprocessor holds.
        shared: bytes of shared memory of a multiprocessor.
        l2: bytes of the L2 cache.
    """

    capability: tuple[int, int]
    threads: int
    shared: int
    l2: int


@dataclass(frozen=True)
class Machine:
    """A host with at least four devices of one chip.

    Attributes:
        chip: what is known of the chip.
        defaults: the backend that `impl=None` must choose for bfloat16 there, and after it those to
            expect where the installed JAX has no such backend.
        topology: libtpu's name of the slice; empty for GPUs.
        accelerator: what Cloud calls the slice; keeps libtpu from asking for it.
        gpu: what the CUDA compiler must be told; None for TPUs.
    """

    chip: Chip
    defaults: tuple[str, ...]
    topology: str = ""
    accelerator: str = ""
    gpu: Gpu | None = None

    @property
    def name(self) -> str:
        """Name of the chip."""
        return self.chip.name

    @property
    def platform(self) -> str:
        """What JAX calls the platform: "tpu" or "gpu"."""
        return "gpu" if self.gpu else "tpu"


def _machines() -> dict[str, Machine]:
    chips = {chip.name: chip for chip in CHIPS}
    tpus = (
        ("TPU v4", "v4:2x2x1", "v4-8"),
        ("TPU v5e", "v5e:2x2", "v5litepod-4"),
        ("TPU v5p", "v5p:2x2x1", "v5p-8"),
        ("TPU v6e", "v6e:2x2", "v6e-4"),
        ("TPU7x", "tpu7x:2x2x1", "tpu7x-8"),
    )
    mib = 1 << 20
    gpus = (
        ("H200", ("mosaic_gpu", "triton"), Gpu((9, 0), 2048, 233472, 50 * mib)),
        ("H100", ("mosaic_gpu", "triton"), Gpu((9, 0), 2048, 233472, 50 * mib)),
        ("A100", ("triton",), Gpu((8, 0), 2048, 167936, 40 * mib)),
        ("L4", ("triton",), Gpu((8, 9), 1536, 102400, 48 * mib)),
        ("B200", ("triton",), Gpu((10, 0), 2048, 233472, 126 * mib)),
        ("T4", (), Gpu((7, 5), 1024, 65536, 4 * mib)),
    )
    machines = [
        Machine(chips[name], ("mosaic_tpu", "xla"), topology, accelerator)
        for name, topology, accelerator in tpus
    ]
    machines += [Machine(chips[name], (*ours, "xla"), gpu=gpu) for name, ours, gpu in gpus]
    return {machine.name: machine for machine in machines}


MACHINES = _machines()
"""By name of the chip."""


def named(names: Sequence[str] | None) -> list[Machine]:
    """Looks machines up by the name of their chip, "TPU" or not, in any case; None is all.

    Raises:
        ValueError: no machine has that name.
    """
    short = lambda name: name.lower().removeprefix("tpu").strip()
    known = {short(name): machine for name, machine in MACHINES.items()}
    unknown = [name for name in names or () if short(name) not in known]
    if unknown:
        raise ValueError(f"unknown target {unknown[0]!r}: choose from {', '.join(MACHINES)}")
    return list(known.values()) if names is None else [known[short(name)] for name in names]


def installed(machine: Machine) -> bool:
    """Whether the compiler for a machine is installed."""
    modules = ("libtpu",) if machine.gpu is None else ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return any(importlib.util.find_spec(module) for module in modules)


def environment(machine: Machine, scratch: Path) -> dict[str, str]:
    """The environment of a process that compiles for a machine.

    Args:
        machine: the machine.
        scratch: an empty folder for what the compilers write beside their programs.
    """
    ours = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "DA_JAX_TUNING": "off",
    }
    if machine.gpu is None:
        ours |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": machine.accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
            # Without a TPU there is nothing that two processes could fight over.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    else:
        cuda = _cuda_folder()
        flags = [f"--xla_dump_to={scratch}", *([f"--xla_gpu_cuda_data_dir={cuda}"] if cuda else [])]
        ours |= {"XLA_FLAGS": " ".join(flags), "MOSAIC_GPU_DUMP_TO": str(scratch)}
    alien = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_", "MOSAIC_GPU_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(alien)}
    return kept | ours


def devices(machine: Machine, count: int = 4) -> list[jax.Device]:
    """Devices of a machine that is not there; only in a process with its `environment`.

    Raises:
      ValueError: for more than eight, or more than four GPUs.
    """
    most = 4 if machine.gpu else 8
    if count > most:
        raise ValueError(f"{count} devices: of {machine.name} at most {most} can be described")
    if machine.gpu is None:
        slice_ = machine.topology
        if count > 4:  # twice as many chips along the last axis
            slice_, size = slice_[:-1], int(slice_[-1])
            slice_ += str(2 * size)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_)
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=machine.name,
            target_config=_target_config(machine.chip, machine.gpu),
            topology="1x1x4",
        )
    return list(topology.devices)[:count]


def context(device: jax.Device) -> AbstractMesh:
    """The mesh under which `current_target` and Pallas take a described device for the present one.

    Use it with `jax.sharding.use_abstract_mesh`.
    """
    known = Mesh(np.array([device]), ("device",)).abstract_mesh.abstract_device
    return AbstractMesh((), (), abstract_device=known)


def lowering(device: jax.Device) -> str:
    """The platform that programs for a device are lowered for."""
    return "cuda" if device.platform == "gpu" else device.platform


def _cuda_folder() -> Path | None:
    """A CUDA toolkit on this machine; without one JAX's plugin uses what it brings along."""
    found = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    ptxas = shutil.which("ptxas")
    if ptxas:
        found.append(str(Path(ptxas).resolve().parents[1]))
    folders = [Path(folder) for folder in found if folder]
    whole = lambda folder: (folder / "bin" / "ptxas").exists() and (folder / "nvvm").is_dir()
    return next(filter(whole, folders), None)


def _target_config(chip: Chip, gpu: Gpu) -> str:
    """The text form of XLA's GpuTargetConfigProto."""
    major, minor = gpu.capability
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: {gpu.threads}
          core_count: {chip.cores}
          fpus_per_core: 128
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {chip.fast_memory}
          shared_memory_per_core: {gpu.shared}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {int(chip.bandwidth)}
          l2_cache_size: {gpu.l2}
          device_memory_size: {chip.memory}
          clock_rate_ghz: 1.98
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{chip.kinds[0]}"
    """
