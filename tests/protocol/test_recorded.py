"""Recorded responses: what is read, and what is refused with its line."""

import json

import pytest
from support import prompt_fixtures as fixtures

from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.recorded import read
from da_jax.protocol.styles import PLAIN

NUMBERS = {
    "prompt_tokens": 100,
    "chunk_spans": [[10, 40], [40, 90]],
    "response": "<local>ab</local>c",
}
ASKED = {"question": "q?", "response": "r"}


TOKENIZER = fixtures.make("byte_level", fixtures.CHATML)


@pytest.fixture(scope="module")
def renderer():
    return PromptRenderer(TOKENIZER, PLAIN)


def written(tmp_path, *entries, **options):
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return read(path, **options)


def test_an_array_is_read_like_lines(tmp_path):
    path = tmp_path / "responses.json"
    path.write_text(json.dumps([NUMBERS, {**NUMBERS, "id": 7}], indent=1))
    assert [one.fields for one in read(path)] == [NUMBERS, {**NUMBERS, "id": 7}]


def test_an_arm_that_is_not_named_is_the_given_one(tmp_path):
    entries = written(tmp_path, NUMBERS, {**NUMBERS, "arm": "vanilla"}, arm=Arm.UNMASKED)
    assert [one.arm for one in entries] == [Arm.UNMASKED, Arm.VANILLA]


def test_what_separates_lines_in_a_text_separates_no_responses(tmp_path):
    path = tmp_path / "responses.jsonl"
    texts = ["q\u2028x", "q\u2029x", "q\x85x", "q\x0bx"]
    lines = [json.dumps(ASKED | {"question": text}, ensure_ascii=False) for text in texts]
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")  # with a mark of order
    assert [one.fields["question"] for one in read(path)] == texts


def test_a_question_comes_with_what_a_request_may_have(renderer, tmp_path):
    early, labelled = {"text": "one", "label": "a.py"}, {"text": "two"}
    turns = [
        {"role": "user", "content": "first?", "chunks": [early]},
        {"role": "assistant", "content": "yes"},
    ]
    fields = {"document": ["zero", labelled], "system": "Be kind.", "history": turns}
    (one,) = written(tmp_path, ASKED | fields)
    own = [{**turns[0], "chunks": [Chunk("one", "a.py")]}, turns[1]]
    expected = renderer.render(["zero", "two"], "q?", system="Be kind.", history=own)
    assert one.prompt(renderer).ids.tolist() == expected.ids.tolist()
    conversation = [*turns, {"role": "user", "content": "q?"}]
    system = {"role": "system", "content": "Be kind."}
    (same,) = written(
        tmp_path,
        {"messages": [system, *conversation], "documents": ["zero", labelled], "response": "r"},
    )
    assert same.prompt(renderer).ids.tolist() == expected.ids.tolist()


@pytest.mark.parametrize("document", [{}, {"document": None}, {"document": "A text.\n\nMore."}])
def test_a_document_may_be_a_text_or_none(renderer, tmp_path, document):
    (one,) = written(tmp_path, ASKED | document)
    expected = renderer.render(document.get("document"), "q?")
    assert one.prompt(renderer).ids.tolist() == expected.ids.tolist()


def without(name, **changes):
    return {key: value for key, value in NUMBERS.items() if key != name} | changes


FIELDS = [
    ([1], "line 2 is list; give a JSON object"),
    ({**NUMBERS, "promt": "x"}, "line 2: unknown field 'promt'; known are document"),
    (without("prompt_tokens"), "line 2: the prompt is missing; give one of: question; messages"),
    ({**NUMBERS, "prompt": "x"}, "line 2: prompt and prompt_tokens are given"),
    (without("chunk_spans"), "line 2: chunk_spans is missing, which prompt_tokens needs"),
    ({"document": "d", "response": "r"}, "line 2: the prompt is missing; give one of: question"),
    (ASKED | {"document": 3}, "line 2: document is 3; it must be a text, a list of chunks or null"),
    (ASKED | {"history": "x"}, "line 2: history is 'x'; it must be a list"),
    (ASKED | {"documents": "x"}, "line 2: documents does not go with question"),
    (without("response"), "line 2: response or response_token_ids: both are missing"),
    ({**NUMBERS, "response_token_ids": [1]}, "response or response_token_ids: both are given"),
    ({**NUMBERS, "question": "q"}, "line 2: question and prompt_tokens are given"),
    ({**NUMBERS, "arm": "dense"}, "line 2: arm is 'dense'"),
    ({**NUMBERS, "score": 2}, "line 2: score is 2; it must be from 0 to 1"),
    ({**NUMBERS, "score": True}, "line 2: score is True; it must be a number"),
    ({**NUMBERS, "task": 3}, "line 2: task is 3; it must be a text"),
    ({**NUMBERS, "response": ["x"]}, "line 2: response is .* it must be a text"),
    ({**NUMBERS, "prompt_tokens": "9"}, "line 2: prompt_tokens is '9'; it must be a whole number"),
]


@pytest.mark.parametrize(("entry", "message"), FIELDS)
def test_a_field_that_is_not_valid_is_named_with_its_line(tmp_path, entry, message):
    with pytest.raises(ValueError, match=message):
        written(tmp_path, NUMBERS, entry)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no response"),
        (b"[]", "holds no response"),
        (b"{}\n{", "line 1: the prompt is missing"),
        (b"{", "line 1 is no JSON"),
        (b"[" * 100_000, "is no JSON array: maximum recursion"),
        (b"[{]", "is no JSON array"),
        (b"\xff", "is no UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_responses_is_named(tmp_path, content, message):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"file.jsonl.* {message}|file.jsonl,? {message}"):
        read(path)


VALUES = [
    ({**NUMBERS, "response": ""}, "response is empty"),
    (without("response", response_token_ids=[]), "response_token_ids is empty"),
    (without("response", response_token_ids=[5, 10**6]), "holds 1000000; the model's tokens are"),
    (without("response", response_token_ids=["a"]), "holds 'a'"),
    (without("response", response_token_ids=[True]), "holds True"),
    ({**NUMBERS, "prompt_tokens": 0}, "prompt_tokens is 0; it must be from 1"),
    ({**NUMBERS, "prompt_tokens": 2**40}, "prompt_tokens is 1099511627776"),
    ({**NUMBERS, "prompt_tokens": 90}, "chunk_spans end at 90 and prompt_tokens is 90"),
    ({**NUMBERS, "chunk_spans": [[10, 40], [30, 50]]}, r"span 2 is \[30, 50\].* not before 40"),
    ({**NUMBERS, "chunk_spans": [[10, 10]]}, r"span 1 is \[10, 10\]"),
    ({**NUMBERS, "chunk_spans": [7]}, "span 1 is 7"),
    ({"prompt": "x", "response": "r"}, "no header of a chunk"),
    (ASKED | {"document": [3]}, "document: chunk 1 is 3; give a text"),
    (ASKED | {"document": [{"txt": "a"}]}, "document: chunk 1 is .*txt"),
    (ASKED | {"history": ["x"]}, "turn 1 is 'x'; give an object"),
    ({"messages": [], "response": "r"}, "the last message must be the user's question"),
    ({"messages": ["hi"], "response": "r"}, "message 0 is 'hi'; give an object"),
    ({"messages": [{"role": "user"}], "response": "r"}, "message 0 is .* needs a role and a text"),
    (
        {"messages": [{"role": "user", "content": "q", "chunks": "c"}], "response": "r"},
        "chunks of message 0 is 'c'; give a list",
    ),
]


@pytest.mark.parametrize(("entry", "message"), VALUES)
def test_what_cannot_be_used_is_named(renderer, tmp_path, entry, message):
    *_, one = written(tmp_path, NUMBERS, entry)
    with pytest.raises(ValueError, match=message):
        one.prompt(renderer)
        one.response(TOKENIZER, len(TOKENIZER))
