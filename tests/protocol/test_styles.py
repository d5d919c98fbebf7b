"""Styles: checked data, and instructions that teach the protocol."""

import dataclasses
import json
import re

import pytest
from support import prompt_fixtures as fixtures

from da_jax.protocol import styles
from da_jax.protocol.modes import Mode, ModeTracker
from da_jax.protocol.styles import PLAIN, TOOL, Style


def test_styles_are_data():
    for style in styles.STYLES.values():
        assert Style.from_json(style.to_json()) == style
        assert len(fixtures.make("byte_level")(style.preamble)["input_ids"]) >= 16
        assert len(style.preamble.split()) >= 16
    with pytest.raises(ValueError, match=r"unknown keys \['colour'\]"):
        Style.from_json('{"name": "x", "rendering": "plain", "preamble": "", "colour": 1}')
    with pytest.raises(ValueError, match=r"missing \['preamble', 'rendering'\]"):
        Style.from_json('{"name": "x"}')


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rendering", "html", "rendering 'html': tool or plain"),
        ("chunk", "{text}", "chunk='{text}' must name"),
        ("chunk", "{n:03d}{text}", "chunk='.*takes no format"),
        ("chunk", "{n}{text", "chunk='{n}{text': expected '}'"),
        ("question", "{question}{}", "question='.*' must name"),
        ("cap", 3, "target"),
        ("name", None, "name is None; give a value of type str"),
        ("preamble", None, "preamble is None; give a value of type str"),
        ("rendering", ["tool"], r"rendering is \['tool'\]; give a value of type str"),
        ("target", True, "target is True; give a value of type int"),
        ("target", 5.0, "target is 5.0; give a value of type int"),
        ("da_only", "no", "da_only is 'no'; give a value of type bool"),
        ("da_only", 1, "da_only is 1; give a value of type bool"),
        ("tool_name", "", "tool_name must not be blank"),
        ("tool_argument", " ", "tool_argument must not be blank"),
        ("empty_context", "\n", "empty_context must not be blank"),
    ],
)
def test_a_wrong_field_of_a_style_is_named(field, value, message):
    data = {**dataclasses.asdict(PLAIN), field: value}
    with pytest.raises(ValueError, match=f"style .*{message}"):
        Style(**data)
    with pytest.raises(ValueError, match=f"style .*{message}"):
        Style.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"'])
def test_what_is_no_style_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"style: .*JSON"):
        Style.from_json(text)
    (tmp_path / styles.STYLE_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"da_style\.json: style: "):
        Style.of_folder(tmp_path)


WORDS = re.sub(r"\s+", " ", TOOL.instructions)


@pytest.mark.parametrize(
    "demand",
    [
        "global: you see the whole context",
        "focus: you see only the chunks that you name, the question, and what you have written",
        "local: you see no chunk, only the question and what you have written so far",
        '<focus magic_chunks="3">...</focus> reads one chunk',
        '<focus magic_chunks="2,5">...</focus> reads several',
        "These numbers come from a longer context of 12 chunks",
        'A tag acts from its ">" on',
        "The highest number in this context is {highest}",
        "After a wrong number or a malformed tag everything stays visible",
        "- global, focus, local, answer -",
        "- local, global, focus, local, answer -",
        "several focus blocks one after the other",
        "Use focus at least once",
        "copied word for word from the chunk: 1 to 12 words",
        "End in a local block that names the value",
        "Inside local you cannot read the chunks, so never recall their text there",
        "An example, from a longer context of 12 chunks",
    ],
)
def test_the_instructions_demand(demand):
    assert demand in WORDS
    assert PLAIN.instructions == TOOL.instructions


def test_the_worked_example_follows_its_own_rules():
    example = TOOL.instructions[TOOL.instructions.index("\n<global>The") :]
    tracker = ModeTracker(12)
    tracker.feed(example)
    tracker.finish()
    stats = tracker.stats
    assert (stats.declines, stats.mismatched, stats.quoted) == ({}, 0, 0)
    assert (stats.attempts, stats.successes, stats.format_correct) == (2, 2, True)
    assert tracker.answer() == "1894" and tracker.answer_closed and tracker.mode is Mode.GLOBAL
    copied = [text for text, mode in tracker.segments if mode is Mode.FOCUS]
    assert all(1 <= len(text.split()) <= 12 for text in copied)
