"""From tags to modes, statistics and the answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.protocol.modes import Mode, ModeTracker
from da_jax.protocol.tags import Kind

FRAGMENTS = [
    *("<local>", "<answer>", "<global>", "</local>", "</focus>", "</answer>", "</think>"),
    *('<focus magic_chunks="1">', '<focus magic_chunks="2,3">', '<focus magic_chunks="4">'),
    *("<focus", "<local ", ">", "`", "\n", "```\n", "word ", "日本", "<tool_call>", "x" * 150),
]
soup = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14)


def track(*deltas, chunks=3, **options):
    tracker = ModeTracker(chunks, **options)
    for delta in deltas:
        tracker.feed(delta)
    tracker.finish()
    return tracker


def test_generation_starts_in_global():
    tracker = ModeTracker(3)
    assert (tracker.mode, tracker.focus, tracker.answer()) == (Mode.GLOBAL, (), "")


@pytest.mark.parametrize(
    ("text", "mode", "focus"),
    [
        ('<focus magic_chunks="3,1">', Mode.FOCUS, (1, 3)),
        ("<local>", Mode.LOCAL, ()),
        ("<answer>", Mode.LOCAL, ()),
        ("<local><global>", Mode.GLOBAL, ()),
        ("<local></local>", Mode.GLOBAL, ()),
        ("<local></focus>", Mode.GLOBAL, ()),
        ('<local><focus magic_chunks="2">', Mode.FOCUS, (2,)),
        ('<focus magic_chunks="2"><local>', Mode.LOCAL, ()),
        ('<focus magic_chunks="2"><focus magic_chunks="3">', Mode.FOCUS, (3,)),
        ('<local><focus magic_chunks="9">', Mode.GLOBAL, ()),
        ('<focus magic_chunks="2"><local/>', Mode.GLOBAL, ()),
        ("<local>hm</think>", Mode.GLOBAL, ()),
        ("<local>hm<channel|>", Mode.GLOBAL, ()),
        ("<local>`<global>`", Mode.GLOBAL, ()),
        ("`<local>`", Mode.GLOBAL, ()),
        ("<local", Mode.GLOBAL, ()),
        ("<local><tool_call>", Mode.LOCAL, ()),
    ],
)
def test_the_mode_after_a_text(text, mode, focus):
    for deltas in ([text], text):
        tracker = track(*deltas)
        assert (tracker.mode, tracker.focus) == (mode, focus)


def test_the_mode_holds_right_after_the_character_that_ends_the_tag():
    tracker = ModeTracker(3)
    tracker.feed("<local")
    assert tracker.mode is Mode.GLOBAL
    tracker.feed("> and")
    assert tracker.mode is Mode.LOCAL


def test_of_several_tags_in_a_delta_the_last_one_counts():
    tracker = ModeTracker(3)
    events = tracker.feed('</focus>a<local>b<focus magic_chunks="2">c')
    assert [event.name for event in events] == ["focus", "local", "focus"]
    assert (tracker.mode, tracker.focus) == (Mode.FOCUS, (2,))


@pytest.mark.parametrize(
    ("answer_mode", "mode", "focus"),
    [("local", Mode.LOCAL, ()), ("keep", Mode.FOCUS, (1,)), ("global", Mode.GLOBAL, ())],
)
def test_what_answer_does_is_an_option(answer_mode, mode, focus):
    text = '<focus magic_chunks="1">x<answer>y'
    tracker = track(text, answer_mode=answer_mode)
    assert (tracker.mode, tracker.focus, tracker.answer()) == (mode, focus, "y")
    assert track(text, "</answer>", answer_mode=answer_mode).mode is Mode.GLOBAL


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="answer_mode is 'x'"):
        ModeTracker(1, answer_mode="x")
    with pytest.raises(ValueError, match="arm is 'x'"):
        ModeTracker(1, arm="x")


def test_segments_give_tags_to_the_mode_before_them():
    tracker = track('a<focus magic_chunks="1">b</focus', "><local>c", "</local>")
    assert tracker.segments == [
        ('a<focus magic_chunks="1">', Mode.GLOBAL),
        ("b</focus>", Mode.FOCUS),
        ("<local>", Mode.GLOBAL),
        ("c</local>", Mode.LOCAL),
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 42 </answer>", "42"),
        ("<answer>1</answer> or <answer>2</answer> so", "2"),
        ("<answer>1</answer><answer></answer>", "1"),
        ("<answer>cut off", "cut off"),
        ("<local>x</local><answer>y</answer><local>z</local>", "y"),
        ("<answer><local>42</local></answer> bye", "42"),
        ("<local>a</local>b<local>c</local>d", "c"),
        ('<local>a<focus magic_chunks="1">b', "a"),
        ("<answer>hm</think>so 42", "hm"),
        ("just text", "just text"),
        ("<global> some</global> text <focus>", "some text"),
        ("`<answer>` is a tag", "`<answer>` is a tag"),
        ("<answer>a `<local>` b</answer>", "a `<local>` b"),
        ("<answer>1 < 2</answer>", "1 < 2"),
        ("<local " + "x" * 200, "<local " + "x" * 200),
        ("", ""),
    ],
)
def test_the_answer(text, answer):
    assert track(text).answer() == track(*text).answer() == answer


def test_format_correct_means_that_an_answer_was_declared():
    assert track("<answer>1").stats.format_correct
    assert track("<local>1</local>").stats.format_correct
    assert not track("1").stats.format_correct
    assert not track("<answer> </answer>").stats.format_correct


def test_the_end_of_the_answer_is_known_at_once():
    tracker = ModeTracker(3)
    tracker.feed("</answer><answer><local>4</local>")
    assert not tracker.answer_closed
    tracker.feed("</answer> more")
    assert tracker.answer_closed


def test_statistics():
    tracker = track(
        '<focus magic_chunks="1">a</focus><focus magic_chunks="9">b</focus></local>',
        "<local>`<answer>`</answer><local/></local><local><focus",
    )
    stats = tracker.stats
    assert (stats.attempts, stats.successes, stats.focus_declines) == (3, 1, 1)
    assert stats.declines == {"unknown_chunk": 1, "self_closing": 1}
    assert (stats.mismatched, stats.quoted) == (2, 1)  # </local> after </focus>, </answer>
    assert stats.transitions == 5  # focus, </focus>, local, </answer>, local


def test_a_repeated_declaration_is_no_transition():
    assert track("<global><local><local>").stats.transitions == 1
    assert track('<focus magic_chunks="1,2"><focus magic_chunks="1-2">').stats.transitions == 1
    assert track('<focus magic_chunks="1"><focus magic_chunks="2">').stats.transitions == 2


def test_vanilla_declares_nothing_and_answers_with_its_whole_text():
    tracker = ModeTracker(3, arm="vanilla")
    events = tracker.feed(" <local>a</local><answer>b</answer><tool_call> ")
    assert [event.kind for event in events] == [Kind.TOOL_CALL]
    assert (tracker.mode, tracker.answer_closed, tracker.tool_called) == (Mode.GLOBAL, False, True)
    assert tracker.answer() == "<local>a</local><answer>b</answer><tool_call>"
    assert tracker.stats.transitions == 0


def test_unmasked_follows_the_tags_as_da_does():
    text = '<focus magic_chunks="1">a</focus><answer>b</answer>'
    assert track(text, arm="unmasked").segments == track(text).segments
    assert track(text, arm="unmasked").answer() == "b"


@settings(max_examples=500, deadline=None)
@given(soup)
def test_any_text_keeps_the_invariants(deltas):
    tracker = ModeTracker(3)
    for delta in deltas:
        tracker.feed(delta)
        assert bool(tracker.focus) == (tracker.mode is Mode.FOCUS)
        assert set(tracker.focus) <= {1, 2, 3}
    tracker.finish()
    text = "".join(deltas)
    assert tracker.text == "".join(piece for piece, _ in tracker.segments) == text
    whole = track(text)
    assert whole.stats == tracker.stats
    assert whole.answer() == tracker.answer()
    assert whole.segments == tracker.segments
    assert (whole.mode, whole.focus) == (tracker.mode, tracker.focus)
    stats = tracker.stats
    assert stats.successes + stats.focus_declines <= stats.attempts
    tracker.feed("</answer>")
    assert tracker.mode is Mode.GLOBAL
