"""Masks of tokens: whatever is chosen under them, the scanner honours every tag outside code."""

import itertools
import json
import random
import re

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support import tiny
from tokenizers import Tokenizer

from da_jax.checkpoints.convert import TINY
from da_jax.engine.detokenize import IncrementalDecoder, TokenTable
from da_jax.protocol.guide import Guides
from da_jax.protocol.modes import ModeTracker
from da_jax.protocol.tags import Kind

HEADS = [
    f"<{slash}{name}" for slash in ("", "/") for name in ("focus", "local", "answer", "global")
]
SINGLES = [chr(c) for c in range(32, 127)] + list("\n\t\r\f\v")
ODD = [
    *('<focus magic_chunks="', "<focus ma", "<foc", "ocus", "us", "us magic", "s m", "focus "),
    *("chunks", "magic_chunks='", '="', '="1', '">', "'>", '1">', "3-", "-3", ", ", ",,", "10"),
    *('"><local>', '">text<', "><focusing", "></local", "/>", "/focus>", "/local", "/answer >"),
    *("<local", "<local>", "<local/>", "<local x", "</focus>", "</focus x>", "</global", "<answer"),
    *(
        ' magic_chunks="1,2">then<focus',
        "<<",
        "a < b",
        "<b>",
        "<tool_call>",
        "</think>",
        "`<local/>",
    ),
    *("```\n", " " * 16, " " * 100, "\n" * 9, "<focus" + " " * 130, "01", "0", "12", "é", "日本"),
]
BROKEN = [*(bytes([b]) for b in range(128, 256)), b">\xe6", b"\x97\xa5", b"s\xe6", b"\xe6 m", b""]
MADE_UP = [*(text.encode() for text in [*SINGLES, *ODD]), *BROKEN]


def bytes_of(tokenizer):
    table = TokenTable.from_tokenizer(tokenizer)
    return [table.bytes_of(i) for i in range(len(table))]


TINY_TOKENS = bytes_of(Tokenizer.from_file(str(TINY / "tokenizer.json")))
VOCABULARIES = {
    "made up": MADE_UP,
    "bytes": bytes_of(tiny.byte_tokenizer()),
    "tiny": TINY_TOKENS,
}
GUIDES = {name: Guides(tokens, len(tokens) + 7) for name, tokens in VOCABULARIES.items()}


def bits(mask, size):
    """The set of the tokens below `size` that `mask` allows."""
    if mask is None:
        return set(range(size))
    assert mask.dtype == np.uint32
    set_bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(set_bits[:size]).tolist())


class Writer:
    """A response that is written token by token, guided as an engine does it."""

    def __init__(self, tokens, guides, chunks, max_ids=None, stop_ids=()):
        self.tokens = tokens
        self.tracker = ModeTracker(chunks, max_ids=max_ids)
        self._decoder = IncrementalDecoder(TokenTable(tokens))
        self._guide = guides.guide(range(1, chunks + 1), max_ids=max_ids, stop_ids=stop_ids)
        self.events = []
        self.in_code = set()  # starts of tags there

    @property
    def open(self):
        candidate = self.tracker.candidate
        return None if candidate is None or candidate.quoted else candidate

    def allowed(self):
        pending = self._decoder.pending
        mask = self._guide.allowed(None if pending else self.tracker.candidate)
        return sorted(bits(mask, len(self.tokens)))

    def write(self, token):
        self.events += self.tracker.feed(self._decoder.push([token]))
        candidate = self.tracker.candidate
        if candidate is not None and candidate.quoted:
            self.in_code.add(candidate.start)

    def force(self, text):
        """Writes text with tokens of single characters, as if it were given."""
        for char in text:
            self.write(self.tokens.index(char.encode()))

    def declined(self, since=0):
        bad = [e for e in self.events if e.kind is Kind.DECLINED or (e.reason and e.start >= since)]
        return [e for e in bad if e.start >= since and e.start not in self.in_code]


def head_at_end(text):
    return any(text.endswith(head[:n]) for head in HEADS for n in range(1, len(head) + 1))


TASTES = {
    "any": lambda token: True,
    "tags": lambda token: re.search(rb"[<>/=\"'0-9,]|focus|local|magic|chunks", token),
    "long": lambda token: len(token) > 4,
    "space": lambda token: token and not token.strip(),
    "odd": lambda token: re.search(rb"[^a-zA-Z0-9 ]", token),
}


@pytest.mark.parametrize("taste", TASTES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_no_tag_that_is_chosen_under_the_masks_is_declined(vocabulary, taste):
    tokens, guides = VOCABULARIES[vocabulary], GUIDES[vocabulary]
    dice = random.Random(f"{vocabulary} {taste}")
    liked = {i for i, token in enumerate(tokens) if TASTES[taste](token)}
    heads = {i for i, token in enumerate(tokens) if head_at_end(token.decode("latin-1"))}
    honoured = 0
    for _ in range(25):
        chunks, max_ids = dice.choice(
            [(0, None), (1, None), (3, 2), (12, None), (12, 1), (130, 20)]
        )
        writer = Writer(tokens, guides, chunks, max_ids)
        for _ in range(60):
            allowed = writer.allowed()
            choice = [i for i in allowed if i in liked]
            if not writer.open and dice.random() < 0.3:
                choice = [i for i in allowed if i in heads]
            elif writer.open and dice.random() < 0.9:
                choice = [i for i in allowed if goes_on(writer.open.text, tokens[i])] or choice
            writer.write(dice.choice(choice or allowed))
        for _ in range(2000):  # every tag ends, however it is gone on with
            if not writer.open:
                break
            writer.write(dice.choice(writer.allowed()))
        assert not writer.open
        assert writer.declined() == []
        honoured += sum(e.kind in (Kind.OPEN, Kind.CLOSE) for e in writer.events)
    assert honoured > 10


def goes_on(text, token):
    return any(head.startswith(text + token.decode("latin-1")) for head in HEADS)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(VOCABULARIES)),
    st.lists(st.sampled_from([*ODD, *HEADS, "x", '"3', ">", "<focus foo", "9"]), max_size=5),
    st.integers(0, 2**32),
)
@example("bytes", ["<focus foo"], 0)
@example("bytes", ["<focus" + " " * 120], 1)
@example("bytes", ["<focus magic_chunks='1' <local"], 2)
def test_what_was_forced_is_declined_at_its_end_and_nothing_after_it(vocabulary, forced, seed):
    """A beginning that cannot be honoured is left alone; one that can be is completed."""
    tokens, dice = VOCABULARIES[vocabulary], random.Random(seed)
    writer, ended = Writer(tokens, GUIDES[vocabulary], 3), None
    writer.force(c for c in "".join(forced) if c.encode() in tokens)
    for _ in range(300):
        if ended is None and not writer.open:
            ended = writer.tracker.length
        allowed = writer.allowed()
        assert allowed
        writer.write(dice.choice(allowed))
    assert ended is not None and writer.declined(since=ended) == []


@pytest.mark.parametrize("forced", ["<focus foo", "<local/", "<focus" + " " * 121, "</local x"])
def test_nothing_is_masked_in_a_tag_that_cannot_be_honoured(forced):
    writer = Writer(VOCABULARIES["bytes"], GUIDES["bytes"], 3)
    writer.force(forced)
    assert len(writer.allowed()) == len(writer.tokens)


TAGS = [
    *('<focus magic_chunks="1">', "<focus\tmagic_chunks = ' 1-3 ,2 '\n>", "</focus>", "<local>"),
    *("<answer >", "</answer\n>", "<global>", '<focus magic_chunks="03,1 2-2">', "</local>"),
]
PROSE = [
    *("plain ", "a < b", "<b>", "</", "<fo", "<", "<0>", "日本", "é", "\n", "x <= y", "</foc>"),
    *("<tool_call>{}</tool_call>", "<think>", "</think>", "<!-- -->", 'magic_chunks="9"', "/>"),
]
CODE = ["`<focus x>`", "```\n<local/>\n```\n", "`<focus magic_chunks='77'>`", "`<answer`"]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(VOCABULARIES)),
    st.lists(st.sampled_from([*TAGS, *TAGS, *PROSE, *CODE]), max_size=8).map("".join),
    st.integers(0, 2**32),
)
def test_every_text_whose_tags_are_honoured_can_be_written_in_any_tokens(vocabulary, text, seed):
    tokens, dice, rest = VOCABULARIES[vocabulary], random.Random(seed), text.encode()
    writer, whole = Writer(tokens, GUIDES[vocabulary], 3), Writer(tokens, GUIDES[vocabulary], 3)
    events = whole.tracker.feed(text)
    assume(not any(e.kind is Kind.DECLINED for e in events))  # pieces that made another tag
    assume(not re.search(r"<(focus|local|answer|global)\w", text))
    while rest:
        allowed = writer.allowed()
        fitting = [i for i, token in enumerate(tokens) if token and rest.startswith(token)]
        if any(tag in text for tag in CODE):  # there a token that spells a bad tag is not used
            fitting = [i for i in fitting if len(tokens[i]) == 1 or i in allowed]
        token = dice.choice(fitting)
        assert token in allowed, (text, rest, tokens[token])
        writer.write(token)
        rest = rest[len(tokens[token]) :]


@pytest.mark.parametrize("vocabulary", ["made up", "bytes"])
def test_in_plain_text_only_tokens_that_spell_a_bad_tag_are_masked(vocabulary):
    tokens = VOCABULARIES[vocabulary]
    bad = {
        *("<local/>", "<local x", "><focusing", "</focus x>", "`<local/>", "<focus" + " " * 130),
    } & {token.decode("latin-1") for token in tokens}
    writer = Writer(tokens, GUIDES[vocabulary], 3)
    for text in ("", "plain ", "`code ", "` more", "<b>", "\n```\n<local/ "):
        writer.force(text)
        masked = set(range(len(tokens))) - set(writer.allowed())
        assert {tokens[i].decode("latin-1") for i in masked} == bad


def test_a_vocabulary_without_such_tokens_has_no_mask_in_plain_text():
    guide = GUIDES["bytes"].guide(range(1, 4))
    tracker = ModeTracker(3)
    for text in ("", "text", "`<local ", "` more <"):
        tracker.feed(text)
        candidate = tracker.candidate
        assert (guide.allowed(candidate) is None) == (candidate is None or candidate.quoted)


def test_a_beginning_of_a_name_may_become_other_text():
    """Only a name that is complete binds: until then a mask leaves all else as it was."""
    writer = Writer(MADE_UP, GUIDES["made up"], 3)
    free = set(writer.allowed())
    writer.force("<")
    assert {MADE_UP[i] for i in free - set(writer.allowed())} == set()
    writer.force("focu")
    masked = {MADE_UP[i] for i in free - set(writer.allowed())}
    assert masked == {t for t in MADE_UP if t[:1] == b"s" and len(t) > 1 and t != b"s m"}
    writer.force("s")
    assert {MADE_UP[i][:1] for i in writer.allowed()} <= {bytes([c]) for c in b" \t\r\n\f\v"}


def honoured(text, chunks):
    tracker = ModeTracker(chunks)
    events = tracker.feed(text)
    return bool(events) and events[0].text == text and events[0].kind in (Kind.OPEN, Kind.CLOSE)


@pytest.mark.parametrize("read", ['magic_chunks="1', 'magic_chunks="', "magic_chunks=\"1-2'", ""])
@pytest.mark.parametrize("left", [2, 3, 4, 5])
def test_a_token_is_allowed_exactly_if_some_completion_within_the_room_is_honoured(read, left):
    """Brute force over every completion, where white space has used up the room."""
    alphabet = '12-, ">'
    pieces = [*alphabet, '">', '1"', ' "', "-2", "2,1", ',1">', '">1', '"> <local>', '">x<local/>']
    tokens = [p.encode() for p in [*SINGLES, *(p for p in pieces if len(p) > 1)]]
    writer = Writer(tokens, Guides(tokens, len(tokens)), 2)
    writer.force("<focus ")
    writer.force(" " * (writer.open.room - left - len(read)) + read)
    text = writer.open.text
    assert writer.open.room == left
    ends = ["".join(e) for n in range(1, left + 1) for e in itertools.product(alphabet, repeat=n)]
    ends = [end for end in ends if end.endswith(">") and honoured(text + end, 2)]
    tried = [i for i, t in enumerate(tokens) if set(t.decode().partition(">")[0]) <= set(alphabet)]
    allowed = {i for i in tried if fits(tokens[i].decode(), ends)}
    if ends:
        assert set(writer.allowed()).intersection(tried) == allowed
        assert set(writer.allowed()) - set(tried) <= {SINGLES.index(c) for c in "0\t\n\r\f\v"}
    else:  # white space has left no room: it is too late for a mask
        assert allowed == set() and honoured("<focus " + read + '2">', 2) <= (left < 5)
        assert tokens.index(b"x") in writer.allowed()


def fits(token, ends):
    inside, closed, rest = token.partition(">")
    if closed:
        return inside + ">" in ends and "<local/" not in rest
    return any(end.startswith(token) for end in ends)


def test_stop_tokens_are_not_chosen_in_a_tag_and_only_there():
    stops = [SINGLES.index("x"), MADE_UP.index(b'">'), len(MADE_UP) + 3]
    writer = Writer(MADE_UP, GUIDES["made up"], 3, stop_ids=stops)
    assert set(stops[:2]) <= set(writer.allowed())
    writer.force("<focu")
    assert set(stops[:2]) <= set(writer.allowed())
    writer.force('s magic_chunks="1')
    assert MADE_UP.index(b'">') not in writer.allowed()
    assert MADE_UP.index(b'"') in writer.allowed()


def test_a_stop_token_ends_a_beginning_of_a_name_whatever_it_would_write():
    stop = MADE_UP.index(b"s\xe6")
    for stops, may in ((), False), ([stop], True):
        writer = Writer(MADE_UP, GUIDES["made up"], 3, stop_ids=stops)
        writer.force("<focu")
        assert (stop in writer.allowed()) == may


def test_a_long_token_is_allowed_while_it_leaves_room_for_the_rest():
    writer, long = Writer(MADE_UP, GUIDES["made up"], 3), MADE_UP.index(b" " * 100)
    writer.force("<focus")
    assert long in writer.allowed()
    writer.write(long)
    assert long not in writer.allowed() and MADE_UP.index(b" " * 16) in writer.allowed()


def test_special_tokens_are_text_like_others():
    tokens = VOCABULARIES["bytes"]
    writer = Writer(tokens, GUIDES["bytes"], 3)
    end = tokens.index(b"<|im_end|>")
    for text, free in (("", True), ("<", True), ("focus", False), (' magic_chunks="1', False)):
        writer.force(text)
        assert (end in writer.allowed()) == free


def test_without_chunks_no_focus_is_begun():
    writer = Writer(MADE_UP, GUIDES["made up"], 0)
    begun = {t for t in MADE_UP if b"<focus" in t}
    assert {MADE_UP[i] for i in writer.allowed()}.isdisjoint(begun)
    writer.force("<focu")
    assert {t for t in MADE_UP if t[:1] == b"s"}.isdisjoint(MADE_UP[i] for i in writer.allowed())


@pytest.mark.parametrize("missing", ["7", "=", ">", "m", "_"])
def test_a_vocabulary_that_cannot_write_a_tag_is_refused_at_once(missing):
    tokens = [c.encode() for c in SINGLES if c != missing]
    with pytest.raises(ValueError, match=f"no token that writes {missing!r} alone"):
        Guides(tokens, len(tokens))


@pytest.mark.parametrize(("missing", "words"), [(" \n\t\r\f\v", "white space"), ("\"'", "a quote")])
def test_a_vocabulary_needs_one_white_space_and_one_quote(missing, words):
    tokens = [c.encode() for c in SINGLES if c not in missing]
    with pytest.raises(ValueError, match=f"no token that writes {words} alone"):
        Guides(tokens, len(tokens))
    Guides([*tokens, missing[0].encode()], len(tokens) + 1)


def test_a_quote_that_could_not_be_closed_is_not_opened():
    tokens = [c.encode() for c in SINGLES if c != "'"] + [b"='1"]
    writer = Writer(tokens, Guides(tokens, len(tokens)), 3)
    writer.force("<focus magic_chunks")
    assert tokens.index(b"='1") not in writer.allowed()
    assert tokens.index(b"=") in writer.allowed()


def test_stopping_at_what_a_tag_needs_is_refused():
    with pytest.raises(ValueError, match="stop_token_ids holds the only tokens that write '>'"):
        GUIDES["bytes"].guide(range(1, 4), stop_ids=[VOCABULARIES["bytes"].index(b">")])
    with pytest.raises(ValueError, match="stop_token_ids holds the only tokens that write 'm'"):
        GUIDES["bytes"].check([VOCABULARIES["bytes"].index(b"m")])


def test_the_mask_is_packed_from_the_least_significant_bit_and_cannot_be_changed():
    tokens = [c.encode() for c in SINGLES]
    guide = Guides(tokens, 131).guide(range(1, 4))
    tracker = ModeTracker(3)
    tracker.feed("<local")
    mask = guide.allowed(tracker.candidate)
    assert mask.shape == (5,) and mask.dtype == np.uint32
    unpacked = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(unpacked)) == {SINGLES.index(c) for c in " >\n\t\r\f\v"}
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = 0


def test_tokens_beyond_the_logits_are_left_out():
    tokens = [c.encode() for c in SINGLES] + [b'">']
    writer = Writer(tokens[:-1], Guides(tokens, len(tokens) - 1), 3)
    writer.force('<focus magic_chunks="1')
    assert writer.allowed()


def test_a_long_tag_is_read_once():
    """A mask costs the same at the end of a tag of many ids as at its beginning."""
    chunks = 500
    guide = GUIDES["bytes"].guide(range(1, chunks + 1))
    grammar, tracker = guide._masks.grammar, ModeTracker(chunks)
    steps, step = [], grammar.step
    grammar.step = lambda state, char: steps.append(char) or step(state, char)
    try:
        text = '<focus magic_chunks="' + ",".join(map(str, range(1, chunks))) + ",00000"
        for char in text:
            tracker.feed(char)
            guide.allowed(tracker.candidate)
        steps.clear()
        guide.allowed(tracker.candidate)
        tracker.feed("1")
        guide.allowed(tracker.candidate)
        assert steps[0] == "1" and len(steps) < 200
    finally:
        del grammar.step


def test_the_tokens_of_the_tiny_checkpoint_are_its_own():
    """It writes whole tags as one token: those are judged in plain text."""
    spelled = {t.decode() for t in TINY_TOKENS if re.match(rb"</?(focus|local|global|answer)", t)}
    assert '<focus magic_chunks="' in spelled, json.dumps(sorted(spelled))
    writer = Writer(TINY_TOKENS, GUIDES["tiny"], 0)
    assert TINY_TOKENS.index(b'<focus magic_chunks="') not in writer.allowed()
    assert TINY_TOKENS.index(b"<local>") in writer.allowed()
