"""What is compiled for which machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from da_jax.kernels.aot.machines import Machine
from da_jax.kernels.paged_attention.pool import QUANTIZED
from da_jax.kernels.paged_attention.support import KERNELS

CHUNK = 128
"""Queries of a prefill chunk."""

_SHORT = {
    "bfloat16": "bf16", "float32": "f32", "float16": "f16", "int8": "int8", "float8_e4m3fn": "fp8",
}  # fmt: skip
BACKENDS = (*KERNELS, "xla")
"""Backends that are made for accelerators."""


@dataclass(frozen=True)
class Case:
    """A call of attention, of one layer.

    Attributes:
        head_dim: `D`.
        kv_heads: `HKV` of all devices together.
        group: query heads a KV head.
        page_size: tokens a page.
        dtype: of the pages; queries are float32 with float32 pages, float16 with float16 pages and
            bfloat16 with all others.
        queries: `T`.
        batch: `B`.
        context: tokens a sequence can have, which gives the width of the mask.
        window: sliding window.
        softcap: bound on the scores.
        writes: the new keys and values are written into the donated pool first.
        devices: how many devices share the KV heads.
    """

    head_dim: int = 128
    kv_heads: int = 8
    group: int = 4
    page_size: int = 64
    dtype: str = "bfloat16"
    queries: int = 1
    batch: int = 8
    context: int = 1 << 17
    window: int | None = None
    softcap: float | None = None
    writes: bool = False
    devices: int = 1

    @property
    def q_dtype(self) -> str:
        """Dtype of the queries."""
        return self.dtype if self.dtype in ("float32", "float16") else "bfloat16"

    @property
    def name(self) -> str:
        """Says in a few words what is asked."""
        words = [
            "decode" if self.queries == 1 else f"prefill {self.queries}",
            f"d{self.head_dim} g{self.group} p{self.page_size} {_SHORT[self.dtype]}",
            f"window {self.window}" if self.window else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            "+ write" if self.writes else "",
            f"on {self.devices} devices" if self.devices > 1 else "",
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Check:
    """A row to be.

    Attributes:
        kind: "default": `impl=None` chooses the expected backend; "refused": `backend` refuses
            `case`, with the reason in words; "compile": `backend` compiles `case`.
        backend: name of the backend.
        case: what is asked; None where the backend must refuse whatever is asked of the chip.
    """

    kind: Literal["default", "refused", "compile"]
    backend: str
    case: Case | None

    @property
    def name(self) -> str:
        """Name of the row."""
        if self.case is None:
            return "refused: this chip"
        dtype = _SHORT[self.case.dtype]
        words = {"default": f"default for {dtype}", "refused": f"refused: {dtype} pages"}
        return words.get(self.kind, self.case.name)


def plan(machine: Machine, backends: Sequence[str] | None, full: bool) -> list[Check]:
    """Lists the checks of a machine: the default, what is refused, and what must compile.

    Args:
        machine: the machine.
        backends: names of backends; None is all, and the default.
        full: everything, and not just the part that is quick.
    """
    checks = [] if backends else [Check("default", machine.defaults[0], Case())]
    for backend in backends or BACKENDS:
        if backend in KERNELS and KERNELS[backend].platform != machine.platform:
            continue
        dtypes = _dtypes(backend, machine)
        if not dtypes:
            checks.append(Check("refused", backend, None))
            continue
        refused = [dtype for dtype in _SHORT if dtype not in dtypes]
        checks += [Check("refused", backend, Case(dtype=dtype)) for dtype in refused]
        cases = dict.fromkeys(_core(backend) + (_full(backend) if full else []))
        checks += [Check("compile", backend, case) for case in cases if case.dtype in dtypes]
    return checks


def _dtypes(backend: str, machine: Machine) -> tuple[str, ...]:
    if backend not in KERNELS:
        return tuple(_SHORT)
    return KERNELS[backend].pages.get(machine.chip.family, ())


_HEADS = (
    Case(head_dim=64),
    Case(head_dim=128),
    Case(head_dim=256, kv_heads=4, group=5),
    Case(head_dim=512, kv_heads=4, group=8),
)


def _prefill(case: Case) -> Case:
    return replace(case, queries=CHUNK, batch=2, window=1024, softcap=50.0)


def _core(backend: str) -> list[Case]:
    """One case of each kind; the portable backend, which knows no chips, needs fewer."""
    small, plain, medium, large = _HEADS
    cases = [
        replace(small, page_size=16, writes=True),
        _prefill(plain),
        replace(plain, writes=True, devices=4),
    ]
    if backend == "xla":
        return cases
    return [
        *cases,
        replace(plain, writes=True),
        replace(medium, dtype="float8_e4m3fn"),
        large,
        replace(plain, dtype="int8", writes=True, devices=4),
        replace(small, dtype="int8", writes=True),
        replace(plain, kv_heads=3, page_size=128, dtype="int8", writes=True),
        replace(plain, page_size=128),
        replace(plain, page_size=16, dtype="float32"),
    ]


def _full(backend: str) -> list[Case]:
    """Every head dim with every dtype, page size, and way to call."""
    cases = [replace(heads, dtype=dtype) for heads, dtype in itertools.product(_HEADS, _SHORT)]
    plain = _HEADS[1]
    if backend == "xla":
        cases += [_prefill(heads) for heads in _HEADS]
        return cases + [replace(plain, dtype=dtype, writes=True) for dtype in _SHORT]
    for case in tuple(cases):
        cases += [_prefill(case), replace(case, writes=True)]
    for size in (16, 64, 128, 256):
        cases += [replace(heads, page_size=size) for heads in _HEADS]
        cases += [replace(plain, page_size=size, dtype=dtype) for dtype in _SHORT]
    for heads in _HEADS:
        cases += [
            replace(heads, queries=CHUNK, batch=2),
            replace(heads, page_size=16, window=1024, softcap=50.0),
            replace(heads, writes=True, devices=4),
        ]
    cases += [replace(plain, dtype=dtype, writes=True, devices=4) for dtype in QUANTIZED]
    cases += [replace(plain, kv_heads=4, group=group) for group in (1, 3, 5, 8, 16)]
    return cases
