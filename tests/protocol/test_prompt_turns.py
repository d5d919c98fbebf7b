"""Prompts whose chunks come with later turns, or have ids of the caller's choice."""

import functools

import pytest
from support import prompt_fixtures as fixtures

from da_jax.protocol.chunks import Chunk
from da_jax.protocol.prompt import PromptRenderer

HI, HO = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}
TEMPLATES = {
    "chatml": (fixtures.CHATML, "plain"),
    "trimming": (fixtures.TRIMMING, "plain"),
    "no system": (fixtures.NO_SYSTEM, "plain"),
    "turns": (fixtures.TOOLS_IN_TURNS, "tool"),
    "one turn": (fixtures.TOOLS_IN_ONE_TURN, "tool"),
}


@functools.cache
def renderer(template):
    source, style = TEMPLATES[template]
    return PromptRenderer(fixtures.make("byte_level", source), style)


def own(prompt):
    return [prompt.text[a:b] for a, b in prompt.chunk_chars]


LATER = [{**HI, "chunks": [Chunk("two", "b.txt")]}, HO]


@pytest.mark.parametrize("template", ["chatml", "trimming", "no system"])
def test_plain_chunks_of_a_later_turn_stand_before_its_text(template):
    prompt = renderer(template).render(["one"], "Who?", history=LATER, chunks=["three", "four"])
    assert own(prompt) == [
        "Magic Chunk 1\none\n\n",
        "Magic Chunk 2: b.txt\ntwo",
        "Magic Chunk 3\nthree\n\n",
        "Magic Chunk 4\nfour",
    ]
    between = prompt.text[prompt.chunk_chars[1][1] : prompt.chunk_chars[2][0]]
    assert between.startswith("\n\nHi.<|im_end|>\n<|im_start|>")
    assert between.endswith("Ho.<|im_end|>\n<|im_start|>user\n")
    after = prompt.text[prompt.chunk_chars[3][1] :]
    assert after.startswith("\n\n# Question\nWho?\n\n")
    assert fixtures.filled_instructions(4) in after
    assert (prompt.numbers, prompt.labels) == ((1, 2, 3, 4), (None, "b.txt", None, None))


def test_tool_calls_of_a_later_turn_stand_before_it():
    chunks = [Chunk("three", id=30), Chunk("four", id=4)]
    history = [{**HI, "chunks": [Chunk("two", id=200_000_000)]}, HO]
    prompt = renderer("turns").render([Chunk("one", id=11)], "Who?", history=history, chunks=chunks)
    call = '<|im_start|>assistant\n<call>get_magic_chunk {"magic_chunk": %d}</call><|im_end|>\n'
    response = "<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n"
    said = ((11, "one"), (200_000_000, "two"), (30, "three"), (4, "four"))
    assert own(prompt) == [call % n + response % f"Magic Chunk {n}\n{text}" for n, text in said]
    assert prompt.numbers == (11, 200_000_000, 30, 4)
    between = prompt.text[prompt.chunk_chars[1][1] : prompt.chunk_chars[2][0]]
    assert between == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n"
    assert fixtures.filled_instructions(4, 200_000_000) in prompt.text


def test_a_call_that_goes_on_with_the_turn_before_it_begins_where_it_is_written():
    """Turns of one speaker are joined, so that a call looks otherwise after an answer."""
    source = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% set ns = namespace(who='') %}"
        "{% for m in messages %}{% set who = 'user' if m.role in ['user', 'system'] else 'model' %}"
        "{% if who != ns.who %}{{ '<|im_end|>' if ns.who }}{{ '<|im_start|>' + who + '\n' }}"
        "{% endif %}{% set ns.who = who %}{% for c in m.tool_calls %}"
        "{{ '<bos>' + c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ '<tool_response>' if m.role == 'tool' }}{{ m.content }}"
        "{{ '</tool_response>' if m.role == 'tool' }}"
        "{% endfor %}{{ '<|im_end|><|im_start|>model\n' }}"
    )
    r = PromptRenderer(fixtures.make("byte_level", source), "tool")
    prompt = r.render(["one"], "Who?", system="Sys.", history=[HI, HO], chunks=["two", "three"])
    call = (
        '<bos>get_magic_chunk{"magic_chunk": %d}<tool_response>Magic Chunk %d\n%s</tool_response>'
    )
    assert own(prompt) == [
        "<|im_end|><|im_start|>model\n" + call % (1, 1, "one"),
        call % (2, 2, "two"),
        call % (3, 3, "three"),
    ]
    assert prompt.text[: prompt.chunk_chars[1][0]].endswith("<|im_start|>model\nHo.")


def test_ids_are_shown_in_headers_and_in_any_order():
    ids = (70, 3, 999_999_999)
    chunks = [Chunk("a", id=ids[0]), Chunk("b", "b.txt", ids[1]), Chunk("c", id=ids[2])]
    prompt = renderer("chatml").render(chunks, "Who?")
    assert [text.split("\n")[0] for text in own(prompt)] == [
        "Magic Chunk 70", "Magic Chunk 3: b.txt", "Magic Chunk 999999999",
    ]  # fmt: skip
    assert prompt.numbers == ids
    assert [prompt.span_of[n] for n in ids] == list(prompt.chunks)
    assert "into 3 numbered magic chunks" in prompt.text
    assert "The highest number in this context is 999999999." in prompt.text


def test_without_a_document_there_is_no_chunk_and_nothing_to_declare():
    for template in TEMPLATES:
        prompt = renderer(template).render(None, "Who?", system="Sys.")
        assert prompt.chunks == prompt.numbers == () and prompt.scaffold == ((0, len(prompt)),)
        assert "# Question\nWho?<|im_end|>" in prompt.text
    later = renderer("turns").render(None, "Who?", chunks=["one"])
    assert later.numbers == (1,) and "into 1 numbered magic chunk. " in later.text


def test_vanilla_shows_later_chunks_in_their_turns():
    prompt = renderer("turns").render("one", "Who?", history=LATER, chunks=["x"], arm="vanilla")
    assert "<|im_start|>user\none\n\nb.txt\ntwo\n\nHi.<|im_end|>" in prompt.text
    assert "<|im_start|>user\nx\n\n# Question\nWho?<|im_end|>" in prompt.text
    assert prompt.chunks == prompt.numbers == ()
    assert renderer("turns").render(None, "Who?", arm="vanilla").chunks == ()


def test_calls_that_a_template_refuses_after_a_turn_name_the_remedy():
    refuses = "{% for m in messages %}{% if m.tool_calls and loop.index0 > 3 %}"
    refuses += "{{ raise_exception('late') }}{% endif %}{% endfor %}"
    r = PromptRenderer(fixtures.make("byte_level", refuses + fixtures.TOOLS_IN_TURNS), "tool")
    r.render(["one"], "Who?")
    with pytest.raises(ValueError, match="after these turns; use style 'plain'"):
        r.render(["one"], "Who?", history=[HI, HO, HI, HO], chunks=["two"])


def test_own_tool_calls_of_the_caller_may_stand_before_later_chunks():
    call = {"function": {"name": "f", "arguments": {}}}
    for content in ("", "Wait."):
        asks = {"role": "assistant", "content": content, "tool_calls": [call]}
        history = [HI, asks, {"role": "tool", "content": "5"}]
        prompt = renderer("turns").render(["one"], "Who?", history=history, chunks=["two"])
        assert own(prompt)[1].startswith("<|im_start|>assistant\n<call>get_magic_chunk {")
        between = prompt.text[prompt.chunk_chars[0][1] : prompt.chunk_chars[1][0]]
        assert f"assistant\n{content}<call>f {{}}</call>" in between
        assert between.endswith("<tool_response>\n5\n</tool_response><|im_end|>\n")
