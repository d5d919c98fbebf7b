"""A burst pauses a sequence in time: no token is chosen under a mode that has already ended."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax import Arm, Done, SamplingParams
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.engine import token_costs
from da_jax.engine.request import Request, TokenLogprob
from da_jax.engine.rows import PAUSE
from da_jax.engine.sequence import Sequence
from da_jax.protocol.prompt import PromptMap

CHUNKS = ["part a: aaaa", "part b: bbbb"]
PROMPT = PromptMap(
    np.arange(9, dtype=np.int32), ((1, 4), (4, 7)), ((0, 1), (7, 9)), "", (), (), (), Arm.DA
)
PIECES = [
    *(b"<focus ", b"<local", b"</answer", b"<", b">", b'">', b" ", b"\n", b"`", b"```\n", b""),
    *(b"magic_chunks=", b'"1', b"x" * 40, b"a" * 127, "é".encode(), "日本".encode() * 9),
    *(b"\xe6", b"\xf0\x9f", b"\x99", b"\xed", b"\xa0", b"\xff" * 3, b"<|im_start|>"),
]  # fmt: skip
TABLE = TokenTable(PIECES, special=[PIECES.index(b"<|im_start|>")])
OPENS = TABLE.contains(b"<")


def sequence_of(arm, tokens):
    request = Request(PROMPT, SamplingParams(max_tokens=tokens + 1), arm)
    sequence = Sequence(
        0, request, TABLE, frozenset(), key=np.zeros(2, np.uint32), max_len=9 + tokens + 1,
        page_size=4, entries=500,
    )  # fmt: skip
    return sequence


def run(tokens):
    """Feeds tokens as the device would have chosen them; the view may change at a pause only."""
    sequence, costs = sequence_of(Arm.DA, len(tokens)), token_costs(TABLE)
    left, begun, changes = sequence.room, sequence.open, 0
    for token in tokens:
        before = sequence.view()
        sequence.receive([TokenLogprob(token, 0.0)])
        sequence.read()
        begun |= bool(OPENS[token])
        left -= int(costs[token]) if begun or costs[token] >= PAUSE else 0
        changes += sequence.view() is not before
        assert left <= 0 or sequence.view() is before
        if left <= 0:
            left, begun = sequence.room, sequence.open
    return changes


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_the_view_changes_only_where_the_device_pauses(tokens):
    run(tokens)
    run([*map(PIECES.index, (b"<local", b">", b"<focus ")), *tokens])


@pytest.mark.parametrize("spaces", range(12))
def test_bytes_of_an_unfinished_character_count_before_they_are_text(spaces):
    """The device pauses with half a character pending, in a tag that then grows too long."""
    local, end, closer, space, wide, half = map(
        PIECES.index, (b"<local", b">", b"</answer", b" ", "日本".encode() * 9, b"\xf0\x9f")
    )
    begin = [local, end, closer, space, wide, wide]
    assert run([*begin, *[space] * spaces, half, *[space] * 120]) == 2


@pytest.mark.parametrize("arm", [Arm.UNMASKED, Arm.VANILLA])
def test_what_sees_everything_has_no_room_to_use_up(arm):
    assert sequence_of(arm, 3).room is None


SCRIPT = "<local>abc</local><focus " + "y" * 140 + '<focus magic_chunks="1">' + "x" * 30


def test_no_token_is_chosen_twice(random_llm, bursts):
    """A tag grows too long in the middle of the script; all else pauses at its `>`."""
    forced = random_llm.tokenizer.encode(SCRIPT)
    request = random_llm.request(CHUNKS, "?", forced=forced, max_tokens=len(forced))
    response = next(e.response for e in random_llm.engine.run([request]) if isinstance(e, Done))
    assert response.summary["declines"] == {"too_long": 1}
    assert sum(bursts) == response.completion_tokens - 1


def test_arms_that_see_everything_run_full_bursts(random_llm, bursts):
    burst = random_llm.engine.config.burst
    random_llm.generate(CHUNKS, "?", arm="unmasked", forced="<local>" * 4, max_tokens=4 * burst + 1)
    assert bursts == [burst] * 4
