"""The mask of training and its loss are those of the engine."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from support import sft

from da_jax.checkpoints import hf
from da_jax.protocol.modes import Declaration, Mode
from da_jax.train import cache, data, step, views

pytestmark = pytest.mark.long

NAMES = ("qwen3", "gemma4_e2b", "qwen3_5", pytest.param("gemma3_text", marks=pytest.mark.slow))
"""Full attention; sliding windows and layers that read another's keys; recurrent states."""


@pytest.fixture(params=NAMES, scope="module")
def case(request):
    if request.param == "qwen3":
        llm, folder = (request.getfixturevalue(n) for n in ("random_llm", "tiny_folder"))
    else:
        llm, folder = request.getfixturevalue("family_llm")(request.param)
    encoded = [sft.encoder(llm).encode(example) for example in sft.examples()]
    return llm, hf.load(folder, dtype=np.float32), encoded


@pytest.fixture(scope="module")
def writer(tiny_folder):
    return sft.writer(tiny_folder)


def collated(encoded, masked=True):
    return data.collate([(e, masked) for e in encoded], data.Shape.holding(encoded))


def engine_scores(llm, encoded, arm, **options):
    for e in encoded:
        ids = [int(i) for i in e.ids[e.prompt :]]
        yield llm.score(sft.CHUNKS, sft.QUESTION, ids, arm=arm, **options)


@pytest.mark.parametrize("arm", ["da", "unmasked"])
def test_training_scores_a_response_as_the_engine_does(case, arm, monkeypatch):
    """One padded forward pass under the mask of training, against decoding from paged caches."""
    llm, model, encoded = case
    batch = collated(encoded, masked=arm == "da")
    if arm == "da":
        monkeypatch.setattr(cache, "BLOCK", 48)  # no divisor of the length
    score = jax.jit(step.logprobs, static_argnames="recompute")
    got = np.asarray(score(model, batch, recompute=arm == "da"))
    for row, expected in enumerate(engine_scores(llm, encoded, arm)):
        np.testing.assert_allclose(got[row, : len(expected)], expected, atol=1e-4)
    assert batch.weight.sum() == sum(len(e.ids) - e.prompt for e in encoded)


@pytest.mark.parametrize(
    "case", [pytest.param("gemma4_e2b", marks=pytest.mark.slow), "qwen3_5"], indirect=True
)
def test_recomputation_changes_no_gradient(case):
    """Nor of layers that read the keys of another."""
    _, model, encoded = case
    graph, weights = nnx.split(model)

    def loss(weights, batch, recompute):
        scores = step.logprobs(nnx.merge(graph, weights), batch, recompute=recompute)
        return -(scores * batch.weight).sum()

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    (kept, expected), (again, ours) = (gradient(weights, collated(encoded), r) for r in (0, 1))
    np.testing.assert_allclose(kept, again, rtol=1e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for (path, left), right in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(ours), strict=True
    ):
        np.testing.assert_allclose(
            left, right, rtol=1e-3, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
        )


def test_what_is_declared_for_the_start_holds_in_training_too(random_llm, tiny_folder):
    llm, folder = random_llm, tiny_folder
    start = Declaration(Mode.FOCUS, (3,))
    (e, *_) = encoded = [sft.encoder(llm).encode(example) for example in sft.examples()]
    prompt = llm.renderer.render(sft.CHUNKS, sft.QUESTION)
    ids = [int(i) for i in e.ids[e.prompt :]]
    own = views.of_response(prompt, ids, views.token_table(llm.tokenizer), initial=start)
    batch = collated([e._replace(masked=own)])
    got = step.logprobs(hf.load(folder, dtype=np.float32), batch)
    (expected,) = engine_scores(llm, encoded[:1], "da", initial=start)
    np.testing.assert_allclose(got[0, : len(ids)], expected, atol=1e-4)


def visible(prompt, text):
    """bool [n, n] by reading the tags of the text with a regular expression, byte by byte."""
    # The tokenizer is byte by byte, but for `">`, which is one token, and the end of the turn.
    tokens = [*re.findall('">|.', text, re.DOTALL), ""]
    n = len(prompt) + len(tokens)
    mask = np.tril(np.ones((n, n), bool))
    for at in range(len(tokens)):
        so_far = "".join(tokens[: at + 1])
        found = re.findall(r'(?<!`)<(/?)(focus|local)(?: magic_chunks="([\d, -]+)")?>', so_far)
        closer, _, numbers = found[-1] if found else ("/", "", "")
        named = set()
        for part in filter(None, numbers.split(",")):
            low, _, high = part.strip().partition("-")
            named |= set(range(int(low), int(high or low) + 1))
        if closer or not named <= set(prompt.numbers):
            continue
        for number, (start, end) in prompt.span_of.items():
            if number not in named:
                mask[len(prompt) + at, start:end] = False
    return mask


@pytest.mark.parametrize("response", sft.RESPONSES)
def test_views_are_what_a_plain_reading_of_the_tags_says(writer, response):
    prompt = writer.renderer.render(sft.CHUNKS, sft.QUESTION)
    e = sft.encoder(writer).encode(sft.example(response))
    np.testing.assert_array_equal(e.masked.dense(), visible(prompt, response))
    np.testing.assert_array_equal(e.unmasked.dense(), np.tril(np.ones((len(e.ids),) * 2, bool)))


@pytest.mark.parametrize("scaffold", ["all", "paper"])
@pytest.mark.parametrize("response", sft.RESPONSES)
def test_each_token_sees_as_many_positions_as_the_engine_recorded(random_llm, response, scaffold):
    prompt = random_llm.renderer.render(sft.CHUNKS, sft.QUESTION, system="s" * 40)
    ids = random_llm.tokenizer.encode(response, add_special_tokens=False)
    table = views.token_table(random_llm.tokenizer)
    own = views.of_response(prompt, ids, table, scaffold=scaffold).dense()
    written = random_llm.generate(
        sft.CHUNKS, sft.QUESTION, system="s" * 40, forced=ids, max_tokens=len(ids),
        scaffold=scaffold,
    )  # fmt: skip
    assert list(written.token_ids) == ids
    attended = [step.attended for step in written.steps]
    assert attended == own[len(prompt) : -1].sum(1).tolist()


def test_a_plain_prompt_has_no_mask(writer):
    encoder = sft.encoder(writer)
    e = encoder.encode(sft.example(sft.RESPONSES[0], arm="vanilla"))
    assert len(e.masked.spans) == 1
    rendered = writer.renderer.render(sft.CHUNKS, sft.QUESTION, arm="vanilla")
    np.testing.assert_array_equal(e.ids[: e.prompt], rendered.ids)


def test_views_of_a_long_response_stay_few(writer):
    """Tokens share lists of spans, however long the response is."""
    text = '<focus magic_chunks="2">b</focus><local>c</local>' * 6
    e = sft.encoder(writer, 1024).encode(sft.example(text))
    assert e.masked.spans.shape == (3, 3, 2) and len(set(e.masked.view)) == 3


def test_examples_of_the_unmasked_arm_are_never_masked(writer):
    encoder = sft.encoder(writer)
    for example in sft.examples(arm="unmasked"):
        e = encoder.encode(example)
        np.testing.assert_array_equal(e.masked.dense(), e.unmasked.dense())
