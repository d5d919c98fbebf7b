"""Layouts of the pool, and heads rounded to 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.kernels.paged_attention import QuantizedPages, empty_pages, layout, layout_of, pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("head_dim", "shape"),
    [(32, (3, 1, 2, 16, 128)), (64, (3, 1, 2, 16, 128)), (256, (3, 2, 2, 16, 256))],
)
def test_an_empty_pool_has_the_layout_it_was_made_with(dtype, head_dim, shape):
    form = layout(3, 2, 16, head_dim, dtype)
    pages = empty_pages(form)
    parts = list(pages) if isinstance(pages, QuantizedPages) else [pages]
    assert layout_of(pages, head_dim) == form
    assert parts[0].shape == shape and not any(x.any() for x in parts)
    assert sum(x.nbytes for x in parts) == 3 * form.page_bytes
    assert (len(parts) == 2) == (dtype in ("int8", "float8_e4m3fn"))


@pytest.mark.parametrize(
    ("shape", "head_dim", "message"),
    [
        ((3, 2, 2, 16, 128), 64, r"no heads of size 64.*\[P, 1, HKV, PS, 128\]"),
        ((3, 1, 2, 16, 128), 96, r"no heads of size 96: make them \[P, 2, HKV, PS, 96\]"),
        ((3, 2, 2, 16), 64, "must be"),
    ],
)
def test_a_pool_of_another_shape_is_named_with_the_right_one(shape, head_dim, message):
    with pytest.raises(ValueError, match=message):
        layout_of(jnp.zeros(shape), head_dim)


def test_scales_and_8_bits_come_together():
    values = jnp.zeros((3, 2, 2, 16, 128), jnp.int8)
    with pytest.raises(ValueError, match="int8 need scales"):
        layout_of(values, 128)
    scales = jnp.zeros((3, 2, 2, 128))
    with pytest.raises(ValueError, match="float32 take no scales"):
        layout_of(QuantizedPages(values.astype(jnp.float32), scales), 128)
    with pytest.raises(ValueError, match=r"scales are float32 \(3, 2, 2, 16\)"):
        layout_of(QuantizedPages(values, scales[..., :16]), 128)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["int8", "float8_e4m3fn"]), st.floats(-30, 30))
def test_heads_come_back_from_8_bits_within_half_a_step(seed, dtype, magnitude):
    x = np.random.default_rng(seed).standard_normal((4, 3, 32)).astype(np.float32)
    x *= np.float32(10.0**magnitude)
    x[0, 0] = 0
    codes, scales = pool.quantize(jnp.asarray(x), dtype)
    back = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[..., None]
    largest = np.abs(x).max(-1, keepdims=True)
    step = largest / 127 if dtype == "int8" else np.maximum(np.abs(x) / 8, largest / 448 / 2**9)
    assert codes.dtype == dtype and (np.abs(back - x) <= 0.501 * step).all()
    np.testing.assert_allclose(np.abs(back).max(-1), largest[..., 0], rtol=1e-6)
