"""What is particular to the Mosaic GPU backend: its sizes, its lowering, planted faults.

The interpreter of Mosaic GPU runs the warpgroups of a program as threads that wait for each other.
"""

import itertools
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paged_cases import TOLERANCE, Case, make_case

from da_jax.kernels import chips
from da_jax.kernels.paged_attention import BlockMask, empty_pages, layout
from da_jax.kernels.paged_attention.support import Problem

mosaic_gpu = pytest.importorskip("da_jax.kernels.paged_attention.mosaic_gpu")
plan_module = pytest.importorskip("da_jax.kernels.paged_attention.mosaic_gpu_plan")
plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

H200 = chips.describe("gpu", "NVIDIA H200")
needs_jax_0_11 = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="the kernel and its interpreter need jax 0.11 or newer",
)
interpreted = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 and int(os.environ.get("NPROC", "1")) < 2,
    reason="the interpreter needs a thread for each warpgroup: set NPROC=2 on one core",
)


def problem(
    *, head_dim=128, kv_heads=8, group=4, page_size=64, batch=8, queries=1, width=512,
    q_dtype="bfloat16", dtype="bfloat16", packed=None, windowed=False,
) -> Problem:  # fmt: skip
    form = layout(4096, kv_heads, page_size, head_dim, dtype)
    form = form if packed is None else replace(form, packed=packed)
    return Problem(batch, queries, kv_heads * group, width, q_dtype, form, windowed)


def run(case: Case, config=None) -> tuple[np.ndarray, np.ndarray]:
    arrays = (case.q, case.pool, case.mask, case.lengths, case.q_lens)
    options = {"softcap": None, "window": None, **case.options}
    out, lse = jax.jit(
        lambda *args: mosaic_gpu.attend(
            *args, **options, target=H200, config=config, interpret=True
        )
    )(*jax.tree.map(jnp.asarray, arrays))
    assert out.dtype == case.q.dtype and lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check(case: Case, config=None) -> None:
    out, lse = run(case, config)
    want, want_lse = case.answer()
    tolerance = TOLERANCE[str(case.q.dtype)]
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@needs_jax_0_11
@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 32, "window": 20},
        {"head_dim": 64, "queries": 2, "packed": False, "kv_heads": 1},
        {"head_dim": 128, "queries": 21, "window": 20, "group": 3, "kv_heads": 1},
        {"head_dim": 256, "group": 5, "kv_heads": 1, "queries": 7, "softcap": 0.7},
        {"head_dim": 512, "group": 8, "kv_heads": 1, "page_size": 8},
        {"head_dim": 128, "kv_dtype": "int8", "page_size": 32, "kv_heads": 1, "window": 33},
        {"head_dim": 64, "kv_dtype": "float8_e4m3fn", "page_size": 32, "kv_heads": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_half_precision_matches_dense_attention(options):
    check(make_case(**{"dtype": "bfloat16", **options}))


@needs_jax_0_11
@interpreted
@pytest.mark.parametrize(
    ("page_size", "splits", "stages", "block"),
    [(16, 2, 3, 64), (16, 3, 2, 128), (128, 2, 5, 64)],
)
def test_any_config_gives_the_same(page_size, splits, stages, block):
    case = make_case(dtype="bfloat16", page_size=page_size, kv_heads=1)
    check(case, mosaic_gpu.Config(splits=splits, stages=stages, block=block))


def _skip(*args):
    """Stands for a step of the kernel that was forgotten."""


def _fault(name: str):
    """A faulty version of a part of the kernel."""
    right = getattr(mosaic_gpu, name)
    faults = {
        "_wait_filled": _skip,
        "_hide_values": _skip,
        # The mask lies one entry behind the keys.
        "_entry": lambda plan, table, program, at: right(plan, table, program, at + 1),
        # The last unit of each split is lost.
        "_share": lambda *args: (right(*args)[0], right(*args)[1] - 1),
        # Queries see one token too many.
        "_query_positions": lambda *args: right(*args) + 1,
    }
    return faults[name]


@needs_jax_0_11
@interpreted
@pytest.mark.parametrize(
    "name", ["_wait_filled", "_hide_values", "_entry", "_share", "_query_positions"]
)
def test_comparison_fails_with_a_fault(monkeypatch, name):
    queries = 2 if name == "_query_positions" else 1
    case = make_case(dtype="bfloat16", kv_heads=1, queries=queries)
    config = mosaic_gpu.Config(splits=2, stages=3, block=64)
    monkeypatch.setattr(mosaic_gpu, name, _fault(name))
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(case, config)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_dtype": "float32"}, "queries of float32 over pages of bfloat16"),
        ({"q_dtype": "float32", "dtype": "float32"}, "queries of float32 over pages of float32"),
        ({"q_dtype": "float16", "dtype": "int8"}, "queries of float16 over pages of int8"),
        ({"dtype": "int8", "page_size": 16}, "pages of 16 tokens of 8 bits"),
        ({"dtype": "int8", "head_dim": 192}, "head dim 192 with pages of 8 bits"),
        ({"head_dim": 96}, "head dim 96"),
        ({"head_dim": 32, "packed": False}, "head dim 32"),
        ({"page_size": 4}, "pages of 4 tokens"),
        ({"page_size": 48}, "pages of 48 tokens"),
        ({"head_dim": 512, "group": 40}, "40 query heads a KV head"),
        ({"head_dim": 1024}, "bytes of shared memory"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, words):
    assert words in mosaic_gpu.refuses(problem(**changes), H200)


@needs_jax_0_11
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("group", "queries"), [(1, 1), (5, 1), (8, 1), (16, 1), (4, 100)])
def test_candidates_fit_and_cover_the_head_dim(group, queries, dtype):
    for page_size, head_dim in itertools.product(
        (8, 16, 32, 64, 128, 192, 256), (32, 64, 128, 192, 256, 512)
    ):
        if dtype == "int8" and (page_size < 32 or head_dim == 192):
            continue
        asked = problem(
            page_size=page_size, head_dim=head_dim, group=group, queries=queries, dtype=dtype
        )
        assert mosaic_gpu.refuses(asked, H200) is None
        configs = mosaic_gpu.candidates(asked, H200)
        assert len(set(configs)) == len(configs) >= 2
        for config in configs:
            plan = plan_module.plan_of(asked, config)
            assert plan_module.misfit(plan, H200) is None
            assert plan.lanes % plan.slab == 0 and plan.rows >= plan.tile * group
            assert plan.pages * plan.piece == config.block
            assert plan.parts * plan.piece == max(page_size, plan.piece)


def test_default_fills_the_chip_once_with_enough_in_flight():
    for head_dim in (64, 128, 256, 512):
        asked = problem(head_dim=head_dim)
        config = mosaic_gpu.candidates(asked, H200)[0]
        lanes = asked.form.head_dim
        programs = config.splits * asked.batch * asked.form.kv_heads
        a_core = 1 if head_dim == 512 else 2
        assert a_core * H200.cores / 2 < programs <= a_core * H200.cores
        assert a_core * config.stages * config.block * lanes * 2 >= 64 << 10


@needs_jax_0_11
def test_config_that_does_not_fit_is_an_error_with_a_remedy():
    case = make_case(dtype="bfloat16")
    with pytest.raises(ValueError, match=r"bytes of shared memory, .* take fewer stages"):
        run(case, mosaic_gpu.Config(splits=1, stages=64, block=64))
    with pytest.raises(ValueError, match="blocks of 96 tokens"):
        run(case, mosaic_gpu.Config(splits=1, stages=2, block=96))


@needs_jax_0_11
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64, "group": 5, "page_size": 16},
        {"head_dim": 128, "page_size": 256, "windowed": True},
        {"head_dim": 256, "queries": 16},
        {"head_dim": 512, "kv_heads": 4, "group": 8},
        {"head_dim": 128, "dtype": "int8"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_lowers_for_hopper(changes):
    asked = problem(**changes)
    form, table = asked.form, jax.ShapeDtypeStruct((asked.batch, asked.width), jnp.int32)
    pages = jax.eval_shape(lambda: empty_pages(form))
    each = jax.ShapeDtypeStruct((asked.batch,), jnp.int32)
    q = (asked.batch, asked.queries, asked.q_heads, form.head_dim)
    program = jax.jit(
        lambda q, pages, mask, lengths, q_lens: mosaic_gpu.attend(
            q, pages, mask, lengths, q_lens, scale=0.1, softcap=30.0,
            window=100 if asked.windowed else None, target=H200,
        )
    )  # fmt: skip
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        lowered = program.trace(
            jax.ShapeDtypeStruct(q, asked.q_dtype), pages,
            BlockMask(table, table, table, each), each, each,
        ).lower(lowering_platforms=("cuda",))  # fmt: skip
    assert "mosaic_gpu" in lowered.as_text()
