"""Keys and values in 8 bits: pages and rings against dense attention over rounded keys and values.

A number that lies between two steps may round up here and down there, as the last bits of a key
differ between programs. So errors are compared with what rounding itself does to the logits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.test_proofs import CHUNKS, QUESTION, SCRIPT, modes, visible_per_query
from support import references, tiny
from support.dense import dense_logits

from da_jax import LLM, Style
from da_jax.cache import pools, states
from da_jax.checkpoints import hf
from da_jax.engine.packing import pack
from da_jax.engine.runner import Rows, Runner, Shapes, forward
from da_jax.engine.sampling import SamplingRows
from da_jax.kernels import chips
from da_jax.kernels.paged_attention import compact, stack
from da_jax.models import dtypes

pytestmark = pytest.mark.long

LENGTH, ROWS = references.LENGTH, 2
SLOTS = np.array([2, 0], np.int32)
NO_SAMPLING = SamplingRows(*[np.zeros(0)] * 6)
HOLE = ((0, references.HIDDEN[0]), (references.HIDDEN[1], LENGTH))
CASES = [
    ("qwen3", "float8_e4m3fn", 4),
    ("gemma3_1b", "int8", 4),  # rings, one KV head
    ("gemma4_e2b", "int8", 16),  # donors
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("qwen3", "int8", 16),
            ("gemma4_31b", "float8_e4m3fn", 16),  # rings, keys that are values
            ("qwen3_5", "int8", 16),  # states besides
        ]
    ),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return functools.cache(
        lambda name: hf.load(
            references.write_folder(name, tmp_path_factory.mktemp(name)), dtype=np.float32
        )
    )


def garbage(caches):
    """Values of 8 bits that mean nothing, NaN among the floats, under large finite scales."""

    def spoil(x):
        if x.dtype == jnp.int8:
            return jnp.full_like(x, 99)
        return jnp.full_like(x, np.nan if x.dtype.itemsize == 1 else 1e30)

    return caches._replace(
        **{k: jax.tree.map(spoil, getattr(caches, k)) for k in ("pages", "rings")}
    )


@pytest.fixture(scope="module")
def paged(load):
    """`Paged` of a case, compiled once."""
    return functools.cache(lambda name, *options: Paged(load(name), *options))


class Paged:
    """The engine's forward pass over caches of 8 bits."""

    step = 24

    def __init__(self, model, kv_dtype, page_size):
        self.page_size, self.blocks = page_size, -(-LENGTH // page_size)
        plan = self.plan = pools.plan(
            model.config, page_size=page_size, max_tokens=LENGTH, sequences=3, snapshots=1,
            longest_step=self.step, dtype=jnp.float32, kv_dtype=kv_dtype, budget_bytes=2**40,
        )  # fmt: skip

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run(caches, tokens, position, q_lens, rows):
            held = states.take(caches, rows.slot, position)
            out = forward(model, plan, held, tokens, position, q_lens, rows, impl=None)
            return model.logits(out[0]), states.put(caches, out[1], rows.slot)

        self.run = run

    def logits(self, fill):
        """[ROWS, LENGTH, V]: ragged chunks, then single steps, of which the last see a hole."""
        ids = references.token_ids()
        order = np.random.default_rng(1).permutation(self.plan.num_pages).astype(np.int32)
        tables = order[: ROWS * self.blocks].reshape(ROWS, -1)
        caches, at = fill(pools.allocate(self.plan)), np.zeros(ROWS, np.int32)
        logits = np.full((ROWS, LENGTH, references.VOCAB), np.nan, np.float32)
        chunks = [(24, 5), (0, 24), (17, 1), (19, 24), (0, 6)]  # 60 tokens each
        for sizes in [*chunks, *[(1, 1)] * (LENGTH - references.MASK_FROM)]:
            spans = HOLE if min(at) >= references.MASK_FROM else ((0, LENGTH),)
            tokens = np.full((ROWS, 1 if max(sizes) == 1 else self.step), 499, np.int32)
            for row, size in enumerate(sizes):
                tokens[row, :size] = ids[row, at[row] : at[row] + size]
            mask = stack([compact(t, spans, self.page_size, self.blocks + 4) for t in tables])
            rows = Rows(tables, mask, SLOTS, NO_SAMPLING)
            out, caches = self.run(caches, tokens, at, np.array(sizes, np.int32), rows)
            for row, size in enumerate(sizes):
                logits[row, at[row] : at[row] + size] = out[row, :size]
            at = at + np.array(sizes, np.int32)
        assert at.tolist() == [LENGTH] * ROWS
        return logits


@pytest.mark.parametrize(("name", "kv_dtype", "page_size"), CASES)
def test_pages_and_rings_equal_dense_attention_over_rounded_rows(
    load, paged, name, kv_dtype, page_size
):
    model, mask = load(name), references.visible_mask()
    got = paged(name, kv_dtype, page_size).logits(garbage)
    ids = references.token_ids()
    exact, want = (dense_logits(model, ids, mask, kind) for kind in (None, kv_dtype))
    assert np.isfinite(got).all()
    cost, error = np.abs(want - exact), np.abs(got - want)
    assert cost.max() > 1e-3  # rounding is seen at all
    assert error.mean() < cost.mean() / 10 and error.max() < cost.max() / 3


@pytest.mark.parametrize(("name", "kv_dtype", "page_size"), CASES[:2])
def test_what_pages_and_rings_held_before_changes_no_bit(paged, name, kv_dtype, page_size):
    program = paged(name, kv_dtype, page_size)
    clean, dirty = program.logits(lambda caches: caches), program.logits(garbage)
    np.testing.assert_array_equal(clean, dirty)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The engine of a case in a KV dtype, and the model's folder."""
    folder = functools.cache(
        lambda name: tiny.write_folder(tmp_path_factory.mktemp(name) / "model", name)
    )

    @functools.cache
    def llm(name, kv_dtype):
        config = dataclasses.replace(tiny.ENGINE, kv_dtype=kv_dtype)
        return LLM.from_pretrained(folder(name), style=Style(**tiny.STYLE), config=config)

    return lambda name, kv_dtype: (llm(name, kv_dtype), folder(name))


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "fp8"), ("gemma3_1b", "int8")])
def test_the_engine_decodes_what_a_dense_pass_over_rounded_rows_gives(engines, name, kv_dtype):
    llm, folder = engines(name, kv_dtype)
    response = llm.generate(CHUNKS, QUESTION, forced=SCRIPT, max_tokens=170, logprobs=0)
    assert llm.compilations_after_warmup == 0  # nothing else has run since
    prompt = llm.request(CHUNKS, QUESTION).prompt
    count = len(modes(SCRIPT)) + 1
    ids = np.concatenate([prompt.ids, response.token_ids])[: len(prompt) + count - 1]
    mask = visible_per_query(response, prompt)[: len(ids), : len(ids)]
    model = hf.load(folder, dtype=np.float32)

    def logprobs(kind):
        logits = dense_logits(model, ids[None], mask, kind)[0, len(prompt) - 1 :]
        logits = logits - logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return logits[np.arange(count), response.token_ids[:count]]

    want, exact = logprobs(dtypes.KV_DTYPES[kv_dtype]), logprobs(None)
    got = np.array([entry.logprob for entry in response.logprobs[:count]])
    assert np.abs(got - want).mean() < np.abs(want - exact).mean() / 10


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "fp8"), ("gemma3_1b", "int8")])
def test_a_batch_gives_what_each_request_gives_alone(engines, name, kv_dtype):
    llm, _ = engines(name, kv_dtype)
    documents, questions = [CHUNKS[: 1 + i] for i in range(4)], ["which?", "a?", "b" * 40, "c?"]
    options = dict(max_tokens=40, ignore_eos=True)
    alone = [llm.generate([d], [q], **options)[0] for d, q in zip(documents, questions)]
    together = llm.generate(documents, questions, **options)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert all(len(r.token_ids) == 40 for r in alone)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_1b"])
def test_the_plan_is_what_is_allocated(engines, name):
    llm, _ = engines(name, "int8")
    caches, memory = llm.engine.runner.caches, llm.memory
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert memory.kv_dtype == "int8"
    assert nbytes(caches) == memory.caches == llm.engine.runner.plan.bytes
    assert nbytes(caches.pages) == memory.pages
    assert nbytes(caches.rings) == memory.rings + memory.snapshots
    assert bool(memory.snapshots) == (name != "qwen3")
    assert nbytes(llm.engine.runner.weights) == memory.room.weights


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_programs_update_pages_and_rings_in_place(load, kv_dtype):
    """Compiled for pools so large that a copy of any of them would show, and for one sequence."""
    model = load("gemma3_1b")
    plan = pools.plan(
        model.config, page_size=16, max_tokens=2048, sequences=8192, longest_step=8,
        dtype=jnp.float32, kv_dtype=kv_dtype, budget_bytes=2**50,
    )  # fmt: skip
    forms = Shapes(batches=(1,), chunks=(8,), burst=2, entries=160, blocks=128, stop_ids=2)
    vocabulary = model.config.vocab_size
    runner = Runner(
        model, forms, plan, costs=np.zeros(vocabulary, np.int32),
        opens=np.zeros(vocabulary, bool), caches=jax.eval_shape(lambda: pools.allocate(plan)),
    )  # fmt: skip
    smallest = min(form.num_pages * form.page_bytes for form in plan.rings.values())
    for _, program, inputs in runner.programs():
        lowered = program.lower(runner.weights, runner.caches, runner._put(pack(inputs)))
        analysis = lowered.compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= plan.bytes
        assert analysis.temp_size_in_bytes < smallest / 2


@pytest.mark.parametrize("name", ["qwen3", "gemma3_1b"])
def test_programs_need_no_more_than_the_plan_keeps_for_them(engines, name):
    llm, _ = engines(name, "int8")
    programs = llm.engine.runner._compiled.values()
    needs = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert 0 < max(needs) < llm.memory.workspace


@pytest.mark.parametrize(
    ("kv_dtype", "words"),
    [("int4", "kv_dtype is 'int4'; it must be one of auto, int8, fp8"), (None, "kv_dtype is None")],
)
def test_unknown_dtypes_are_refused(tiny_folder, kv_dtype, words):
    with pytest.raises(ValueError, match=words):
        LLM.from_pretrained(tiny_folder, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("kind", "capability", "has"),
    [
        ("NVIDIA A100", "8.0", False), ("Tesla T4", "7.5", False), ("RTX 3090", "8.6", False),
        ("NVIDIA L4", "8.9", True), ("NVIDIA H200", "9.0", True), ("unknown", "7.2", False),
        ("unknown", "11.0", True),
    ],
)  # fmt: skip
def test_fp8_is_refused_on_gpus_without_it(kind, capability, has):
    target = chips.describe("gpu", kind, capability)
    if has:
        assert dtypes.resolve_kv("fp8", "bfloat16", target) == "float8_e4m3fn"
    else:
        with pytest.raises(ValueError, match=f"{kind} has no 8-bit floats .* use int8"):
            dtypes.resolve_kv("fp8", "bfloat16", target)
    assert dtypes.resolve_kv("int8", "float16", target) == "int8"
    assert dtypes.resolve_kv("auto", "float16", target) == "float16"


def test_a_device_without_fp8_is_refused_before_anything_is_loaded(tiny_folder, monkeypatch):
    target = chips.describe("gpu", "NVIDIA A100", "8.0")
    monkeypatch.setattr("da_jax.engine.llm.current_target", lambda: target)
    monkeypatch.setattr("da_jax.checkpoints.convert.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="A100 has no 8-bit floats"):
        LLM.from_pretrained(tiny_folder, kv_dtype="fp8")


def test_a_backend_that_does_not_take_the_pages_says_so(tiny_folder, monkeypatch):
    from da_jax.kernels.paged_attention import BackendError, support

    monkeypatch.setattr(Runner, "warm_up", lambda *_: pytest.fail("compiled"))
    kernel = dataclasses.replace(support.KERNELS["triton"], pages={"hopper": ("float32", "int8")})
    monkeypatch.setitem(support.KERNELS, "triton", kernel)
    with pytest.raises(BackendError, match="pages of float8_e4m3fn on NVIDIA H200: it takes float"):
        LLM.from_pretrained(
            tiny_folder, kv_dtype="fp8", attention="triton:interpret", max_model_len=512
        )
