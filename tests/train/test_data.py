"""Recorded responses in training: what is learnt of them, and how batches are drawn."""

import collections
import itertools

import numpy as np
import pytest
from support import sft

from da_jax.protocol.recorded import Recorded
from da_jax.train import data


@pytest.fixture(scope="module")
def writer(tiny_folder):
    return sft.writer(tiny_folder)


def test_the_prompt_is_the_renderers_and_the_end_of_the_turn_is_learnt(writer):
    turns = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    encoded = sft.encoder(writer).encode(sft.example("abc", system="be brief", history=turns))
    prompt = writer.renderer.render(sft.CHUNKS, sft.QUESTION, system="be brief", history=turns)
    np.testing.assert_array_equal(encoded.ids[: encoded.prompt], prompt.ids)
    assert writer.tokenizer.decode(encoded.ids[encoded.prompt :]) == "abc<|im_end|>"


def test_an_end_that_is_recorded_is_not_added_again(writer):
    ids = [*writer.tokenizer.encode("abc"), writer.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompt = writer.renderer.render(sft.CHUNKS, sft.QUESTION)
    asked = {"prompt": prompt.text, "response_token_ids": ids}
    for fields, expected in (
        (asked, ids),
        (asked | {"response_token_ids": ids[:2], "finish_reason": "length"}, ids[:2]),
        (asked | {"response_token_ids": ids[:2], "finish_reason": "stop"}, [*ids[:2], ids[-1]]),
    ):
        encoded = sft.encoder(writer).encode(Recorded.of("line 1", fields))
        assert encoded.ids[encoded.prompt :].tolist() == expected
        np.testing.assert_array_equal(encoded.ids[: encoded.prompt], prompt.ids)


def test_a_prompt_without_text_is_refused(writer):
    fields = {"prompt_tokens": 9, "chunk_spans": [], "response": "x"}
    with pytest.raises(ValueError, match=r"line 1: prompt_tokens: .* give its text"):
        sft.encoder(writer).encode(Recorded.of("line 1", fields))


def test_only_tokens_of_the_response_are_learnt(writer):
    encoded = [sft.encoder(writer).encode(example) for example in sft.examples()]
    batch = data.collate([(e, True) for e in encoded], data.Shape.holding(encoded))
    for row, e in enumerate(encoded):
        learnt = batch.weight[row] > 0
        assert batch.target[row, learnt].tolist() == e.ids[e.prompt :].tolist()
        chosen = batch.tokens[row, batch.query[row, learnt] + 1]
        assert chosen.tolist() == e.ids[e.prompt :].tolist()


def test_an_example_that_is_too_long_is_named(writer):
    encoder = sft.encoder(writer, longest=300)
    with pytest.raises(ValueError, match=r"f.jsonl, line 1: 286 tokens of prompt and 1.. of res"):
        encoder.encode(sft.examples()[0])


def some(writer, count):
    sizes = [10 if i % 3 else 200 for i in range(count)]
    examples = [sft.example("r" * (1 + i), document=["c" * size]) for i, size in enumerate(sizes)]
    return [sft.encoder(writer).encode(example) for example in examples]


def test_each_example_comes_once_before_any_comes_again(writer):
    encoded = some(writer, 12)  # eight short ones, and four long ones
    drawn = list(itertools.islice(data.batches(encoded, 4, seed=1), 9))
    counts = collections.Counter(int(weights.sum()) for batch in drawn for weights in batch.weight)
    assert counts == {size: 3 for size in range(2, 14)}
    assert len({batch.tokens.shape for batch in drawn}) == 2


def test_a_share_of_the_draws_is_masked(writer):
    encoded = [sft.encoder(writer).encode(sft.example(sft.RESPONSES[0]))]
    for share in (0.0, 0.75, 1.0):
        drawn = itertools.islice(data.batches(encoded, 1, masked=share), 400)
        assert np.mean([batch.view.any() for batch in drawn]) == pytest.approx(share, abs=0.06)


def test_batches_follow_from_the_seed(writer):
    encoded = some(writer, 8)
    tokens = lambda seed: next(data.batches(encoded, 4, seed=seed)).tokens.tolist()
    assert tokens(3) == tokens(3) != tokens(4)
