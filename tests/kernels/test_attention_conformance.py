"""What every attention backend must do. A backend joins by being listed in `backends()`."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paged_cases import TOLERANCE, Case, make_case, shuffled

from da_jax.kernels.chips import describe
from da_jax.kernels.paged_attention import (
    BackendError,
    BlockMask,
    backends,
    choose,
    compact,
    empty_pages,
    layout,
    paged_attention,
    stack,
    support,
    write_kv,
    xla,
)
from da_jax.kernels.paged_attention.api import INTERPRET

QUICK = {
    "head_dim_32": {"head_dim": 32},
    "head_dim_64_not_packed": {"head_dim": 64, "queries": 2, "packed": False},
    "head_dim_128": {"head_dim": 128, "queries": 3},
    "head_dim_256": {"head_dim": 256, "group": 1},
    "head_dim_512": {"head_dim": 512, "kv_heads": 1, "group": 8},
    "group_1": {"group": 1, "queries": 5},
    "group_4": {"group": 4},
    "group_5": {"group": 5, "queries": 2, "kv_heads": 3},
    "page_1": {"page_size": 1},
    "page_8": {"page_size": 8, "queries": 33},
    "page_64": {"page_size": 64, "queries": 40, "group": 3},
    "page_256": {"page_size": 256, "queries": 2},
    "window_1": {"window": 1, "queries": 3},
    "window_20": {"window": 20},
    "window_chunk": {"window": 20, "queries": 19},
    "softcap": {"softcap": 0.7},
    "softcap_window_chunk": {"softcap": 0.7, "window": 33, "queries": 18},
    "bfloat16": {"dtype": "bfloat16", "queries": 2},
    "float16": {"dtype": "float16", "queries": 2},
    "int8": {"kv_dtype": "int8", "head_dim": 128, "queries": 2, "page_size": 32},
    "int8_packed": {"kv_dtype": "int8", "dtype": "bfloat16"},
    "fp8": {
        "kv_dtype": "float8_e4m3fn",
        "head_dim": 128,
        "dtype": "bfloat16",
        "queries": 9,
        "page_size": 32,
    },
    "int8_three_heads": {"kv_dtype": "int8", "kv_heads": 3, "page_size": 32, "head_dim": 128},
    "fp8_packed": {"kv_dtype": "float8_e4m3fn", "window": 20, "page_size": 64},
    "bfloat16_pages": {"kv_dtype": "bfloat16", "head_dim": 128, "queries": 2},
}
EXTRAS = [{}, {"window": 40}, {"softcap": 5.0}, {"window": 40, "softcap": 5.0}]
MATRIX = [
    {"head_dim": head_dim, "group": group, "page_size": page_size, "queries": queries, **extra}
    for (head_dim, group, page_size, queries), extra in zip(
        itertools.product((32, 64, 128, 256, 512), (1, 4, 5, 8), (8, 16, 64, 128, 256), (1, 17)),
        itertools.cycle([*EXTRAS, *EXTRAS[1:]]),  # 7 is prime to the lengths of the product
    )
] + [
    {"head_dim": head_dim, "page_size": page_size, "queries": queries, "kv_dtype": kv_dtype,
     "dtype": "bfloat16"}
    for head_dim, page_size, queries, kv_dtype in itertools.product(
        (64, 128, 512), (32, 128), (1, 17), ("int8", "float8_e4m3fn")
    )
]  # fmt: skip


DEFAULTS = {"mosaic_gpu:interpret": {"dtype": "bfloat16"}}
"""What a backend gets where a case leaves it open: its products take 16 bits only."""

REFUSED = {
    "mosaic_tpu:interpret": {
        "head_dim_64_not_packed": "packs a head dim up to 64",
        "page_1": "multiple of 8",
        "float16": "pages of float16",
    },
    "mosaic_gpu:interpret": {
        "page_1": "pages of 1 tokens",
        "int8_packed": "pages of 16 tokens of 8 bits",
    },
}
"""Cases that a backend does not take, and what it must say."""

HERE = [row.name for row in backends() if row.available]
INTERPRETED = [name + INTERPRET for name in support.KERNELS]


@pytest.fixture(params=[*HERE, *INTERPRETED])
def impl(request):
    try:
        return choose(request.param).name
    except BackendError as error:
        pytest.skip(str(error))


def case_for(impl: str, **options) -> Case:
    return make_case(**DEFAULTS.get(impl, {}) | options)


@cache
def program(impl: str, **options):
    return jax.jit(partial(paged_attention, return_lse=True, impl=impl, **options))


def run(case: Case, impl: str, **changes) -> tuple[np.ndarray, np.ndarray]:
    arguments = {
        "q": case.q,
        "kv_pages": case.pool,
        "mask": case.mask,
        "lengths": case.lengths,
        "q_lens": case.q_lens,
    }
    out, lse = program(impl, **case.options)(**{**arguments, **changes})
    assert out.dtype == case.q.dtype and lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check(case: Case, impl: str) -> None:
    out, lse = run(case, impl)
    want, want_lse = case.answer()
    tolerance = TOLERANCE[str(case.q.dtype)]
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_matches_dense_attention_with_nan_in_every_hidden_slot(impl, name):
    case = case_for(impl, **QUICK[name])
    refusal = REFUSED.get(impl, {}).get(name)
    if refusal is None:
        check(case, impl)
    else:
        with pytest.raises(BackendError, match=refusal):
            run(case, impl)


@pytest.mark.parametrize("entries", [[1], [3], [4, 1], [4, 2], [6, 2]])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("packed", [True, False])
def test_xla_takes_as_many_trips_as_the_pages_need(monkeypatch, entries, queries, packed):
    case = make_case(queries=queries, window=50, packed=packed)
    chunks = [xla._Chunk(n, 1) for n in entries]
    monkeypatch.setattr(xla, "_chunks", lambda *args: chunks)
    program.cache_clear()
    assert entries[0] < case.mask.count.max()
    check(case, "xla")


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
def test_xla_on_cpu_takes_what_long_trips_leave_over_by_shorter_ones(page_size):
    cpu = describe("cpu", "cpu")
    for kv_heads, head_dim, width in itertools.product((1, 3, 8), (32, 64, 128, 256), (1, 7, 99)):
        form = layout(9, kv_heads, page_size, head_dim, "float32")
        longest, *rest = (chunk.entries for chunk in xla._chunks(kv_heads, form, width, cpu))
        assert all(longest % n == 0 and n < longest for n in rest)
        assert rest or longest <= max(1, 64 // page_size)


@pytest.mark.slow
@pytest.mark.parametrize("options", MATRIX, ids=lambda o: "-".join(map(str, o.values())))
def test_matches_dense_attention_over_the_matrix(impl, options):
    check(case_for(impl, **options), impl)


def contiguous(impl: str, length: int, page_size: int, head_dim: int):
    """Queries, keys and values of one sequence of two KV heads, and its pool of three pages."""
    dtype = DEFAULTS.get(impl, {}).get("dtype", "float32")
    rng = np.random.default_rng(length)
    q = jnp.asarray(rng.standard_normal((1, length, 4, head_dim)), dtype)
    k, v = jnp.asarray(rng.standard_normal((2, 1, length, 2, head_dim)), dtype)
    page, slot = np.divmod(np.arange(length)[None], page_size)
    pool = write_kv(empty_pages(layout(3, 2, page_size, head_dim, dtype)), k, v, page, slot)
    return q, k, v, pool


@pytest.mark.slow
def test_every_length_up_to_two_pages(impl):
    page_size = 8
    for length in range(1, 2 * page_size + 2):
        q, k, v, pool = contiguous(impl, length, page_size, 32)
        mask = stack([compact([0, 1, 2], [(0, length)], page_size, 3)])
        out, _ = program(impl, scale=1.0)(q[:, -1:], pool, mask, np.array([length]))
        want = jax.nn.dot_product_attention(*(x.astype(float) for x in (q[:, -1:], k, v)), scale=1)
        tolerance = TOLERANCE[str(q.dtype)]
        np.testing.assert_allclose(out.astype(float), want, rtol=tolerance, atol=tolerance)


def test_rows_that_see_nothing_are_zero(impl):
    case = case_for(impl, queries=6)
    out, lse = run(case, impl)
    blank = np.isneginf(case.answer()[1])
    assert blank.any() and not out[blank].any() and np.isneginf(lse[blank]).all()


def test_order_of_entries_does_not_matter(impl):
    case = case_for(impl, queries=6)
    check(case, impl)
    other = shuffled(case.mask, np.random.default_rng(1))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(case.mask, other))
    (out, lse), (other_out, other_lse) = run(case, impl), run(case, impl, mask=other)
    tolerance = min(TOLERANCE[str(case.q.dtype)], 8e-3)
    np.testing.assert_allclose(other_out, out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(other_lse, lse, rtol=1e-6, atol=1e-6)


def test_all_visible_equals_attention_without_a_mask(impl):
    length, page_size, head_dim = 40, 16, 64
    q, k, v, pool = contiguous(impl, length, page_size, head_dim)
    mask = stack([compact([0, 1, 2], [(0, length)], page_size, 3)])
    scale = head_dim**-0.5
    out, _ = program(impl, scale=scale)(q, pool, mask, np.array([length]))
    operands = (x.astype(float) for x in (q, k, v))
    want = jax.nn.dot_product_attention(*operands, scale=scale, is_causal=True)
    tolerance = TOLERANCE[str(q.dtype)]
    np.testing.assert_allclose(out.astype(float), want, rtol=tolerance, atol=tolerance)


def test_unused_entries_never_matter(impl):
    case = case_for(impl, queries=6)
    page, span, block, count = (np.array(x) for x in case.mask)
    unused = np.arange(page.shape[1]) >= count[:, None]
    page[unused], span[unused] = 0, 16 << 16
    out, _ = run(case, impl, mask=BlockMask(page, span, block, count))
    np.testing.assert_array_equal(out, run(case, impl)[0])


def test_padding_queries_never_matter(impl):
    case = case_for(impl, queries=6)
    q = np.array(case.q)
    for b, count in enumerate(case.q_lens):
        q[b, count:] = np.nan
    for poisoned, clean in zip(run(case, impl, q=q), run(case, impl)):
        np.testing.assert_array_equal(poisoned, clean)


def test_all_queries_count_by_default(impl):
    case = case_for(impl, queries=6)
    case.lengths[:] = np.maximum(case.lengths, 6)
    pool = jax.tree.map(jnp.nan_to_num, case.pool)
    full = np.full_like(case.q_lens, 6)
    for a, b in zip(
        run(case, impl, kv_pages=pool, q_lens=None), run(case, impl, kv_pages=pool, q_lens=full)
    ):
        np.testing.assert_array_equal(a, b)


def test_new_masks_never_compile_a_new_program(impl):
    """200 masks are traced; interpreters, which are slow, run a few of them only."""
    traces = []

    def counted(q, kv_pages, mask, lengths):
        traces.append(1)
        return paged_attention(q, kv_pages, mask, lengths, scale=1.0, impl=impl)

    call, rng, blocks, page_size = jax.jit(counted), np.random.default_rng(0), 12, 8
    dtype = DEFAULTS.get(impl, {}).get("dtype", "float32")
    q, pool = jnp.ones((1, 1, 1, 32), dtype), jnp.ones((blocks, 1, 1, page_size, 128), dtype)
    for turn in range(200):
        shown = rng.random(blocks) < rng.random()
        spans = [(i * page_size, i * page_size + 1) for i in np.flatnonzero(shown).tolist()]
        mask = stack([compact(rng.permutation(blocks), spans, page_size, blocks)])
        arguments = q, pool, mask, np.array([blocks * page_size], np.int32)
        call.trace(*arguments)
        if impl in HERE or turn < 5:
            np.testing.assert_allclose(call(*arguments), float(shown.any()), rtol=1e-5)
    assert len(traces) == 1
