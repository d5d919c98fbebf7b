"""Which backend can do what on which chip: the one place that says so."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

import jax

from da_jax.kernels.chips import Target
from da_jax.kernels.paged_attention.pool import Layout

_ALL = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
_NO_FP8 = _ALL[:-1]

KV_DTYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "mosaic_tpu": {
        family: ("float32", "bfloat16", "int8", "float8_e4m3fn")
        for family in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x")
    },
    "mosaic_gpu": {"hopper": ("bfloat16", "float16", "int8", "float8_e4m3fn")},
    "triton": {"ampere": _NO_FP8, "ada": _ALL, "hopper": _ALL, "blackwell": _ALL},
}
"""Dtypes of the pages, by backend and family of chips. `xla` and `reference` take all, anywhere."""

_PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu", "triton": "gpu"}
_NEEDS = {
    "mosaic_tpu": "jax.experimental.pallas.tpu",
    "mosaic_gpu": "jax.experimental.pallas.mosaic_gpu",
    "triton": "jax.experimental.pallas.triton",
}


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
        """What matrix products take: bfloat16 or float16 where nothing finer comes in."""
        half = ("bfloat16", "float16")
        if self.q_dtype in half and (self.form.quantized or self.form.dtype == self.q_dtype):
            return self.q_dtype
        return "float32"


def obstacle(backend: str, target: Target) -> str | None:
    """Says why a backend runs nothing at all on a device, or None where it runs."""
    if backend not in KV_DTYPES:
        return None
    if target.platform != _PLATFORM[backend]:
        return f"needs a {_PLATFORM[backend].upper()}, this is {target.platform} ({target.kind})"
    if target.family not in KV_DTYPES[backend]:
        known = ", ".join(KV_DTYPES[backend])
        return f"{target.kind} ({target.family}) is not one of its chips: {known}"
    return missing(backend)


def missing(backend: str) -> str | None:
    """Says which feature of the installed JAX a backend lacks, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(_NEEDS[backend])
    except ImportError as error:
        return f"this JAX has no {_NEEDS[backend]} ({error})"
    if backend == "mosaic_gpu" and not hasattr(module, "InterpretGPUParams"):
        return f"it needs jax 0.11 or newer, this is {jax.__version__}"
    return None


def page_dtypes(backend: str, target: Target) -> tuple[str, ...]:
    """Dtypes of the pages that a backend takes on a device."""
    return KV_DTYPES[backend].get(target.family, ()) if backend in KV_DTYPES else _ALL


def refuses_dtype(backend: str, problem: Problem, target: Target) -> str | None:
    """Says why a backend does not take the dtype of these pages on this chip, or None."""
    allowed = page_dtypes(backend, target)
    if problem.form.dtype in allowed:
        return None
    return (
        f"pages of {problem.form.dtype} on {target.kind} ({target.family}): it takes "
        f"{', '.join(allowed)}"
    )
