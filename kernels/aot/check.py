"""Compiles one call of attention and says what is wrong with the program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from da_jax.kernels.aot import machines
from da_jax.kernels.aot.machines import Machine
from da_jax.kernels.aot.matrix import Case, Check
from da_jax.kernels.paged_attention import (
    BackendError,
    BlockMask,
    KVPages,
    QuantizedPages,
    choose,
    layout,
    paged_attention,
    write_kv,
)
from da_jax.kernels.paged_attention.pool import Layout
from da_jax.kernels.paged_attention.support import Problem, missing

CACHE_BYTES = 1 << 30
"""Bytes of the pool on each device; nothing is allocated."""

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_HEADS = PartitionSpec(None, None, "heads")
_MOST_SPLITS = 32
_ROOM = 16 << 20
_ROOM_OF_XLA = 64 << 20


def budget(backend: str, case: Case) -> int:
    """Bytes of temporaries a program may need on each device.

    A kernel keeps partial outputs of up to 32 splits in float32, and 16 MiB for all that is small.
    The portable backend copies chunks of 32 MiB of pages, keys and values. Nothing may come near
    the size of the pool, so that not even a part of it can be copied unseen.
    """
    heads = case.kv_heads * case.group // case.devices
    output = 4 * case.batch * case.queries * heads * case.head_dim
    room = _ROOM_OF_XLA if backend == "xla" else _ROOM
    return min(room + _MOST_SPLITS * output, CACHE_BYTES // 8)


def form_of(case: Case) -> Layout:
    """Layout of the pool of all devices together."""
    form = layout(1, case.kv_heads, case.page_size, case.head_dim, case.dtype)
    pages = CACHE_BYTES * case.devices // form.page_bytes
    return layout(pages, case.kv_heads, case.page_size, case.head_dim, case.dtype)


def problem_of(case: Case) -> Problem:
    """What one device is asked."""
    form = form_of(case)
    heads = case.kv_heads // case.devices
    form = layout(form.num_pages, heads, case.page_size, case.head_dim, case.dtype)
    return Problem(
        batch=case.batch,
        queries=case.queries,
        q_heads=heads * case.group,
        width=-(-case.context // case.page_size),
        q_dtype=case.q_dtype,
        form=form,
        windowed=case.window is not None,
    )


@dataclass
class Checker:
    """Does the checks of one machine, one after the other in one process.

    Attributes:
        machine: the machine.
        devices: four of its devices.
        scratch: folder of what the compilers write beside their programs.
        heard: whether ptxas has reported on a kernel. It does so once: a kernel that another
            program had before is not compiled again, and has been judged.
    """

    machine: Machine
    devices: list[jax.Device]
    scratch: Path
    heard: bool = False

    def run(self, check: Check) -> dict[str, Any]:
        """Does a check; what goes wrong is in the row and never raised.

        Returns:
            `ok` and `error`, and for what was compiled `temp_bytes`, `budget_bytes` and on GPUs
            what `resources` found.
        """
        for file in filter(Path.is_file, self.scratch.iterdir()):
            file.unlink()
        try:
            found, measured = self._run(check)
        except Exception as error:  # noqa: BLE001  whatever a compiler throws is the result
            found, measured = [f"{type(error).__name__}: {error}"], {}
        return {"ok": not found, "error": "; ".join(found)} | measured

    def _run(self, check: Check) -> tuple[list[str], dict[str, int]]:
        with use_abstract_mesh(machines.context(self.devices[0])):
            if check.kind == "default":
                return _default_faults(check, self.machine), {}
            if check.kind == "refused":
                return _refusal_faults(check, self.machine), {}
        assert check.case is not None
        compiled = compile_case(check.backend, check.case, self.devices)
        memory: Any = compiled.memory_analysis()
        found = faults(memory, compiled.as_text() or "", check.backend, check.case)
        used = resources(self.scratch)
        if check.backend == "mosaic_gpu":
            found += self._spill_faults(used)
        limit = budget(check.backend, check.case)
        return found, {"temp_bytes": memory.temp_size_in_bytes, "budget_bytes": limit, **used}

    def _spill_faults(self, used: dict[str, int]) -> list[str]:
        self.heard |= "spills" in used
        if not self.heard:
            return ["ptxas did not report on registers and spills"]
        spilled = used.get("spills", 0)
        return [f"spills {spilled} bytes of registers"] if spilled else []


def _default_faults(check: Check, machine: Machine) -> list[str]:
    expected = next(name for name in machine.defaults if name == "xla" or not missing(name))
    chosen = choose(None, check.case and problem_of(check.case)).name
    return [] if chosen == expected else [f"chooses {chosen}, expected {expected}"]


def _refusal_faults(check: Check, machine: Machine) -> list[str]:
    try:
        choose(check.backend, check.case and problem_of(check.case))
    except BackendError as error:
        kind = machine.chip.kinds[0]
        return [] if kind in str(error) else [f"refused without naming {kind}: {error}"]
    return ["not refused, which the table of dtypes promises"]


def compile_case(backend: str, case: Case, devices: list[jax.Device]) -> jax.stages.Compiled:
    """Compiles a case for the first of some devices, or for as many as it asks for."""
    mesh = Mesh(np.array(devices[: case.devices]), ("heads",))
    attend = partial(
        paged_attention,
        scale=case.head_dim**-0.5,
        softcap=case.softcap,
        window=case.window,
        impl=backend,
    )

    def step(
        q: jax.Array,
        kv_pages: KVPages,
        mask: BlockMask,
        lengths: jax.Array,
        q_lens: jax.Array,
        *new: jax.Array,
    ) -> tuple[jax.Array, KVPages]:
        kv_pages = write_kv(kv_pages, *new) if case.writes else kv_pages
        return attend(q, kv_pages, mask, lengths, q_lens), kv_pages if case.writes else ()

    arguments, specs = _arguments(case)
    if case.devices > 1:
        out_specs = (_HEADS, specs[1])
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    placed = jax.tree.map(place, arguments, specs)
    # shard_map accepts no other context than its own mesh, which knows the chip too.
    context = mesh.abstract_mesh if case.devices > 1 else machines.context(devices[0])
    with use_abstract_mesh(context):
        donated = (1,) if case.writes else ()
        traced = jax.jit(step, donate_argnums=donated).trace(*placed)
        lowered = traced.lower(lowering_platforms=(machines.lowering(devices[0]),))
    return lowered.compile()


def _arguments(case: Case) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `step` in `compile_case`, and how the KV heads of each are sharded."""
    form = form_of(case)
    batch, queries, width = case.batch, case.queries, problem_of(case).width
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    halves = lambda heads: jax.ShapeDtypeStruct(
        (batch, queries, heads, case.head_dim), case.q_dtype
    )
    pool: KVPages = jax.ShapeDtypeStruct(form.shape, form.dtype)
    pool_spec: Any = _HEADS
    if form.quantized:
        scales = jax.ShapeDtypeStruct(form.scales_shape, jnp.float32)
        pool, pool_spec = QuantizedPages(pool, scales), QuantizedPages(_HEADS, _HEADS)
    whole = PartitionSpec()
    mask = BlockMask(ints(batch, width), ints(batch, width), ints(batch, width), ints(batch))
    arguments = [halves(case.kv_heads * case.group), pool, mask, ints(batch), ints(batch)]
    specs = [_HEADS, pool_spec, BlockMask(whole, whole, whole, whole), whole, whole]
    if case.writes:
        new = halves(case.kv_heads)
        arguments += [new, new, ints(batch, queries), ints(batch, queries)]
        specs += [_HEADS, _HEADS, whole, whole]
    return tuple(arguments), tuple(specs)


def faults(memory: Any, text: str, backend: str, case: Case) -> list[str]:
    """Says what a program does that it must not do: copy the pool, or communicate.

    Args:
        memory: its memory analysis.
        text: its HLO after optimisation.
        backend: name of the backend.
        case: what it computes.
    """
    allowed = budget(backend, case)
    found = []
    if memory.temp_size_in_bytes > allowed:
        found.append(
            f"temporaries of {memory.temp_size_in_bytes} bytes exceed {allowed}: is some of the "
            f"pool of {CACHE_BYTES} bytes copied?"
        )
    pool = form_of(case).page_bytes * form_of(case).num_pages // case.devices
    if case.writes and memory.alias_size_in_bytes < pool:
        found.append(
            f"of the donated pool of {pool} bytes only {memory.alias_size_in_bytes} are reused: it "
            "is written anew at each step"
        )
    for shape in _shapes(case):
        # XLA may put a copy where the temporaries do not show it: on a TPU into VMEM.
        dims = ",".join(str(n) for n in shape)
        if re.search(rf"\[{dims}\]\S*( [^=\n]*)? copy(-start)?\(", text):
            found.append(f"copies the whole array [{dims}] of the pool")
    used = [name for name in _COLLECTIVES if re.search(rf"\b{name}(-start)?\(", text)]
    if used:
        found.append(f"communicates: {', '.join(used)}")
    return found


def _shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the arrays of the pool on one device."""
    form = problem_of(case).form
    scales = [form.scales_shape] if form.quantized else []
    return [form.shape, *scales]


def resources(scratch: Path) -> dict[str, int]:
    """Reads what GPU compilers wrote about a program.

    Returns:
        Where known, the most of any kernel: `registers` a thread, `spills` in bytes and
        `shared_bytes` a block.
    """
    patterns = {
        "registers": ("*.ptxas", r"Used (\d+) registers"),
        "spills": ("*.ptxas", r"(\d+) bytes spill (?:stores|loads)"),
        "shared_bytes": ("*.resources.txt", r"smem_scratch_bytes=(\d+)"),
        "shared_bytes_of_xla": ("*.thunk_sequence.txt", r"shared_memory: (\d+) bytes"),
    }
    found = {}
    for name, (files, pattern) in patterns.items():
        texts = (file.read_text(errors="replace") for file in scratch.glob(files))
        numbers = [int(number) for text in texts for number in re.findall(pattern, text)]
        if numbers:
            found[name] = max(numbers)
    others = found.pop("shared_bytes_of_xla", 0)
    if others or "shared_bytes" in found:
        found["shared_bytes"] = max(others, found.get("shared_bytes", 0))
    return found
