"""From tags to modes, statistics and the answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.protocol.modes import Arm, Declaration, Mode, ModeTracker
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
    with pytest.raises(ValueError, match="arm is 'x'; use 'da', 'unmasked' or 'vanilla'"):
        ModeTracker(1, arm="x")
    assert Arm("da") is Arm.DA


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
        ("<local>so <answer>42</local> And prose.", "42"),
        ('<answer>42 <focus magic_chunks="1">copied</focus> more', "42"),
        ("<answer>42 <focus>copied</focus> more", "42"),
        ("<answer>42 <global>more", "42"),
        ("<answer>1<answer></answer> tail", "1"),
        ("<answer>a<local>b", "ab"),
        ("<answer>hm</think>so 42", "so 42"),
        ("<answer>draft</answer></think>The real one is 42.", "The real one is 42."),
        ("<answer>draft</answer></think><local>42</local> it is", "42"),
        ("<local>a</local><answer>draft</answer></think>\n", "draft"),
        ("<local>x</think>y", "y"),
        ("a</think>b<channel|> ", "ab"),
        ("<answer>a</think>b<channel|>", "a"),
        ("a</think>b<channel|>c", "c"),
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
    assert not track("<answer>1</answer></think>So 2.").stats.format_correct
    assert track("1", arm="vanilla").stats.format_correct
    assert not track(" ", arm="vanilla").stats.format_correct


@pytest.mark.parametrize("arm", Arm)
def test_a_tool_call_is_open_until_it_or_the_thoughts_end(arm):
    tracker = ModeTracker(3, arm=arm)
    states = []
    for text in ("x", "<tool_call>", "</local>", "</think>", "<tool_call>", "</tool_call>"):
        tracker.feed(text)
        states.append((tracker.tool_called, tracker.tool_ended))
    no, called, ended = (False, False), (True, False), (True, True)
    assert states == [no, called, called, no, called, ended]


def test_what_the_client_does_not_see_is_no_part_of_the_answer():
    tracker = ModeTracker(3)
    tracker.feed("<answer>4")
    tracker.feed("<|im_end|>", hidden=True)
    tracker.feed("2 STOP</answer>")
    tracker.hide(len("STOP</answer>"))
    assert tracker.answer() == "42"
    tracker = ModeTracker(3)
    for text, hidden in (("a <glo", False), ("bal>", True), ("b STOP<global>", False)):
        tracker.feed(text, hidden=hidden)
    tracker.hide(len("STOP<global>"))
    assert tracker.answer() == "a b"


@pytest.mark.parametrize(
    ("text", "mismatched"),
    [
        ("<local>x <answer>y</answer></local>", 0),
        ("<local>x <answer>y</answer></local></local>", 1),
        ("<local>x <answer>y</local></answer>", 1),
        ("<answer>y</answer></local>", 1),
        ("<local>x</answer></local>", 2),
        ('<local>x<focus magic_chunks="1">y</focus></local>', 1),
        ('<local>x<focus magic_chunks="9">y</focus></local>', 1),
        ('<focus magic_chunks="9">x</focus></focus>', 1),
        ('<focus magic_chunks="<local>">x</focus></local>', 0),
        ('<focus magic_chunks="9">x<focus magic_chunks="1">y</focus></focus>', 0),
        ("<local>hm</think></local>", 1),
        ("<local/>hm</think></local>", 1),
        ("<local></local></local>", 1),
    ],
)
def test_closers_that_match_nothing_are_counted(text, mismatched):
    assert track(text).stats.mismatched == mismatched


def test_the_end_of_the_answer_is_known_at_once():
    tracker = ModeTracker(3)
    tracker.feed("</answer><answer><local>4</local>")
    assert not tracker.answer_closed
    tracker.feed("</answer> more")
    assert tracker.answer_closed
    assert not track("<answer>hm</think></answer>").answer_closed


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


# --- a mode that the caller declares for the start ---------------------------------------------

LOCAL, FOCUS = Declaration(Mode.LOCAL), Declaration(Mode.FOCUS, (3, 1))


def test_a_declaration_is_checked_and_its_focus_ascends():
    assert FOCUS.focus == (1, 3) and Declaration(Mode.GLOBAL).focus == ()
    for mode, focus, message in (
        (Mode.FOCUS, (), "FOCUS names no chunk"),
        (Mode.LOCAL, (1,), r"LOCAL has the focus \(1,\); only FOCUS has one"),
        (Mode.FOCUS, (0,), "a chunk of the focus is 0"),
        ("local", (), "mode is 'local'; use a Mode"),
    ):
        with pytest.raises(ValueError, match=message):
            Declaration(mode, focus)


def test_a_declaration_is_read_from_words():
    assert Declaration.of("local") == Declaration.of(Mode.LOCAL) == Declaration.of(LOCAL) == LOCAL
    assert Declaration.of("focus:3, 1") == FOCUS
    assert Declaration.of("global").mode is Mode.GLOBAL
    for words in ("focus", "local:1", "LOCAL", "answer", "", "focus3"):
        with pytest.raises(ValueError, match=r"the initial mode is .*; use 'global', 'local' or"):
            Declaration.of(words)
    with pytest.raises(ValueError, match="the focus is 'x'"):
        Declaration.of("focus:x")


@pytest.mark.parametrize("initial", [LOCAL, FOCUS])
def test_a_response_starts_in_the_initial_mode_until_its_own_tags_act(initial):
    tracker = ModeTracker(3, initial=initial)
    assert (tracker.mode, tracker.focus) == (initial.mode, initial.focus)
    tracker.feed("a </")
    assert tracker.mode is initial.mode
    tracker.feed(f"{initial.mode.value}> b <focus magic_chunks='2'>c")
    assert (tracker.mode, tracker.focus) == (Mode.FOCUS, (2,))
    assert [mode for _, mode in tracker.segments] == [initial.mode, Mode.GLOBAL, Mode.FOCUS]
    assert (tracker.stats.mismatched, tracker.stats.transitions) == (0, 2)
    assert tracker.stats.attempts == 1  # the caller's is not the model's


@pytest.mark.parametrize(
    "tag", ["</answer>", "</think>", "<global>", "<local/>", "<focus magic_chunks='9'>"]
)
@pytest.mark.parametrize("initial", [LOCAL, FOCUS])
def test_whatever_widens_ends_the_initial_mode(initial, tag):
    assert track(f"a{tag}", initial=initial).mode is Mode.GLOBAL


def test_what_is_written_in_an_initial_local_is_local_text():
    assert track("42</local> or so", initial=LOCAL).answer() == "42"
    assert track("42</local> or so", initial=FOCUS).answer() == "42 or so"
    stats = track("so <answer>42</answer>!</local>", initial=LOCAL).stats
    assert (stats.mismatched, stats.format_correct) == (0, True)


def test_an_initial_mode_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"the initial focus names 3, but .* chunks 1 to 2"):
        ModeTracker(2, initial=FOCUS)
    with pytest.raises(ValueError, match="starts in LOCAL; it has no modes"):
        ModeTracker(2, initial=LOCAL, arm="vanilla")
    assert ModeTracker([3, 1, 70], initial=FOCUS).focus == (1, 3)


@settings(max_examples=200, deadline=None)
@given(soup)
def test_after_the_first_tag_that_acts_the_initial_mode_is_forgotten(deltas):
    usual, local = track(*deltas), track(*deltas, initial=LOCAL)
    assert local.text == usual.text
    if usual.stats.transitions:
        assert (local.mode, local.focus) == (usual.mode, usual.focus)
