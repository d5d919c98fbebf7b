"""The tiny language: every answer follows from the document's text, every piece is one token."""

import re

import numpy as np
import pytest

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.export import make_tokenizer


def drawn(seed, chunks=12, held_out=False):
    """A document and one question of each type it allows."""
    rng = np.random.default_rng(seed)
    document = lang.make_document(rng, chunks, held_out=held_out)
    asked = [lang.ask(rng, document, kind) for kind in lang.KINDS]
    return document, [question for question in asked if question is not None]


def answer_from_text(text, question, first_id=1):
    """What a reader of the document's text would write, built without the generator's records."""
    where = {}
    for number, line in enumerate(text.splitlines(), first_id):
        for key, value in re.findall(r"(\w+)=(\w+)", line):
            where[key] = (number, value)
    keys = re.findall(r"(\w+)=", question)
    if keys[0] not in where:
        return f"<global> chunk of {keys[0]}=none</global><local> answer=none</local>"
    ids = [where[key][0] for key in keys]
    values = [where[key][1] for key in keys]
    named = "".join(f" {key}={i}" for key, i in zip(keys, ids))
    found = "".join(f" {key}={value}" for key, value in zip(keys, values))
    spelt = ""
    if question.startswith("spell"):
        letters = [f" {i}={letter}" for i, letter in enumerate(values[0], 1)]
        spelt = f" spell={values[0]}{''.join(letters)} back{''.join(letters[::-1])}"
    return (
        f"<global> chunk of{named}</global>"
        f'<focus magic_chunks="{",".join(map(str, ids))}">{found}</focus>'
        f"<local>{spelt} answer={','.join(values)}</local>"
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("first_id", [1, 57])
def test_the_response_follows_from_the_text_of_document_and_question(seed, first_id):
    document, questions = drawn(seed)
    assert {"one", "two", "three", "absent"} <= {question.kind for question in questions}
    for question in questions:
        tokens = lang.respond(document, question, first_id)
        text = "".join(token.piece for token in tokens)
        assert text == answer_from_text(document.text, question.text, first_id) + lang.END


@pytest.mark.parametrize("seed", range(10))
def test_the_tokenizer_cuts_text_into_the_same_pieces(seed):
    tokenizer = make_tokenizer()
    document, questions = drawn(seed)
    for question in questions:
        pieces = lang.prompt_head()
        for number, chunk in enumerate(document.chunks, 1):
            pieces += lang.prompt_chunk(number, chunk)
        pieces += lang.prompt_tail(question)
        pieces += [token.piece for token in lang.respond(document, question)]
        ids = [lang.IDS[piece] for piece in pieces]
        assert tokenizer.encode("".join(pieces)).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(pieces)


@pytest.mark.parametrize("text", ["Ünï 日本 \t a=b\n\n  x", "201 <b> 🙂", "<local> in a line"])
def test_any_other_text_survives_the_tokenizer(text):
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_line_is_a_chunk_and_only_the_last_may_lack_its_newline():
    ends = set()
    for seed in range(20):
        document, _ = drawn(seed)
        assert document.text.splitlines(keepends=True) == ["".join(x) for x in document.chunks]
        assert all(chunk[-1] == "\n" for chunk in document.chunks[:-1])
        ends.add(document.chunks[-1][-1])
    assert ends == {"\n", "."}


def test_training_and_held_out_documents_share_no_pair():
    pairs = {True: set(), False: set()}
    for held_out in pairs:
        for seed in range(200):
            document, _ = drawn(seed, held_out=held_out)
            pairs[held_out] |= {(fact.key, fact.value) for fact in document.facts.values()}
    assert not pairs[True] & pairs[False]
    assert min(map(len, pairs.values())) > 1000


def test_spelling_keeps_local_open_for_at_least_25_tokens():
    for seed in range(20):
        document, questions = drawn(seed)
        for question in questions:
            if question.kind == "spell":
                modes = [token.mode for token in lang.respond(document, question)]
                assert modes.count("local") >= 25


def test_several_keys_lie_in_several_chunks():
    for seed in range(20):
        document, questions = drawn(seed)
        for question in questions:
            if question.kind in ("two", "three"):
                chunks = [document.facts[key].chunk for key in question.keys]
                assert len(set(chunks)) == len(question.keys) == 1 + lang.KINDS.index(question.kind)


def test_the_preamble_fills_the_sink():
    assert len(lang.words(lang.PREAMBLE)) >= 16


def test_the_same_seed_gives_the_same_text():
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_text_outside_the_language_is_refused():
    with pytest.raises(KeyError, match="is not one token"):
        lang.IDS[" unheard"]
