"""Choosing a backend, refusing arguments, and what the portable backend holds in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from da_jax.kernels import bench
from da_jax.kernels.paged_attention import (
    api,
    backends,
    choose,
    compact,
    paged_attention,
    stack,
)


def arguments(width: int = 2, pages: int = 4, page_size: int = 8):
    q = jnp.ones((1, 1, 2, 32))
    kv_pages = jnp.ones((pages, 2, 1, page_size, 32))
    mask = stack([compact(np.arange(pages), [(0, 2 * page_size)], page_size, width)])
    return q, kv_pages, mask, np.array([2 * page_size], np.int32)


def blocked() -> api.Backend:
    return api.Backend("blocked", lambda *_, **__: pytest.fail("ran"), lambda: "needs a moon")


def test_every_backend_is_listed_with_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [blocked(), *api._BACKENDS])
    rows = {row.name: row for row in backends()}
    assert rows["xla"] == ("xla", True, "") and rows["reference"].available
    assert rows["blocked"] == ("blocked", False, "needs a moon")


def test_the_default_is_the_first_that_can_run(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [blocked(), *api._BACKENDS])
    assert choose().name == "xla"
    assert paged_attention(*arguments(), scale=1.0).shape == (1, 1, 2, 32)


def test_a_backend_that_cannot_run_raises_why(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [*api._BACKENDS, blocked()])
    with pytest.raises(RuntimeError, match="'blocked' cannot run here: needs a moon"):
        paged_attention(*arguments(), scale=1.0, impl="blocked")


def test_an_unknown_backend_raises_with_the_names():
    with pytest.raises(ValueError, match=r"'cuda'.*xla, reference"):
        paged_attention(*arguments(), scale=1.0, impl="cuda")


@pytest.mark.parametrize(
    ("q", "kv_pages", "options", "message"),
    [
        ((1, 2, 32), (4, 2, 1, 8, 32), {}, "must be"),
        ((1, 1, 2, 32), (4, 1, 1, 8, 32), {}, "must be"),
        ((1, 1, 2, 32), (4, 2, 1, 8, 64), {}, "head dims must be equal"),
        ((1, 1, 3, 32), (4, 2, 2, 8, 32), {}, "multiple of the KV heads"),
        ((2, 1, 2, 32), (4, 2, 1, 8, 32), {}, "batch of 2"),
        ((1, 1, 2, 32), (4, 2, 1, 8, 32), {"window": 0}, "window 0"),
        ((1, 1, 2, 32), (4, 2, 1, 8, 32), {"softcap": 0.0}, r"softcap 0\.0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(q, kv_pages, options, message):
    _, _, mask, lengths = arguments()
    with pytest.raises(ValueError, match=message):
        paged_attention(jnp.ones(q), jnp.ones(kv_pages), mask, lengths, scale=1.0, **options)


def test_memory_does_not_grow_with_the_width_of_the_mask():
    def temporaries(width: int) -> int:
        q, kv_pages, mask, lengths = arguments(width, pages=4, page_size=64)
        call = jax.jit(lambda *x: paged_attention(*x, scale=1.0, impl="xla"))
        program = call.lower(q, kv_pages, mask, lengths).compile()
        return program.memory_analysis().temp_size_in_bytes

    tables = 3 * 4 * (8192 - 1024)
    assert temporaries(8192) < temporaries(1024) + 2 * tables


@pytest.mark.parametrize("name", ["lengths", "q_lens"])
@pytest.mark.parametrize("bad", [np.array([3], np.int32), np.array([3.0, 3.0], np.float32)])
def test_lengths_of_another_shape_or_kind_are_refused(name, bad):
    shape = bench.Shape(q_heads=2, kv_heads=1, head_dim=32, page_size=16)
    rng = np.random.default_rng(0)
    q, kv_pages = bench._arrays(rng, 32, 2, shape)
    mask = bench._mask(rng, 32, 2, 1.0, shape)
    arguments = {"lengths": np.array([3, 3], np.int32), "q_lens": None, name: bad}
    with pytest.raises(ValueError, match=name):
        paged_attention(q, kv_pages, mask, **arguments, scale=1.0)


def test_bench_rows():
    shape = bench.Shape(q_heads=2, kv_heads=1, head_dim=32, page_size=16)
    rows = bench.attention_rows([100], [1, 2], [1.0, 0.3], ["xla", "reference"], shape, repeats=1)
    page_bytes = 2 * 16 * 32 * 4
    assert [(r["batch"], r["backend"], r["visible"], r["bytes"]) for r in rows] == [
        (batch, backend, visible, batch * pages * page_bytes)
        for batch in (1, 2)
        for backend in ("xla", "reference")
        for visible, pages in ((1.0, 7), (0.3, 2))
    ]
    assert list(rows[0]) == ["backend", "context", "batch", "visible", "ms", "bytes", "ratio"]
    assert all(r["ms"] >= 0 and r["context"] == 100 and r["ratio"] > 0 for r in rows)
    assert [r["ratio"] for r in rows[::2]] == [1] * 4
    assert bench.machine()["platform"] == jax.default_backend()


def test_bench_refuses_fractions_outside_the_context():
    with pytest.raises(ValueError, match=r"\[0, 1\.5\]"):
        bench.attention_rows(visible=[0, 0.5, 1.5])
