"""What is particular to the TPU kernel: its transfers, its plans, its refusals, its programs."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from support.paged_cases import TOLERANCE, Case, make_case

from da_jax.kernels import chips
from da_jax.kernels.paged_attention import (
    BlockMask,
    Problem,
    QuantizedPages,
    layout,
    paged_attention,
)
from da_jax.kernels.paged_attention import mosaic_tpu as tpu
from da_jax.kernels.paged_attention import mosaic_tpu_plan as plan_of

V5E = chips.describe("tpu", "TPU v5 lite")
V5P = chips.describe("tpu", "TPU v5")
SMALL = tpu.Config(block_bytes=1, tile_rows=8)


def run(case: Case, target=V5E, config=SMALL) -> tuple[np.ndarray, np.ndarray]:
    options = {"softcap": None, "window": None, **case.options}
    attend = partial(tpu.attend, **options, target=target, config=config, interpret=True)
    mask = BlockMask(*map(jnp.asarray, case.mask))
    out, lse = jax.jit(attend)(
        case.q, case.pool, mask, jnp.asarray(case.lengths), jnp.asarray(case.q_lens)
    )
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def check(case: Case, target=V5E, config=SMALL) -> None:
    out, lse = run(case, target, config)
    want, want_lse = case.answer()
    tolerance = TOLERANCE[str(case.q.dtype)]
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def problem(**changes) -> Problem:
    asked = {
        "batch": 8, "queries": 1, "group": 4, "width": 512, "q_dtype": "bfloat16",
        "kv_heads": 8, "page_size": 64, "head_dim": 128, "kv_dtype": "bfloat16", **changes,
    }  # fmt: skip
    form = layout(4096, asked["kv_heads"], asked["page_size"], asked["head_dim"], asked["kv_dtype"])
    return Problem(
        asked["batch"], asked["queries"], asked["kv_heads"] * asked["group"], asked["width"],
        asked["q_dtype"], form,
    )  # fmt: skip


def decode() -> Case:
    return make_case(page_size=64, head_dim=128, kv_heads=1)


def chunk() -> Case:
    return make_case(page_size=64, head_dim=128, kv_heads=1, queries=9, window=70)


def test_blocks_and_tiles_smaller_than_a_sequence():
    plan = plan_of.make_plan(
        problem(page_size=64, kv_heads=1, group=2, queries=9, width=9), V5E, SMALL
    )
    assert plan.pages == 2 and plan.tiles == 3
    check(chunk())


def test_two_cores_share_the_heads():
    assert plan_of.make_plan(problem(), V5P, SMALL).cores == 2
    case = make_case(page_size=64, head_dim=128, group=4, queries=17, kv_dtype="int8")
    check(case, V5P, tpu.Config(block_bytes=1))


def nothing(*args) -> None:
    return None


def one_page_on(refs, plan, at):
    spans = read_spans(refs, plan, at)
    return [*spans[-1:], *spans[:-1]]


def without_positions(refs, plan, step, slots):
    return jnp.broadcast_to(slots.shown, (plan.rows, plan.slots))


read_spans = tpu.read_spans
FAULTS = {
    "no wait": (decode, SMALL, "wait_block", nothing),
    "no zeroes where no page came": (decode, tpu.Config(), "clear_buffers", nothing),
    "hidden values not cleaned": (decode, SMALL, "clean_hidden", nothing),
    "mask off by a page": (decode, SMALL, "read_spans", one_page_on),
    "no causality and no window": (chunk, SMALL, "visible", without_positions),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(monkeypatch, name):
    make, config, function, fault = FAULTS[name]
    monkeypatch.setattr(tpu, function, fault)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(make(), config=config)


def test_the_interpreter_refuses_pages_outside_the_pool(monkeypatch):
    cut = tpu.tables

    def unclamped(*args, **kwargs):
        found = cut(*args, **kwargs)
        return found._replace(page=found.page + 1000)

    monkeypatch.setattr(tpu, "tables", unclamped)
    try:
        with pytest.raises(Exception, match="ut-of-bounds"):
            run(decode())
    finally:
        tpu.pltpu.reset_tpu_interpret_mode_state()


def test_a_batch_whose_tables_do_not_fit_is_split(monkeypatch):
    case, batches, call = decode(), [], tpu._call

    def counted(q, *args):
        batches.append(q.shape[0])
        return call(q, *args)

    width = case.mask.page.shape[1]
    monkeypatch.setattr(plan_of, "SMEM_BYTES", plan_of.smem_bytes(4, width, 1, 1))
    monkeypatch.setattr(tpu, "_call", counted)
    check(case)
    assert batches == [4, 4]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"page_size": 12}, ["page size 12", "multiple of 8"]),
        ({"head_dim": 192}, ["head dim 192", "pad the heads to 256"]),
        ({"width": 200_000}, ["bytes of SMEM", "200000", "larger pages than 64"]),
        ({"page_size": 16384, "head_dim": 512}, ["bytes of VMEM", "smaller pages than 16384"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(changes, words):
    reason = tpu.refuses(problem(**changes), V5E)
    assert reason is not None and all(word in reason for word in words), reason


def test_unpacked_small_heads_are_refused():
    form = layout(64, 2, 64, 64, "bfloat16")
    form = type(form)(**{**form.__dict__, "packed": False})
    reason = tpu.refuses(Problem(1, 1, 4, 8, "bfloat16", form), V5E)
    assert reason is not None and "unpacked" in reason and "empty_pages" in reason


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("queries", [1, 512])
def test_plans_fit(kind, queries):
    target = chips.describe("tpu", kind)
    for changes in (
        {}, {"head_dim": 64, "page_size": 16}, {"head_dim": 512, "group": 8, "kv_heads": 4},
        {"q_dtype": "float32", "kv_dtype": "float32"}, {"kv_dtype": "int8", "page_size": 128},
    ):  # fmt: skip
        asked = problem(queries=queries, **changes)
        assert tpu.refuses(asked, target) is None
        first, *others = tpu.candidates(asked, target)
        assert first == tpu.Config() and first not in others
        plan = plan_of.make_plan(asked, target, first)
        assert plan.vmem_bytes <= target.fast_memory * 5 // 8
        assert plan.pages * asked.form.page_bytes <= 2 * plan.cores * first.block_bytes


def compiled(topology: str, asked: Problem):
    """The program for a chip that is not here."""
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)
    form, entries = asked.form, (asked.batch, asked.width)
    pool = jax.ShapeDtypeStruct(form.shape, form.dtype)
    if form.quantized:
        scales = jax.ShapeDtypeStruct(form.scales_shape, jnp.float32)
        pool = QuantizedPages(pool, scales)
    whole, row = (jax.ShapeDtypeStruct(x, jnp.int32) for x in (entries, entries[:1]))
    q = jax.ShapeDtypeStruct(
        (asked.batch, asked.queries, asked.q_heads, form.head_dim), asked.q_dtype
    )
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (q, pool, BlockMask(whole, whole, whole, row), row, row),
    )
    attend = partial(
        tpu.attend, scale=1.0, softcap=30.0, window=None, config=None, interpret=False,
        target=chips.describe("tpu", device.device_kind),
    )  # fmt: skip
    abstract = AbstractDevice(device.device_kind, device.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = jax.jit(attend).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(
    "topology",
    [
        "v5e:2x2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
        ),
    ],
)
def test_compiles_without_a_copy_of_the_pool(monkeypatch, topology):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    for asked in (
        problem(),
        problem(head_dim=64, queries=4),
        problem(kv_dtype="int8"),
    ):
        # A pool that would fit VMEM could be copied there unnoticed.
        assert asked.form.num_pages * asked.form.page_bytes > 2 * V5E.fast_memory
        assert compiled(topology, asked).memory_analysis().temp_size_in_bytes < 4 << 20


def test_8_bit_pages_are_read_outside_jit_too():
    case = make_case(head_dim=128, page_size=32, kv_dtype="int8")
    out = paged_attention(
        case.q, case.pool, case.mask, case.lengths, case.q_lens, impl="mosaic_tpu:interpret",
        **case.options,
    )  # fmt: skip
    np.testing.assert_allclose(out, case.answer()[0], rtol=1e-5, atol=1e-5)
