"""Choosing a backend, refusing arguments, and what the portable backend holds in memory."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from da_jax.kernels import bench
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import (
    BackendError,
    BlockMask,
    api,
    backends,
    choose,
    compact,
    layout,
    paged_attention,
    stack,
    support,
    tuning,
)


def arguments(width: int = 2, pages: int = 4, page_size: int = 8):
    q = jnp.ones((1, 1, 2, 32))
    kv_pages = jnp.ones((pages, 2, 1, page_size, 32))
    mask = stack([compact(np.arange(pages), [(0, 2 * page_size)], page_size, width)])
    return q, kv_pages, mask, np.array([2 * page_size], np.int32)


def blocked() -> api.Backend:
    ran = lambda *_, **__: pytest.fail("ran")
    return api.Backend("blocked", ran, lambda target: "needs a moon", ran)


def test_every_backend_is_listed_with_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [blocked(), *api._BACKENDS])
    rows = {row.name: row for row in backends()}
    assert rows["xla"][:3] == ("xla", True, "") and "int8" in rows["reference"].pages
    assert rows["blocked"] == ("blocked", False, "needs a moon", ())


def test_the_default_is_the_first_that_can_run(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [blocked(), *api._BACKENDS])
    assert choose().name == "xla"
    assert paged_attention(*arguments(), scale=1.0).shape == (1, 1, 2, 32)


def test_a_backend_that_cannot_run_raises_why(monkeypatch):
    monkeypatch.setattr(api, "_BACKENDS", [*api._BACKENDS, blocked()])
    with pytest.raises(BackendError, match="'blocked' cannot run this here: needs a moon"):
        paged_attention(*arguments(), scale=1.0, impl="blocked")


def test_an_unknown_backend_raises_with_the_names():
    with pytest.raises(ValueError, match=r"'cuda'.*xla, reference"):
        paged_attention(*arguments(), scale=1.0, impl="cuda")


@pytest.mark.parametrize(
    ("q", "kv_pages", "options", "message"),
    [
        ((1, 2, 32), (4, 2, 1, 8, 32), {}, "must be"),
        ((1, 1, 2, 32), (4, 1, 1, 8, 32), {}, "no heads of size 32"),
        ((1, 1, 2, 32), (4, 2, 1, 8, 64), {}, "no heads of size 32"),
        ((1, 1, 3, 32), (4, 2, 2, 8, 32), {}, "multiple of the 2 KV heads"),
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
    page_bytes = 16 * 128 * 4
    assert [(r["batch"], r["backend"], r["visible"], r["bytes"]) for r in rows] == [
        (batch, backend, visible, batch * pages * page_bytes)
        for batch in (1, 2)
        for backend in ("xla", "reference")
        for visible, pages in ((1.0, 7), (0.3, 2))
    ]
    assert list(rows[0])[5:] == ["bytes", "gb_per_s", "roof_share", "ratio"]
    assert all(r["ms"] >= 0 and r["context"] == 100 and r["ratio"] > 0 for r in rows)
    assert [r["ratio"] for r in rows[::2]] == [1] * 4
    assert bench.machine()["platform"] == jax.default_backend()


def test_bench_refuses_fractions_outside_the_context():
    with pytest.raises(ValueError, match=r"\[0, 1\.5\]"):
        bench.attention_rows(visible=[0, 0.5, 1.5])


@pytest.fixture
def counting(monkeypatch, tmp_path):
    """A backend `counting` with settings 1, 2 and 3, of which 2 is the fastest and 3 fails."""
    monkeypatch.setenv("DA_JAX_TUNING", str(tmp_path / "tuned.json"))

    class Used(list):
        pass

    used = Used()

    @dataclasses.dataclass(frozen=True)
    class Config:
        size: int

    def attend(q, *arguments, config, **options):
        used.append(config)
        if config and config.size == 3:
            raise ValueError("too large")
        return q, q[..., 0]

    module = SimpleNamespace(
        Config=Config, attend=attend, candidates=lambda *_: [Config(1), Config(2), Config(3)]
    )
    monkeypatch.setattr(bench, "kernel_module", lambda name: module)
    monkeypatch.setattr(api, "kernel_module", lambda name: module)
    monkeypatch.setattr(support, "obstacle", lambda *_: None)
    monkeypatch.setattr(support, "refuses_dtype", lambda *_: None)
    module.refuses = lambda *_: None
    used.config = Config
    monkeypatch.setattr(api, "_BACKENDS", [api._pallas("counting")])
    times = iter([5.0, 3.0])
    monkeypatch.setattr(bench, "median_ms", lambda calls, _: [(calls[0](), next(times))[1]])
    return used


def test_tuning_stores_the_fastest_setting_and_later_calls_use_it(counting):
    shape = bench.Shape(q_heads=2, kv_heads=1, head_dim=128, page_size=16)
    rows = bench.tune(64, 1, None, shape)
    assert [row["ms"] for row in rows] == [5.0, 3.0, None]
    assert [row["stored"] for row in rows] == [False, True, False]
    assert rows[2]["error"] == "too large"
    rng = np.random.default_rng(0)
    q, kv_pages = bench._arrays(rng, 64, 1, shape)
    mask = bench._mask(rng, 64, 1, 1.0, shape)
    paged_attention(q, kv_pages, mask, np.array([64]), scale=1.0)
    assert counting[-1].size == 2
    paged_attention(q.astype(jnp.bfloat16), kv_pages, mask, np.array([64]), scale=1.0)
    assert counting[-1] is None  # another problem


def test_tuning_can_be_turned_off_and_a_broken_file_is_named(counting, monkeypatch, tmp_path):
    shape = bench.Shape(q_heads=2, kv_heads=1, head_dim=128, page_size=16)
    (tmp_path / "tuned.json").write_text("{")
    with pytest.raises(ValueError, match=r"tuned\.json.*delete it"):
        bench.tune(64, 1, None, shape)
    monkeypatch.setenv("DA_JAX_TUNING", "off")
    with pytest.raises(ValueError, match="is off"):
        bench.tune(64, 1, None, shape)


@pytest.mark.parametrize("entry", [{"block": 1}, {"size": 1, "more": 2}, [1], 7])
def test_settings_of_another_version_are_named_with_the_remedy(
    counting, monkeypatch, tmp_path, entry
):
    shape = bench.Shape(q_heads=2, kv_heads=1, head_dim=128, page_size=16)
    bench.tune(64, 1, None, shape)
    file = tmp_path / "tuned.json"
    (name,) = json.loads(file.read_text())
    file.write_text(json.dumps({name: entry}))
    with pytest.raises(ValueError, match=r"tuned\.json.*another version; delete the file"):
        tuning.stored("counting", current_target(), bench._problem(64, 1, shape), counting.config)


def test_backends_without_settings_are_not_tuned():
    with pytest.raises(ValueError, match=r"'xla' has no settings to measure here: .*mosaic_tpu"):
        bench.tune(64, 1, "xla", bench.Shape(2, 1, 32, 16))


def test_masks_on_the_host_are_checked():
    q, kv_pages, mask, lengths = arguments()
    mask.page[0, 1] = 4
    with pytest.raises(ValueError, match="entry 1: page 4"):
        paged_attention(q, kv_pages, mask, lengths, scale=1.0)


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("shape", [(0, 1, 2), (1, 0, 2), (1, 1, 0)], ids=["B", "T", "W"])
def test_nothing_asked_or_listed_gives_zeros(impl, shape):
    batch, queries, width = shape
    q, kv_pages, _, _ = arguments()
    q = jnp.ones((batch, queries, 2, 32))
    table = np.zeros((batch, width), np.int32)
    mask = BlockMask(table, table, table, np.zeros(batch, np.int32))
    lengths = np.ones(batch, np.int32)
    out, lse = paged_attention(q, kv_pages, mask, lengths, scale=1.0, return_lse=True, impl=impl)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and np.isneginf(lse).all()


def test_dtypes_that_mean_nothing_are_refused():
    q, kv_pages, mask, lengths = arguments()
    with pytest.raises(ValueError, match="q is int32: make it one of"):
        paged_attention(q.astype(jnp.int32), kv_pages, mask, lengths, scale=1.0)
    with pytest.raises(ValueError, match="pages cannot be uint8: choose one of float32"):
        paged_attention(q, kv_pages.astype(jnp.uint8), mask, lengths, scale=1.0)
    with pytest.raises(ValueError, match="pages cannot be float8_e5m2"):
        layout(1, 1, 16, 128, "float8_e5m2")
    with pytest.raises(ValueError, match=r"kv_pages .*tuple.*QuantizedPages"):
        paged_attention(q, (kv_pages, kv_pages), mask, lengths, scale=1.0)


@pytest.mark.parametrize("impl", ["xla", "triton:interpret"])
def test_a_window_beyond_every_position_is_no_window(impl):
    q, kv_pages, mask, lengths = arguments()
    run = lambda window: paged_attention(
        q, kv_pages, mask, lengths, scale=1.0, window=window, return_lse=True, impl=impl
    )
    for wide in (2**31 - 1, 2**40):
        np.testing.assert_array_equal(run(wide)[1], run(None)[1])


@pytest.mark.parametrize("impl", ["xla", "mosaic_tpu:interpret"])
def test_counts_outside_the_mask_do_not_hang_or_count_twice(impl):
    q, _, mask, lengths = arguments()
    kv_pages = jnp.ones((4, 1, 1, 8, 128))
    call = jax.jit(
        lambda mask: paged_attention(
            q, kv_pages, mask, lengths, scale=1.0, return_lse=True, impl=impl
        )
    )
    _, lse = call(mask)
    np.testing.assert_array_equal(call(mask._replace(count=mask.count + 9))[1], lse)
    assert np.isneginf(call(mask._replace(count=mask.count - 9))[1]).all()


def test_the_gpu_interpreter_is_refused_where_it_would_hang(monkeypatch):
    monkeypatch.setattr(support.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.delenv("NPROC", raising=False)
    with pytest.raises(BackendError, match="set NPROC=2"):
        choose("mosaic_gpu:interpret")
    monkeypatch.setenv("NPROC", "2")
    assert "NPROC" not in (support.interpreter_obstacle("mosaic_gpu") or "")
