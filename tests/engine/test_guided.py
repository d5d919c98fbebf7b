"""A guided sequence says what may be chosen next; runs here without a device."""

import numpy as np
import pytest

from da_jax import Arm, SamplingParams
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.request import Decline, ModeChange, Request, TokenLogprob
from da_jax.engine.sequence import Sequence
from da_jax.protocol.guide import Guides
from da_jax.protocol.modes import Mode
from da_jax.protocol.prompt import PromptMap

PIECES = [bytes([byte]) for byte in range(256)] + [b"<focus", b" magic_chunks=", b'">', b"<|end|>"]
END = PIECES.index(b"<|end|>")
TABLE = TokenTable(PIECES, special=[END])
GUIDES = Guides(map(TABLE.bytes_of, range(len(TABLE))), len(TABLE))


def sequence_of(text=b"", arm=Arm.DA, chunks=((1, 4), (4, 7)), guided=True, stops=(END,)):
    prompt = PromptMap(np.arange(9, dtype=np.int32), chunks, ((0, 1), (7, 9)), "", (), (), (), arm)
    request = Request(prompt, SamplingParams(max_tokens=400, guided=guided), arm)
    sequence = Sequence(
        0, request, TABLE, frozenset(stops), key=np.zeros(2, np.uint32), max_len=409,
        page_size=4, entries=500, guides=GUIDES,
    )  # fmt: skip
    for byte in text:
        write(sequence, byte)
    return sequence


def write(sequence, token):
    sequence.receive([TokenLogprob(token, 0.0)])
    return sequence.read()


def allowed(sequence):
    mask = sequence.allowed()
    if mask is None:
        return set(range(len(PIECES)))
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("arm", [Arm.DA, Arm.UNMASKED])
def test_a_random_writer_declares_only_what_exists(arm):
    dice, changes = np.random.default_rng(0), 0
    for _ in range(20):
        sequence = sequence_of(b"text <focus", arm)
        while sequence.in_tag:
            choice = int(dice.choice(sorted(allowed(sequence))))
            events = write(sequence, choice)
            assert not any(isinstance(event, Decline) for event in events)
            changes += sum(isinstance(e, ModeChange) and e.mode is Mode.FOCUS for e in events)
        assert sequence.allowed() is None
    assert changes == 20


@pytest.mark.parametrize(
    ("text", "in_tag"),
    [(b"", False), (b"a <", True), (b"a < ", False), (b"<local", True), (b"<local>", False),
     (b"`<local", False), (b"<tool_ca", True), (b"<focus foo", True)],
)  # fmt: skip
def test_the_mask_holds_for_one_token_while_a_tag_is_open_outside_code(text, in_tag):
    sequence = sequence_of(text)
    assert sequence.in_tag == in_tag
    assert in_tag or sequence.allowed() is None


def test_the_stop_token_is_not_chosen_in_a_tag():
    assert END in allowed(sequence_of(b"<loca"))
    assert END not in allowed(sequence_of(b"<local"))


def test_a_character_that_is_not_complete_ends_a_name():
    whole, broken = sequence_of(b"<focu"), sequence_of(b"<focu\xe6")
    assert broken.allowed() is None
    assert ord("s") in allowed(whole)
    write(broken, ord("s"))
    assert not broken.in_tag  # it is text: the name has a character that is none of its own


@pytest.mark.parametrize("options", [{"guided": False}, {"arm": Arm.VANILLA, "chunks": ()}])
def test_who_does_not_ask_or_has_no_tags_is_not_guided(options):
    sequence = sequence_of(b"<focus", **options)
    assert not sequence.guided and not sequence.in_tag and sequence.allowed() is None


def test_stopping_at_a_token_that_tags_need_is_refused():
    with pytest.raises(ValueError, match="only tokens that write '>'"):
        sequence_of(stops=[ord(">")])


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_guided_is_true_or_false(value):
    with pytest.raises(ValueError, match=r"guided is .*; it must be True or False"):
        SamplingParams(guided=value)
