"""Which backend can do what on which chip: the one place that says so."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from da_jax.kernels.chips import CHIPS, Target, describe
from da_jax.kernels.paged_attention.mask import Array, BlockMask
from da_jax.kernels.paged_attention.pool import DTYPES, QUANTIZED, KVPages, Layout, layout_of

Q_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that queries may have."""


@dataclass(frozen=True)
class Kernel:
    """What a Pallas backend needs and takes.

    Attributes:
        platform: where it runs: "tpu" or "gpu".
        needs: module of JAX that it is written with.
        pages: dtypes of the pages it takes, by family of chips.
        interpreted_as: the device that its interpreter stands for.
    """

    platform: str
    needs: str
    pages: dict[str, tuple[str, ...]]
    interpreted_as: Target


_NO_FP8 = tuple(dtype for dtype in DTYPES if dtype != "float8_e4m3fn")
_NO_FP16 = tuple(dtype for dtype in DTYPES if dtype != "float16")

KERNELS = {
    "mosaic_tpu": Kernel(
        "tpu",
        "jax.experimental.pallas.tpu",
        dict.fromkeys(("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"), _NO_FP16),
        describe("tpu", "TPU v5 lite"),
    ),
    "mosaic_gpu": Kernel(
        "gpu",
        "jax.experimental.pallas.mosaic_gpu",
        {"hopper": ("bfloat16", "float16", *QUANTIZED)},
        describe("gpu", "NVIDIA H200"),
    ),
    "triton": Kernel(
        "gpu",
        "jax.experimental.pallas.triton",
        {"ampere": _NO_FP8, **dict.fromkeys(("ada", "hopper", "blackwell"), DTYPES)},
        describe("gpu", "NVIDIA H200"),
    ),
}
"""Pallas backends in order of preference: the one table of what runs where."""


@dataclass(frozen=True)
class Problem:
    """What a call of `paged_attention` asks for, as far as it shapes the program.

    Attributes:
        batch: `B`, sequences.
        queries: `T`, queries a sequence.
        q_heads: `HQ`.
        width: `W`, entries of the mask a sequence.
        q_dtype: name of the dtype of the queries.
        form: layout of the pool.
        windowed: whether a sliding window applies.
    """

    batch: int
    queries: int
    q_heads: int
    width: int
    q_dtype: str
    form: Layout
    windowed: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.form.kv_heads

    @property
    def compute_dtype(self) -> str:
        """What matrix products take: 16 bits where nothing finer comes in.

        float16 has not the range for weights times scales, so 8-bit pages go with float32 there.
        """
        half = {"bfloat16": ("bfloat16", *QUANTIZED), "float16": ("float16",)}
        return self.q_dtype if self.form.dtype in half.get(self.q_dtype, ()) else "float32"


def problem_of(q: Array, kv_pages: KVPages, mask: BlockMask, window: int | None) -> Problem:
    """Describes a call by what shapes its program.

    Raises:
        ValueError: arrays of the wrong rank or dtype, or pages that hold no heads of this size.
    """
    if jnp.dtype(q.dtype).name not in Q_DTYPES:
        raise ValueError(f"q is {q.dtype}: make it one of {', '.join(Q_DTYPES)}")
    if q.ndim != 4 or mask.page.ndim != 2:
        raise ValueError(f"q {q.shape} must be [B, T, HQ, D] and the mask {mask.page.shape} [B, W]")
    form = layout_of(kv_pages, q.shape[3])
    batch, queries, q_heads, _ = q.shape
    dtype = jnp.dtype(q.dtype).name
    return Problem(batch, queries, q_heads, mask.page.shape[1], dtype, form, window is not None)


def obstacle(backend: str, target: Target) -> str | None:
    """Says why a Pallas backend runs nothing at all on a device, or None where it runs."""
    kernel = KERNELS[backend]
    if target.platform != kernel.platform:
        return f"needs a {kernel.platform.upper()}, this is {target.platform} ({target.kind})"
    if target.family not in kernel.pages:
        chips = ", ".join(chip.name for chip in CHIPS if chip.family in kernel.pages)
        return f"{target.kind} is not one of its chips: {chips}, or of their family"
    return missing(backend)


def missing(backend: str) -> str | None:
    """Says which feature of the installed JAX a Pallas backend lacks, or None."""
    needs = KERNELS[backend].needs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(needs)
    except ImportError as error:
        return f"this JAX has no {needs} ({error})"
    if backend == "mosaic_gpu" and not hasattr(module, "InterpretGPUParams"):
        return f"it needs jax 0.11 or newer, this is {jax.__version__}"
    return None


def interpreter_obstacle(backend: str) -> str | None:
    """Says why the interpreter of a Pallas backend cannot run in this process, or None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if backend == "mosaic_gpu" and cores == 1 and int(os.environ.get("NPROC", "1")) < 2:
        return "its interpreter needs two threads: set NPROC=2 in the environment before JAX starts"
    return missing(backend)


def page_dtypes(backend: str, target: Target) -> tuple[str, ...]:
    """Dtypes of the pages that a backend takes on a device."""
    return KERNELS[backend].pages.get(target.family, ()) if backend in KERNELS else DTYPES


def refuses_dtype(backend: str, problem: Problem, target: Target) -> str | None:
    """Says why a backend does not take the dtype of these pages on this chip, or None."""
    allowed = page_dtypes(backend, target)
    if problem.form.dtype in allowed:
        return None
    return (
        f"pages of {problem.form.dtype} on {target.kind}: it takes {', '.join(allowed)}; make the "
        "pages (and with them the model) one of these"
    )
