"""Examples: what is refused, what is learnt, and how batches are drawn."""

import collections
import itertools
import json

import numpy as np
import pytest
from support import sft

from da_jax.protocol.modes import Arm
from da_jax.train import data


@pytest.fixture(scope="module")
def writer(tiny_folder):
    return sft.writer(tiny_folder)


GOOD = {"question": "q?", "response": "r"}


def test_what_separates_lines_in_a_text_separates_no_examples(tmp_path):
    path = tmp_path / "examples.jsonl"
    texts = ["q\u2028x", "q\u2029x", "q\x85x", "q\x0bx"]
    lines = [json.dumps(GOOD | {"question": text}, ensure_ascii=False) for text in texts]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")  # with a mark of order
    assert [example.question for example in data.read(path)] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "this is no JSON"),
        ("[1]", "a JSON object is needed, not \\[1\\]"),
        ('{"question": "q"}', "missing \\['response'\\]"),
        (GOOD | {"answer": "x"}, "unknown keys \\['answer'\\]"),
        (GOOD | {"response": "  "}, "response is empty"),
        (GOOD | {"response": 3}, "response is 3; give a str"),
        (GOOD | {"document": 3}, "document is 3; give a str or list or null"),
        (GOOD | {"document": ["a", 4]}, "document holds 4; its chunks are texts"),
        (GOOD | {"history": "x"}, "history is 'x'; give a list"),
        (GOOD | {"arm": "full"}, "arm is 'full'; use 'da', 'unmasked' or 'vanilla'"),
    ],
)
def test_a_bad_line_is_named_with_what_to_do(line, message, tmp_path):
    path = tmp_path / "examples.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(GOOD)}\n\n{text}\n")
    with pytest.raises(ValueError, match=f"line 3: .*{message}"):
        data.read(path)


def test_a_file_without_examples_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no example"):
        data.read(tmp_path / "none.jsonl")


def test_every_key_arrives(tmp_path):
    fields = GOOD | {
        "document": ["a", "b"], "system": "s", "history": [{"role": "user", "content": "x"}],
        "arm": "vanilla",
    }  # fmt: skip
    (tmp_path / "one.jsonl").write_text(json.dumps(fields))
    (example,) = data.read(tmp_path / "one.jsonl")
    assert example == data.Example(
        "q?", "r", ("a", "b"), "s", ({"role": "user", "content": "x"},), Arm.VANILLA
    )


def test_the_prompt_is_the_renderers_and_the_end_of_the_turn_is_learnt(writer):
    turns = ({"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"})
    example = data.Example(sft.QUESTION, "abc", sft.CHUNKS, "be brief", turns)
    encoded = sft.encoder(writer).encode(example)
    prompt = writer.renderer.render(sft.CHUNKS, sft.QUESTION, system="be brief", history=turns)
    np.testing.assert_array_equal(encoded.ids[: encoded.prompt], prompt.ids)
    assert writer.tokenizer.decode(encoded.ids[encoded.prompt :]) == "abc<|im_end|>"


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
    with pytest.raises(
        ValueError, match=r"f.jsonl, example 1: 286 tokens of prompt and 1.. of res"
    ):
        encoder.encode_all(sft.examples(), "f.jsonl")


def some(writer, count):
    examples = [
        data.Example("q?", "r" * (1 + i), ("c" * (10 if i % 3 else 200),)) for i in range(count)
    ]
    return [sft.encoder(writer).encode(example) for example in examples]


def test_each_example_comes_once_before_any_comes_again(writer):
    encoded = some(writer, 12)  # eight short ones, and four long ones
    drawn = list(itertools.islice(data.batches(encoded, 4, seed=1), 9))
    counts = collections.Counter(int(weights.sum()) for batch in drawn for weights in batch.weight)
    assert counts == {size: 3 for size in range(2, 14)}
    assert len({batch.tokens.shape for batch in drawn}) == 2


def test_a_share_of_the_draws_is_masked(writer):
    example = data.Example(sft.QUESTION, sft.RESPONSES[0], sft.CHUNKS)
    encoded = [sft.encoder(writer).encode(example)]
    for share in (0.0, 0.75, 1.0):
        drawn = itertools.islice(data.batches(encoded, 1, masked=share), 400)
        assert np.mean([batch.view.any() for batch in drawn]) == pytest.approx(share, abs=0.06)


def test_batches_follow_from_the_seed(writer):
    encoded = some(writer, 8)
    tokens = lambda seed: next(data.batches(encoded, 4, seed=seed)).tokens.tolist()
    assert tokens(3) == tokens(3) != tokens(4)
