"""The grammar of legal tags against the scanner, which decides what is honoured."""

import functools
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.protocol.grammar import Grammar, Phase
from da_jax.protocol.tags import Kind, TagScanner

SPACE = " \t\r\n\f\v"
HEADS = ["<focus", "<local", "<answer", "<global", "</focus", "</local", "</answer", "</global"]
CHARS = SPACE + "fmagic_chunksL=\"'>/<-,.:;`0123x\0²é"
OPENERS = {
    "<focus": ['<focus magic_chunks = "1" >', "<focus\nmagic_chunks='1'>"],
    "<local": ["<local >"],
    "<answer": ["<answer >"],
    "<global": ["<global >"],
}


def honoured(tag, chunks, max_ids=None):
    """Whether the scanner takes `tag`, a whole text, as one tag and does what it says."""
    scanner = TagScanner(chunks, max_ids=max_ids)
    events = scanner.feed(tag) + scanner.finish()
    if [event.text for event in events] != [tag]:
        return False
    return events[0].kind in (Kind.OPEN, Kind.CLOSE) and events[0].reason is None


def read(grammar, head, text):
    """The state after `text`, which follows `head`; None where it is not legal."""
    state = grammar.start(head)
    for char in text:
        state = state and grammar.step(state, char)
    return state


def room_for(head, grammar, chunks, max_ids):
    scanner = TagScanner(chunks, max_ids=max_ids)
    scanner.feed(head)
    return scanner.candidate.room


@st.composite
def legal_tags(draw, chunks, max_ids=None):
    """A tag that is honoured, and its head."""
    gap = st.text(SPACE, max_size=2)
    head = draw(st.sampled_from(HEADS))
    if head != "<focus":
        return head, head + draw(gap) + ">"
    pick = st.sets(st.integers(1, chunks), min_size=1, max_size=max_ids)
    named = sorted(draw(pick))
    items = []
    for number in draw(st.permutations(named)):
        zeros = draw(st.sampled_from(["", "", "0"]))
        high = number
        while high + 1 in named and draw(st.booleans()):
            high += 1
        span = draw(st.booleans()) or high > number
        items.append(f"{zeros}{number}-{zeros}{high}" if span else f"{zeros}{number}")
    commas = st.tuples(gap, gap).map(",".join)
    value = items[0]
    for item in items[1:]:
        value += draw(commas | st.text(SPACE, min_size=1, max_size=2)) + item
    quote = draw(st.sampled_from("\"'"))
    space = draw(st.text(SPACE, min_size=1, max_size=2))
    middle = f"{space}magic_chunks{draw(gap)}={draw(gap)}"
    return head, f"{head}{middle}{quote}{draw(gap)}{value}{draw(gap)}{quote}{draw(gap)}>"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([(1, None), (3, None), (12, None), (12, 1), (130, 5)]), st.data())
def test_what_the_scanner_honours_is_legal_at_every_character(case, data):
    chunks, max_ids = case
    head, tag = data.draw(legal_tags(chunks, max_ids))
    assert honoured(tag, chunks, max_ids)
    grammar = Grammar(range(1, chunks + 1), max_ids=max_ids)
    for end in range(len(head), len(tag) + 1):
        state = read(grammar, head, tag[len(head) : end])
        assert state is not None, tag[:end]
        assert grammar.need(state) <= len(tag) - end
    assert state.phase is Phase.END


@pytest.mark.parametrize("case", [(1, None), (3, None), (12, None), (12, 1), (12, 3), (130, 4)])
@pytest.mark.parametrize("taste", ["any", "space", "value"])
def test_what_is_legal_can_be_completed_and_is_honoured(case, taste):
    """Walks that take any legal character, or as much white space or as many ids as they can."""
    chunks, max_ids = case
    grammar = Grammar(range(1, chunks + 1), max_ids=max_ids)
    dice = random.Random(f"{case} {taste}")
    for head in HEADS * 6:
        state, text = grammar.start(head), head
        room = room_for(head, grammar, chunks, max_ids)
        while state.phase is not Phase.END:
            assert grammar.need(state) <= room
            steps = [
                (char, after)
                for char in map(chr, range(128))
                if (after := grammar.step(state, char)) and grammar.need(after) < room
            ]
            liked = {"any": "", "space": SPACE, "value": "0123456789,- "}[taste]
            char, state = dice.choice([step for step in steps if step[0] in liked] or steps)
            text, room = text + char, room - 1
        assert honoured(text, chunks, max_ids)


@pytest.mark.parametrize("head", OPENERS)
def test_no_other_character_could_be_completed(head):
    """Every place of a tag, every character: legal exactly if the scanner honours some end."""
    grammar = Grammar(range(1, 4))
    ends = {tag[at:] for tag in OPENERS[head] for at in range(len(head), len(tag) + 1)}
    for tag in OPENERS[head]:
        for at in range(len(head), len(tag)):
            state = read(grammar, head, tag[len(head) : at])
            for char in CHARS:
                legal = grammar.step(state, char) is not None
                assert legal == any(honoured(tag[:at] + char + end, 3) for end in ends), (at, char)


@pytest.mark.parametrize("name", ["focus", "local", "answer", "global"])
def test_a_closer_holds_white_space_only(name):
    grammar = Grammar(range(1, 4))
    legal = {c for c in map(chr, range(256)) if grammar.step(grammar.start(f"</{name}"), c)}
    assert legal == {*SPACE, ">"}


@functools.cache
def values(alphabet, longest, chunks, max_ids):
    """Every value of at most `longest` characters that a `<focus>` is honoured with."""
    texts = (
        "".join(v) for n in range(1, longest + 1) for v in itertools.product(alphabet, repeat=n)
    )
    return {v for v in texts if honoured(f'<focus magic_chunks="{v}">', chunks, max_ids)}


@pytest.mark.parametrize(
    ("alphabet", "longest", "chunks", "max_ids"),
    [
        ("012-, ", 5, 2, None), ("012-, ", 5, 2, 1), ("0123,-", 5, 13, None),
        ("0123,-", 5, 13, 2), ("12,-", 6, 21, 1), ("12,-", 6, 21, 3), ("0129", 5, 1290, None),
    ],
)  # fmt: skip
def test_the_need_of_every_beginning_is_its_shortest_completion(alphabet, longest, chunks, max_ids):
    grammar = Grammar(range(1, chunks + 1), max_ids=max_ids)
    needs = {}
    for value in values(alphabet, longest, chunks, max_ids):
        for end in range(len(value) + 1):
            missing = len(value) - end + len('">')
            needs[value[:end]] = min(missing, needs.get(value[:end], missing))
    for size in range(longest + 1):
        for text in map("".join, itertools.product(alphabet, repeat=size)):
            state = read(grammar, "<focus", f' magic_chunks="{text}')
            if text in needs:
                assert grammar.need(state) == needs[text], text
            else:  # its completions, if any, are longer than those that were tried
                assert state is None or grammar.need(state) > longest - size + len('">'), text


def listed(value, ids, max_ids):
    """The ids that `value` names, or None where it may not."""
    named = set()
    for item in value.split(","):
        low, _, high = item.partition("-")
        if not low.isdigit() or not (high.isdigit() or "-" not in item):
            return None
        span = range(int(low), int(high or low) + 1)
        if not span or not set(span) <= set(ids):
            return None
        named |= set(span)
    return named if max_ids is None or len(named) <= max_ids else None


@pytest.mark.parametrize("max_ids", [None, 1, 2])
def test_ids_may_be_any_and_a_range_has_no_gap(max_ids):
    ids = (2, 3, 11, 12, 13, 31, 333)
    grammar = Grammar(ids, max_ids=max_ids)
    for size in range(1, 7):
        for text in map("".join, itertools.product("123,-", repeat=size)):
            state = read(grammar, "<focus", f' magic_chunks="{text}"')
            assert (state is not None) == (listed(text, ids, max_ids) is not None), text


def test_a_focus_on_nothing_cannot_begin():
    grammar = Grammar(range(1, 1))
    assert grammar.start("<focus") is None
    assert all(grammar.start(head) for head in HEADS if head != "<focus")


def test_quotes_may_be_restricted():
    grammar = Grammar(range(1, 4), quotes="'")
    assert read(grammar, "<focus", ' magic_chunks="') is None
    assert read(grammar, "<focus", " magic_chunks='1'>").phase is Phase.END


def test_the_longest_need_bounds_every_need():
    grammar = Grammar((1, 20, 300))
    starts = [' magic_chunks="3', ' magic_chunks="1,', " ", "", ' magic_chunks="300-']
    assert all(
        grammar.need(read(grammar, "<focus", text)) <= grammar.longest_need for text in starts
    )
