"""Writing tokens into pages: where they land, what is dropped, and that nothing is copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from da_jax.kernels.paged_attention import (
    QuantizedPages,
    compact,
    empty_pages,
    layout,
    paged_attention,
    stack,
    write_kv,
)

PAGES, HEADS, SIZE, DIM = 64, 2, 16, 32


def pool(value: float = 7.0) -> jax.Array:
    return jnp.full((PAGES, 2, HEADS, SIZE, DIM), value)


def new(batch: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (2, batch, queries, HEADS, DIM)
    k, v = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return k, v


def test_tokens_land_in_their_slots_and_nothing_else_changes():
    k, v = new(2, 3)
    pages, slots = np.array([[5, 5, 9], [0, 63, 1]]), np.array([[14, 15, 0], [3, 15, 0]])
    want = np.array(pool())
    for b, t in np.ndindex(2, 3):
        want[pages[b, t], 0, :, slots[b, t]] = k[b, t]
        want[pages[b, t], 1, :, slots[b, t]] = v[b, t]
    np.testing.assert_array_equal(write_kv(pool(), k, v, pages, slots), want)


@pytest.mark.parametrize(("page", "slot"), [(PAGES, 0), (PAGES + 5, 3), (-1, 0), (3, SIZE)])
def test_tokens_outside_the_pool_are_dropped(page, slot):
    k, v = new(1, 1)
    out = write_kv(pool(), k, v, np.array([[page]]), np.array([[slot]]))
    np.testing.assert_array_equal(out, pool())


def test_values_are_cast_to_the_dtype_of_the_pool():
    k, v = new(1, 1)
    at = np.zeros((1, 1), np.int32)
    out = write_kv(pool().astype(jnp.bfloat16), k, v, at, at)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[0, 0, :, 0], jnp.asarray(k[0, 0], jnp.bfloat16))


def test_shapes_that_do_not_fit_are_named():
    k, v = new(2, 1)
    with pytest.raises(ValueError, match=r"k \(2, 1, 2, 32\).*must be \(1, 1, 2, 32\)"):
        write_kv(pool(), k, v, np.zeros((1, 1)), np.zeros((1, 1)))


def test_a_donated_pool_is_reused():
    k, v = new(1, 1)
    at = np.zeros((1, 1), np.int32)
    before = pool()
    address = before.unsafe_buffer_pointer()
    after = jax.jit(write_kv, donate_argnums=0)(before, k, v, at, at)
    assert before.is_deleted() and after.unsafe_buffer_pointer() == address


def test_a_decode_loop_never_copies_the_pool():
    """Each step writes the token and attends to it, with the pool carried through the loop."""
    table = np.array([40, 3])
    mask = stack([compact(table, [(0, 2 * SIZE)], SIZE, 4)])

    def decode(kv_pages, q, length):
        def step(state):
            kv_pages, q, length = state
            page, slot = jnp.asarray(table)[length // SIZE], length % SIZE
            kv_pages = write_kv(kv_pages, q, q, page[:, None], slot[:, None])
            return kv_pages, paged_attention(q, kv_pages, mask, length + 1, scale=1.0), length + 1

        return lax.while_loop(lambda state: state[2][0] < 18, step, (kv_pages, q, length))

    q = jnp.ones((1, 1, HEADS, DIM))
    kv_pages = pool(0.0)
    length = jnp.full((1,), 14, jnp.int32)
    program = jax.jit(decode, donate_argnums=0).lower(kv_pages, q, length).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= kv_pages.nbytes
    assert memory.temp_size_in_bytes < kv_pages.nbytes / 4
    out, *_ = program(kv_pages, q, length)
    assert kv_pages.is_deleted()
    page, slot = np.nonzero(np.asarray(out[:, 0, 0, :, 0]))
    assert list(zip(page.tolist(), slot.tolist())) == [(3, 0), (3, 1), (40, 14), (40, 15)]


@jax.jit
def composed_slice(x, outer, inner):
    return lax.dynamic_slice(lax.dynamic_slice(x, (outer, 0), (8, 4)), (inner, 1), (2, 2))


def test_a_slice_of_a_slice_is_the_right_one():
    """Some XLA versions get this wrong, and page reads with it (jax issue 40849)."""
    x = np.arange(16 * 4).reshape(16, 4)
    for outer in range(9):
        for inner in range(7):
            want = x[outer + inner : outer + inner + 2, 1:3]
            np.testing.assert_array_equal(composed_slice(x, outer, inner), want)


def rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of heads `[..., D]`, worked out in NumPy."""
    scale = np.abs(x).max(-1) / np.float32(127 if dtype == "int8" else 448)
    codes = x / scale[..., None]
    return np.asarray(jnp.asarray(np.round(codes) if dtype == "int8" else codes, dtype)), scale


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_8_bit_tokens_land_with_their_scales_and_nothing_else_changes(dtype, head_dim):
    form = layout(5, HEADS, SIZE, head_dim, dtype)
    values, scales = empty_pages(form)
    before = QuantizedPages(values + jnp.asarray(3, dtype), scales + 7)
    shape = (2, 2, 5, HEADS, head_dim)
    k, v = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    pages = np.array([[1, 1, 1, 2, 5], [0, 0, 3, 3, -1]])  # some share a row of scales
    slots = np.array([[0, 1, 15, 0, 0], [4, 5, 0, SIZE, 0]])
    want, want_scales = np.array(before.values), np.array(before.scales)
    for b, t in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]:
        for side, x in enumerate((k, v)):
            codes, scale = rounded(x[b, t], dtype)
            at, lane = (0, 64 * side) if form.packed else (side, 0)
            if form.packed and side == 0:
                want[pages[b, t], 0, :, slots[b, t]] = 0
            want[pages[b, t], at, :, slots[b, t], lane : lane + head_dim] = codes
            want_scales[pages[b, t], side, :, slots[b, t]] = scale
    out = write_kv(before, k, v, pages, slots)
    np.testing.assert_array_equal(np.float32(out.values), np.float32(want))
    np.testing.assert_allclose(out.scales, want_scales, rtol=1e-6)


def test_a_token_that_is_not_a_number_leaves_nothing_behind_in_its_slot():
    form = layout(2, HEADS, SIZE, 128, "int8")
    k, v = np.ones((2, 1, 1, HEADS, 128), np.float32)
    at = np.array([[1]]), np.array([[3]])
    spoiled = write_kv(empty_pages(form), k * np.nan, v * np.inf, *at)
    mended = write_kv(spoiled, k, v, *at)
    np.testing.assert_allclose(mended.scales[1, :, :, 3], 1 / 127, rtol=1e-6)


def test_packed_tokens_share_rows_with_zeros_between():
    k, v = new(1, 1)
    out = write_kv(
        jnp.full((PAGES, 1, HEADS, SIZE, 128), 7.0), k, v, np.array([[2]]), np.array([[3]])
    )
    row = np.zeros((HEADS, 128))
    row[:, :DIM], row[:, 64 : 64 + DIM] = k[0, 0], v[0, 0]
    np.testing.assert_array_equal(out[2, 0, :, 3], row)
    assert (np.delete(np.asarray(out[2]), 3, axis=2) == 7).all()
