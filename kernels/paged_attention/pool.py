"""The pool of KV pages: its layouts, its 8-bit form with scales, and how to read either.

Keys and values of one page are contiguous, `[2, HKV, PS, D]`, so that one transfer fetches them.
With a head dim of at most 64 they share rows of 128 lanes instead, `[1, HKV, PS, 128]`: keys from
lane 0, values from lane 64. Rows of 64 lanes are half of what a TPU stores anyway, and XLA would
copy the whole pool into that form at every call. Lanes between heads and values are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from da_jax.kernels.paged_attention.mask import Array

PACKED_LANES = 128
VALUE_LANE = 64
"""In a packed row keys begin at lane 0 and values at this lane."""

SCALE_LANES = 128
"""Rows of scales are padded to a multiple of this, for the same reason that rows are packed."""

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
QUANTIZED = tuple(_LARGEST)
"""Dtypes of pools that carry scales."""

DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED)
"""Dtypes that pages may have."""


class QuantizedPages(NamedTuple):
    """A pool of 8-bit pages. A key or value is `values * scales`, one scale a token and head.

    Attributes:
        values: `[P, 2, HKV, PS, D]` or packed `[P, 1, HKV, PS, 128]`, int8 or float8_e4m3fn.
        scales: float32 of the shape `Layout.scales_shape`: `[P, 2, HKV, PS]` with heads and slots
            padded to what a TPU stores; index 0 of axis 1 belongs to keys, 1 to values. Finite,
            also where nothing was written: `write_kv` multiplies what it replaces by zero.
    """

    values: Array
    scales: Array


KVPages: TypeAlias = Array | QuantizedPages


@dataclass(frozen=True)
class Layout:
    """How a pool holds heads of a certain size.

    Attributes:
        num_pages: `P`.
        kv_heads: `HKV`.
        page_size: `PS`, tokens a page.
        head_dim: `D`.
        packed: keys and values share rows of 128 lanes.
        dtype: name of the dtype of the pages.
    """

    num_pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    packed: bool
    dtype: str

    @property
    def quantized(self) -> bool:
        """Whether the pool carries scales."""
        return self.dtype in QUANTIZED

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, scales included."""
        values = math.prod(self.shape[1:]) * jnp.dtype(self.dtype).itemsize
        return values + (4 * math.prod(self.scales_shape[1:]) if self.quantized else 0)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the array of pages."""
        sides, lanes = (1, PACKED_LANES) if self.packed else (2, self.head_dim)
        return self.num_pages, sides, self.kv_heads, self.page_size, lanes

    @property
    def scales_shape(self) -> tuple[int, int, int, int]:
        """Shape of the scales of 8-bit pages, padded to whole tiles of a TPU."""
        slots = -(-self.page_size // SCALE_LANES) * SCALE_LANES
        heads = min(1 << (self.kv_heads - 1).bit_length(), -(-self.kv_heads // 8) * 8)
        return self.num_pages, 2, heads, slots


def layout(
    num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike
) -> Layout:
    """The layout that every backend takes for these heads: packed up to a head dim of 64.

    Raises:
        ValueError: a dtype that pages cannot have.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"pages cannot be {name}: choose one of {', '.join(DTYPES)}")
    return Layout(num_pages, kv_heads, page_size, head_dim, head_dim <= VALUE_LANE, name)


def empty_pages(form: Layout) -> KVPages:
    """Allocates zeroed pages, with scales where the dtype has 8 bits."""
    values = jnp.zeros(form.shape, form.dtype)
    if not form.quantized:
        return values
    return QuantizedPages(values, jnp.zeros(form.scales_shape, jnp.float32))


def layout_of(kv_pages: KVPages, head_dim: int) -> Layout:
    """Reads the layout off a pool.

    Raises:
        ValueError: the pool has no layout that holds heads of this size, or an 8-bit pool comes
            without scales, or a wider one with them.
    """
    values = kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages
    if len(getattr(values, "shape", ())) != 5:
        raise ValueError(
            f"kv_pages {getattr(values, 'shape', type(values))} must be an array "
            "[P, 2, HKV, PS, D], or QuantizedPages"
        )
    pages, sides, heads, size, lanes = values.shape
    packed = sides == 1 and lanes == PACKED_LANES and head_dim <= VALUE_LANE
    if not packed and (sides != 2 or lanes != head_dim):
        raise ValueError(
            f"kv_pages {values.shape} hold no heads of size {head_dim}: make them "
            f"[P, 2, HKV, PS, {head_dim}]"
            + (f" or [P, 1, HKV, PS, {PACKED_LANES}]" if head_dim <= VALUE_LANE else "")
        )
    form = Layout(pages, heads, size, head_dim, packed, jnp.dtype(values.dtype).name)
    if form.dtype not in DTYPES:
        raise ValueError(f"pages cannot be {form.dtype}: choose one of {', '.join(DTYPES)}")
    if isinstance(kv_pages, QuantizedPages) != form.quantized:
        raise ValueError(
            f"pages of {form.dtype} {'need' if form.quantized else 'take no'} scales: "
            f"QuantizedPages is for {' and '.join(QUANTIZED)}"
        )
    if isinstance(kv_pages, QuantizedPages):
        want = form.scales_shape
        if kv_pages.scales.shape != want or kv_pages.scales.dtype != jnp.float32:
            raise ValueError(
                f"scales are {kv_pages.scales.dtype} {kv_pages.scales.shape}; they must be float32 "
                f"{want}"
            )
    return form


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Rounds heads `[..., D]` to 8 bits with a scale for each.

    Returns:
        The rounded heads `[..., D]`, and float32 scales `[...]` that put the largest element of a
        head at the largest number of the dtype. They are finite whatever comes in.
    """
    largest = _LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.finfo(jnp.float32).max)
    scaled = x / jnp.where(scale > 0, scale, 1)[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -largest, largest).astype(dtype), scale


def read_pages(
    kv_pages: KVPages, form: Layout, page: jax.Array, side: int
) -> tuple[jax.Array, jax.Array | None]:
    """Copies keys (side 0) or values (1) of some pages out of the pool.

    Args:
        kv_pages: the pool.
        form: its layout.
        page: `[...]` int32 page ids, clipped to the pool.
        side: 0 for keys, 1 for values.

    Returns:
        `[..., HKV, PS, D]` in the dtype of the pool, and the scales `[..., HKV, PS]` or None.
    """
    values = kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages
    at, lane = (0, side * VALUE_LANE) if form.packed else (side, 0)
    values = cast(jax.Array, values)
    # Whole rows: XLA on TPU would copy the pool to gather a part of its lanes.
    x = values.at[page, at].get(mode="clip")[..., lane : lane + form.head_dim]
    if not isinstance(kv_pages, QuantizedPages):
        return x, None
    scales = cast(jax.Array, kv_pages.scales).at[page, side].get(mode="clip")
    return x, scales[..., : form.kv_heads, : form.page_size]
