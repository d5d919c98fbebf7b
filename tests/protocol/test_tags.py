"""The tag scanner against examples, and against a slow oracle that sees the whole text."""

import itertools
import json
import pickle
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from da_jax.protocol.bench import scanner_throughput
from da_jax.protocol.tags import THINK_ENDS, TOOL_MARKERS, Kind, Reason, TagEvent, TagScanner

CHUNKS = 3
OTHER_LIMIT = 128
FOCUS_LIMIT = OTHER_LIMIT + CHUNKS * len("1-1, ")


def scan(*deltas, chunks=CHUNKS, **options):
    scanner = TagScanner(chunks, **options)
    events = [event for delta in deltas for event in scanner.feed(delta)]
    return events + scanner.finish()


def brief(events):
    return [(str(e.kind), e.name, e.ids or (e.reason and str(e.reason))) for e in events]


# --- the oracle ------------------------------------------------------------------------------

HEAD = re.compile(r"<(/?)(focus|local|answer|global)(?![\w.:-])")
LIST = r"\d+(?:-\d+)?(?:(?:[ \t\r\n\f\v]*,[ \t\r\n\f\v]*|[ \t\r\n\f\v]+)\d+(?:-\d+)?)*"
FOCUS = re.compile(rf"<focus\s+magic_chunks\s*=\s*([\"'])\s*({LIST})\s*\1\s*>", re.ASCII)
BARE = re.compile(r"<(?:local|answer|global)\s*>", re.ASCII)


def code_at(text, since, at):
    """What code is open at `at` if none was at `since`: 'inline', 'fence' or ''."""
    fence = 0
    *lines, last = text[since:at].split("\n")
    fresh = since == 0 or text[since - 1] == "\n"
    for line in lines:
        if fence:
            fence = 0 if fresh and re.fullmatch(rf"`{{{fence},}}[ \t\r]*", line) else fence
        elif fresh and (opening := re.fullmatch("(`{3,})[^`]*", line)):
            fence = len(opening[1])
        fresh = True
    if fence or (fresh and re.fullmatch("(`{3,})[^`]*", last)):
        return "fence"
    return "inline" if last.count("`") % 2 else ""


def wanted_ids(tag):
    """The ids of a well-formed narrowing or widening opener, or None."""
    if BARE.fullmatch(tag):
        return ()
    if not (found := FOCUS.fullmatch(tag)):
        return None
    ids = set()
    for item in re.findall(r"[0-9-]+", found[2]):
        low, _, high = item.partition("-")
        span = range(int(low), int(high or low) + 1)
        if not span or span[0] < 1 or span[-1] > CHUNKS:
            return None
        ids |= set(span)
    return tuple(sorted(ids))


def oracle(text):
    """(kind, name, start, end, ids) of every event in `text`."""
    events = []
    tool_end, in_call = None, False
    since = at = 0
    markers = {*THINK_ENDS, *(m for pair in TOOL_MARKERS for m in pair)}

    def mark(marker, start):
        nonlocal tool_end, in_call, since
        end = start + len(marker)
        if marker in THINK_ENDS:
            kind, tool_end, in_call = "think_end", None, False
        elif marker == tool_end:
            kind, tool_end, in_call = "tool_end", None, False
        elif marker in dict(TOOL_MARKERS) and not in_call and not code_at(text, since, start):
            kind, tool_end, in_call = "tool_call", dict(TOOL_MARKERS)[marker], True
        else:
            return
        since = end
        events.append((kind, marker, start, end, ()))

    def tag(part, start, end, alone):
        if not (head := HEAD.match(part)):
            return
        ids = wanted_ids(part) if alone or head[2] == "global" else None
        kind = "close" if head[1] else "declined" if ids is None else "open"
        events.append((kind, head[2], start, end, ids or ()))

    while (at := text.find("<", at)) >= 0:
        marker = next((m for m in markers if text.startswith(m, at)), None)
        head = HEAD.match(text, at)
        if marker:
            mark(marker, at)
            at += len(marker)
            continue
        if not head:
            at += 1
            continue
        narrowing = not head[1] and head[2] != "global"
        limit = FOCUS_LIMIT if head.group() == "<focus" else OTHER_LIMIT
        window = text[at : at + limit]
        code = "tool" if in_call else code_at(text, since, at)
        if code:
            stops = "[<>`\n]" if code == "inline" and narrowing else "[<>`]"
            stop = re.compile(stops).search(window, 1)
            if not stop or stop.group() != ">":
                at += 1
                continue
            end = at + stop.end()
            if narrowing:
                events.append(("quoted", head[2], at, end, ()))
            else:
                tag(text[at:end], at, end, alone=True)
                since, in_call = end, False
            at = end
            continue
        complete = ">" in window
        if complete:
            window = window[: window.index(">") + 1]
        end = at + len(window)
        starts = [at + found.start() for found in re.finditer("<", window)]
        parts = [text[a:b] for a, b in zip(starts, [*starts[1:], end])]
        if complete:
            for start, part in zip(starts[:-1], parts[:-1]):
                tag(part, start, end, alone=False)
            since, in_call = end, False
            if parts[-1] in markers:
                mark(parts[-1], starts[-1])
            else:
                tag(parts[-1], starts[-1], end, alone=len(parts) == 1)
            at = end
        elif len(window) == limit:
            decided = len(parts) - 1 or 1
            for start, part in zip(starts[:decided], parts):
                tag(part, start, end, alone=False)
            since = at = starts[-1] if len(parts) > 1 else end
            in_call = False
        else:
            for start, part in zip(starts, parts):
                if HEAD.match(part) and HEAD.match(part).group() == "<focus":
                    events.append(("unfinished", "focus", start, end, ()))
            break
    return events


FRAGMENTS = [
    *("<local>", "<answer>", "<global>", "</local>", "</focus>", "</answer>", "</global >"),
    *('<focus magic_chunks="1">', "<focus magic_chunks = '3, 1-2'>", '<focus magic_chunks="4">'),
    *("<focus", "<focus ", "<local ", "</local ", "<global ", "<loc", "<", "</", ">", "/>", '"'),
    *("`", "``", "```", "````", "\n", "\n```", "\n```py\n", "```\n", " ", "a < b", "<b>", "<!--"),
    *(
        "magic_chunks=",
        "magic_chunks='2'",
        "<focusing>",
        "x" * 60,
        "<x " + "y" * 130,
        "日本",
        "\r\n",
    ),
    *(*THINK_ENDS, *TOOL_MARKERS[0], *TOOL_MARKERS[1], "<0x3C>", "<tool_"),
]
soup = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS), st.text(max_size=3)),
    max_size=14,
).map("".join)


def cuts(text, points):
    borders = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@settings(max_examples=700, deadline=None)
@given(soup, st.lists(st.integers(0, 1000), max_size=12))
@example("<focus magic_chunks='1'" + " " * 200 + "<local>", [3, 50])
@example("```<local>``` then <local>", [1])
@example("```\n```\n```\n<local>", [8])
@example("`<local\n> <local>", [8])
@example("<focus " + "y" * 100 + "<local " + "z" * 100, [120])
@example("<focus " * 40 + "<local>", [100])
def test_agrees_with_the_oracle_however_the_text_is_split(text, points):
    events = scan(text)
    assert [(str(e.kind), e.name, e.start, e.end, e.ids) for e in events] == oracle(text)
    assert scan(*cuts(text, points)) == events
    assert scan(*text) == events
    for event in events:
        assert text.startswith(event.text, event.start)
    assert [e.end for e in events] == sorted(e.end for e in events)


@settings(max_examples=400, deadline=None)
@given(soup)
def test_nothing_swallows_a_later_tag(text):
    *_, close, local = scan(text + "</local><local>")
    assert (close.kind, close.start) == (Kind.CLOSE, len(text))
    assert (local.kind, local.name, local.start) == (Kind.OPEN, "local", len(text) + 8)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_is_accepted(text):
    assert scan(text) == scan(*text)


# --- syntax ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "ids"),
    [
        ('<focus magic_chunks="3">', (3,)),
        ('<focus magic_chunks="3,7">', (3, 7)),
        ("<focus magic_chunks='7 3'>", (3, 7)),
        ('<focus  magic_chunks = "3">', (3,)),
        ('<focus\nmagic_chunks\n=\n"\t3 ,\n 7 "\n>', (3, 7)),
        ('<focus magic_chunks="3-5">', (3, 4, 5)),
        ('<focus magic_chunks="3-3">', (3,)),
        ('<focus magic_chunks="5,2-4 3,5">', (2, 3, 4, 5)),
        ('<focus magic_chunks="007">', (7,)),
        ('<focus magic_chunks="1-10">', tuple(range(1, 11))),
    ],
)
def test_focus_is_honoured(tag, ids):
    (event,) = scan(f"a{tag}b", chunks=10)
    assert event == TagEvent(Kind.OPEN, "focus", tag, 1, 1 + len(tag), ids)


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("<focus>", Reason.EMPTY),
        ('<focus magic_chunks="">', Reason.EMPTY),
        ('<focus magic_chunks=" ">', Reason.EMPTY),
        ('<focus magic_chunks=",">', Reason.MALFORMED),
        ('<focus magic_chunks="3,">', Reason.MALFORMED),
        ('<focus magic_chunks="3,,4">', Reason.MALFORMED),
        ('<focus magic_chunks="three">', Reason.MALFORMED),
        ('<focus magic_chunks="３">', Reason.MALFORMED),
        ('<focus magic_chunks="+3">', Reason.MALFORMED),
        ('<focus magic_chunks="3 - 5">', Reason.MALFORMED),
        ('<focus magic_chunks="5-3">', Reason.MALFORMED),
        ('<focus magic_chunks="3>4">', Reason.MALFORMED),
        ("<focus magic_chunks=\"3'>", Reason.MALFORMED),
        ('<focus magic_chunks"3">', Reason.MALFORMED),
        ("<focus magic_chunks=>", Reason.MALFORMED),
        ("<focus magic_chunks>", Reason.MALFORMED),
        ('<focus="3">', Reason.MALFORMED),
        ("<focus 3>", Reason.MALFORMED),
        ('<focus\u00a0magic_chunks="3">', Reason.MALFORMED),
        ('<focus magic_chunks="0">', Reason.UNKNOWN_CHUNK),
        ('<focus magic_chunks="11">', Reason.UNKNOWN_CHUNK),
        ('<focus magic_chunks="3,11">', Reason.UNKNOWN_CHUNK),
        ('<focus magic_chunks="8-11">', Reason.UNKNOWN_CHUNK),
        ('<focus magic_chunks="' + "9" * 100 + '">', Reason.UNKNOWN_CHUNK),
        ('<focus chunks="3">', Reason.UNKNOWN_ATTRIBUTE),
        ('<focus Magic_Chunks="3">', Reason.UNKNOWN_ATTRIBUTE),
        ('<focus magic_chunks="3" why="x">', Reason.UNKNOWN_ATTRIBUTE),
        ('<focus magic_chunks="3" magic_chunks="4">', Reason.DUPLICATE_ATTRIBUTE),
        ("<focus magic_chunks=3>", Reason.UNQUOTED),
        ('<focus magic_chunks="3"/>', Reason.SELF_CLOSING),
        ("<local/>", Reason.SELF_CLOSING),
        ("<local / >", Reason.SELF_CLOSING),
        ("<answer/>", Reason.SELF_CLOSING),
        ("<global/>", Reason.SELF_CLOSING),
        ("<local x>", Reason.MALFORMED),
        ('<local magic_chunks="3">', Reason.UNKNOWN_ATTRIBUTE),
    ],
)
def test_openers_that_cannot_be_honoured_are_declined(tag, reason):
    declined, later = (e for e in scan(f"{tag} <local>", chunks=10) if e.kind != Kind.QUOTED)
    assert (declined.kind, declined.reason, declined.ids) == (Kind.DECLINED, reason, ())
    assert (later.kind, later.name) == (Kind.OPEN, "local")


@pytest.mark.parametrize(
    "text",
    [
        *("< local>", "</ local>", "<Local>", "<LOCAL>", "<focusing>", "<local-name>", "<local.x>"),
        *(
            "<focus_group>",
            "<localité>",
            "<b>",
            "<script>",
            "<!-- -->",
            "a < b > c",
            "<0x3C>local>",
        ),
        *("<", "<<", "<>", "</>", "&lt;local&gt;", "<loc al>", "<tool_call", "</thinking>"),
        *("<local", "<local ", "</focus", "<answer\n"),
    ],
)
def test_other_markup_is_text(text):
    assert scan(text) == []
    assert brief(scan(f"{text}<global>"))[-1] == ("open", "global", None)


def test_closers_and_white_space():
    assert brief(scan("<local ></local\n><answer\t></answer ><global></global x></focus/>")) == [
        *(("open", "local", None), ("close", "local", None)),
        *(("open", "answer", None), ("close", "answer", None)),
        *(("open", "global", None), ("close", "global", None), ("close", "focus", None)),
    ]


def test_several_tags_in_one_delta_are_all_events_in_order():
    text = 'x</focus><local>y</local><focus magic_chunks="2">'
    assert [e.name for e in scan(text)] == ["focus", "local", "local", "focus"]


def test_a_limit_on_the_ids():
    assert scan('<focus magic_chunks="1-2,1">', max_ids=2)[0].ids == (1, 2)
    assert scan('<focus magic_chunks="1-3">', max_ids=2)[0].reason == Reason.TOO_MANY


def test_no_chunks():
    assert scan('<focus magic_chunks="1">', chunks=0)[0].reason == Reason.UNKNOWN_CHUNK


def test_all_chunks_of_a_long_prompt_in_one_tag():
    spelled = "\n, ".join(map(str, range(1, 501)))
    assert scan(f'<focus magic_chunks="{spelled}">', chunks=500)[0].ids == tuple(range(1, 501))


# --- doubt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit",
    ["<", "<focus ", "<focus 1,", "</local ", "<local\n", "`<focus ", "<tool_call", "`", "x"],
)
@pytest.mark.parametrize("before", ["", "<focus ", "```\n<focus ", "<tool_call>"])
def test_memory_is_bounded_by_the_longest_tag(before, unit):
    scanner = TagScanner(CHUNKS)
    bound = len(pickle.dumps(scanner)) + 8 * FOCUS_LIMIT
    scanner.feed(before)
    for _ in range(200):
        for char in unit * 20:
            scanner.feed(char)
        assert len(pickle.dumps(scanner)) < bound


@pytest.mark.parametrize("tail", ["", "x", "<b", "``"])
def test_a_focus_that_grows_too_long_is_declined_at_once(tail):
    text = "<focus " + "y" * (FOCUS_LIMIT - 8)
    scanner = TagScanner(CHUNKS)
    assert scanner.feed(text) == []
    (event,) = scanner.feed("y" + tail)
    assert (event.kind, event.reason, event.end) == (Kind.DECLINED, Reason.TOO_LONG, FOCUS_LIMIT)
    assert brief(scanner.feed("<local>")) == [("open", "local", None)]


def test_a_tag_at_the_end_of_one_that_grows_too_long_is_seen():
    text = "<focus " + "y" * (FOCUS_LIMIT - 10) + "<local>"
    assert brief(scan(text)) == [("declined", "focus", "too_long"), ("open", "local", None)]


def test_a_tag_inside_an_unfinished_one_never_narrows():
    assert brief(scan('<focus magic_chunks="<local>"> <focus magic_chunks="2">')) == [
        ("declined", "focus", "malformed"),
        ("declined", "local", "nested"),
        ("open", "focus", (2,)),
    ]
    assert brief(scan("<local </answer>")) == [
        ("declined", "local", "malformed"),
        ("close", "answer", "nested"),
    ]
    assert brief(scan("<focus </think>")) == [
        ("declined", "focus", "malformed"),
        ("think_end", "</think>", None),
    ]


def test_an_unfinished_focus_at_the_end_is_an_attempt():
    assert brief(scan("x <focus")) == [("unfinished", "focus", None)]
    assert brief(scan('x <focus magic_chunks="1"')) == [("unfinished", "focus", None)]
    assert brief(scan("x <focu")) == []
    assert brief(scan("`<focus")) == []


# --- code and markers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("`<local>`", "a ` b <local>", "``` <local>", "x ```<local>", "`` ` <local>"),
        *("```\n<local>", "```py\nx\n<local>", "```\n~\n``\n<local>", "````\n```\n<local>"),
        *("```\n``` x\n<local>", "```\n ```\n<local>", "```\n```<local>"),
        *("<tool_call>{<local>", "<|tool_call>call:f{<local>"),
    ],
)
def test_narrowing_tags_in_code_are_text_and_widening_ones_close_it(text):
    *_, quoted, close, honoured = scan(text + "</local><local>")
    assert (quoted.kind, quoted.name) == (Kind.QUOTED, "local")
    assert (close.kind, honoured.kind) == (Kind.CLOSE, Kind.OPEN)


@pytest.mark.parametrize(
    "text",
    [
        *("`x` ", "`` ", "`x\n", "`<b>` ", "```x``` ", "x```y``` ", "\n```x```\n", "`<focus` "),
        *("```\nx\n```\n", "```\nx\n````  \r\n", "````\n```\n````\n", "`<local`\n", "`<local\n"),
        *("` </focus>", "```\n<global>", "```\n</think>", "```\n<global/>"),
        *("<tool_call>`</tool_call>", "<|tool_call>x<tool_call|>", "`<tool_call>`\n"),
    ],
)
def test_code_that_is_closed_quotes_nothing(text):
    assert brief(scan(text + "<local>"))[-1] == ("open", "local", None)


def test_markers_are_reported():
    assert brief(scan("a</think>b<channel|><tool_call></tool_call></tool_call>")) == [
        ("think_end", "</think>", None),
        ("think_end", "<channel|>", None),
        ("tool_call", "<tool_call>", None),
        ("tool_end", "</tool_call>", None),
    ]
    assert brief(scan("<x></think>", think_ends=["<x>"], tool_markers=[])) == [
        ("think_end", "<x>", None)
    ]


@pytest.mark.parametrize("inside", ["</local>", "<global>", "</focus x>", "`</answer>", "<focus "])
def test_tags_in_the_arguments_of_a_tool_call_do_not_hide_its_end(inside):
    events = scan(f'<tool_call>{{"x":"{inside}"}}</tool_call><local>')
    ends = [e.name for e in events if e.kind is Kind.TOOL_END]
    assert ends == ["</tool_call>"]
    assert brief(events)[-1] == ("open", "local", None)
    assert Kind.TOOL_END not in [e.kind for e in scan(f"<tool_call>{inside}</think></tool_call>")]


@pytest.mark.parametrize("marker", ["", "x", "[END]", "<a", "<a b>", "<`>", "<a>b>", "<local>"])
def test_markers_that_cannot_be_scanned_for_are_refused(marker):
    with pytest.raises(ValueError, match="marker"):
        TagScanner(1, think_ends=[marker])


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="chunks is -1"):
        TagScanner(-1)
    with pytest.raises(ValueError, match="max_ids is 0"):
        TagScanner(1, max_ids=0)


def test_events_are_plain_data():
    (event,) = scan("<focus>")
    assert json.dumps([event.kind, event.reason]) == '["declined", "empty"]'
    with pytest.raises(AttributeError):
        event.kind = Kind.OPEN


def test_the_benchmark_has_a_row_for_each_text_and_length():
    rows = scanner_throughput(lengths=(100, 400))
    assert [(row.text, row.chars) for row in rows] == [
        *(("prose", 100), ("prose", 400), ("code", 100), ("code", 400))
    ]


# --- room ------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(soup)
@example("<focus " + "y" * 100 + "<local " + "z" * 200)
@example("<focus " * 40)
@example("</local " + "y" * 115 + "<focus " + "z" * 200)
@example("`" + "</global " + "\n" * 130 + "<local " + "y" * 200)
@example("```\n<focus " + "y" * 200 + "\n```\n<answer " + "z" * 130)
def test_no_event_comes_before_a_tag_ends_or_the_room_is_used_up(text):
    scanner = TagScanner(CHUNKS)
    rooms = [scanner.room]
    for at, char in enumerate(text, start=1):
        if scanner.feed(char):
            since = text.rfind(">", 0, at) + 1  # the last character may be the `>`
            assert all(at - before >= rooms[before] for before in range(since, at))
        rooms.append(scanner.room)
        assert rooms[-1] > 0


@pytest.mark.parametrize("head", ["<focus ", "x <local\n", "</answer ", "`x` </local "])
def test_the_room_of_an_unfinished_tag_is_exact(head):
    scanner = TagScanner(CHUNKS)
    scanner.feed(head)
    left = scanner.room
    assert scanner.feed("y" * (left - 1)) == [] and scanner.room == 1
    assert [event.reason for event in scanner.feed("y")] == [Reason.TOO_LONG]
