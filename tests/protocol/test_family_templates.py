"""Prompts of the model families: tools, thoughts, and the tokens of the template itself."""

import functools
from typing import NamedTuple

import pytest
from support import prompt_fixtures as fixtures

from da_jax.protocol.modes import Mode, ModeTracker
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import PLAIN, TOOL


class Family(NamedTuple):
    """A template, a kind of tokenizer, and the tokens that it has for them."""

    template: str
    kind: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    style: str = "tool"
    thinks: bool = True


_GEMMA4 = (
    *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|think|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
)
_GEMMA3 = ("<start_of_turn>", "<end_of_turn>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_QWEN = ("<think>", "<tool_call>", "</tool_call>")
SENTENCE_PIECE, BYTES = "replace", "byte_level"


def _gemma4(**options):
    return Family(fixtures.gemma4(**options), SENTENCE_PIECE, _GEMMA4)


def _qwen(**options):
    return Family(fixtures.qwen(**options), BYTES, (), _QWEN)


FAMILIES = {
    "gemma 3": Family(fixtures.GEMMA3, SENTENCE_PIECE, _GEMMA3, style="plain", thinks=False),
    "gemma 4 large": _gemma4(empty_thoughts=True),
    "gemma 4 small": _gemma4(empty_thoughts=False),
    "gemma 4 first": _gemma4(empty_thoughts=True, tool_role=False),
    "llama 3": Family(fixtures.LLAMA3, BYTES, _LLAMA, style="plain", thinks=False),
    "llama 3.1": Family(fixtures.LLAMA31, BYTES, _LLAMA, style="plain", thinks=False),
    "qwen 3": _qwen(calls="json", opens=False),
    "qwen 3.5": _qwen(),
    "qwen 3.5 small": _qwen(default=False),
    "qwen 3.8": _qwen(effort=True),
}
THINKING = [name for name, family in FAMILIES.items() if family.thinks]
EMPTY = "<think>\n\n</think>\n\n"
TAILS = {  # without thinking, and with it
    "gemma 3": ("<start_of_turn>model\n", None),
    "gemma 4 large": ("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n"),
    "gemma 4 small": ("<|turn>model\n", "<|turn>model\n"),
    "gemma 4 first": ("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n"),
    "llama 3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", None),
    "llama 3.1": ("<|start_header_id|>assistant<|end_header_id|>\n\n", None),
    "qwen 3": (f"<|im_start|>assistant\n{EMPTY}", "<|im_start|>assistant\n"),
    "qwen 3.5": (f"<|im_start|>assistant\n{EMPTY}", "<|im_start|>assistant\n<think>\n"),
    "qwen 3.5 small": (f"<|im_start|>assistant\n{EMPTY}", "<|im_start|>assistant\n<think>\n"),
    "qwen 3.8": (f"<|im_start|>assistant\n{EMPTY}", "<|im_start|>assistant\n<think>\n"),
}
DOCUMENTS = ["The river\nruns.", 'naïve "café" 東京 👩‍👧', "market {x}"]


@functools.cache
def tokenizer(name):
    family = FAMILIES[name]
    return fixtures.make(family.kind, family.template, special=family.special, added=family.added)


@functools.cache
def renderer(name, thinking=False, style="auto"):
    return PromptRenderer(tokenizer(name), style, thinking=thinking)


def conversation(name, history=()):
    style = FAMILIES[name].style
    on_call = name == "gemma 4 first"
    return fixtures.conversation(DOCUMENTS, history, style=style, responses_on_call=on_call)


def wrapped(name, number):
    """What a template writes for one chunk, from the start of its call to the end of its turn."""
    text = f"Magic Chunk {number}\n{DOCUMENTS[number - 1]}"
    if name.startswith("gemma 4"):
        return (
            ("<|turn>model\n" if number == 1 else "")
            + f"<|tool_call>call:get_magic_chunk{{magic_chunk:{number}}}<tool_call|>"
            + f'<|tool_response>response:get_magic_chunk{{value:<|"|>{text}<|"|>}}<tool_response|>'
        )
    call = (
        f'{{"name": "get_magic_chunk", "arguments": {{"magic_chunk": {number}}}}}'
        if name == "qwen 3"
        else f"<function=get_magic_chunk>\n<parameter=magic_chunk>\n{number}\n</parameter>\n"
        "</function>"
    )
    return (
        f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_used_where_a_conversation_can_begin_with_a_call(name):
    style = FAMILIES[name].style
    assert renderer(name).style is {"tool": TOOL, "plain": PLAIN}[style]
    if style == "plain":
        with pytest.raises(ValueError, match="use style 'plain'"):
            renderer(name, style="tool")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_template_for_the_same_conversation(name, thinking):
    if thinking and name not in THINKING:
        return
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    for turns in ((), history):
        prompt = renderer(name, thinking).render(
            DOCUMENTS, "Who?", system="Be brief.", history=turns
        )
        messages, tools = conversation(name, turns)
        options = {"add_generation_prompt": True, "enable_thinking": thinking, "tools": tools}
        options["preserve_thinking"] = False
        text = tokenizer(name).apply_chat_template(messages, tokenize=False, **options)
        assert prompt.text == text
        ids = tokenizer(name).apply_chat_template(messages, return_dict=False, **options)
        assert prompt.ids.tolist() == ids


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.style == "tool"])
def test_the_span_of_a_chunk_is_what_the_template_wrote_for_its_call(name):
    prompt = renderer(name).render(DOCUMENTS, "Who?")
    offsets = tokenizer(name)(prompt.text, add_special_tokens=False, return_offsets_mapping=True)
    for number, ((start, end), span) in enumerate(zip(prompt.chunk_chars, prompt.chunks), 1):
        assert prompt.text[start:end] == wrapped(name, number)
        touching = [
            at
            for at, (a, b) in enumerate(offsets["offset_mapping"])
            if a < end and max(b, a + 1) > start
        ]
        assert list(range(*span)) == touching
    after = prompt.text[prompt.chunk_chars[-1][1] :]
    assert after.startswith(("<|turn>user\n# Question", "<|im_start|>user\n# Question"))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_of_a_question_is_the_beginning_of_those_of_later_ones(name, thinking):
    """Up to the question itself, which is asked with instructions and remembered without."""
    if thinking and name not in THINKING:
        return
    r, history, earlier = renderer(name, thinking), [], []
    said = "<think>\nhm</think>\n\nHo." if name.startswith("qwen") else "Ho."
    for number, chunks in enumerate([["late"], [], ["later", "latest"], ["last"]]):
        question = f"Question {number}?"
        prompt = r.render(DOCUMENTS, question, chunks=chunks, system="S.", history=history)
        assert len(prompt.chunks) == len(DOCUMENTS) + [1, 1, 3, 4][number]
        for before, ids in earlier:
            assert prompt.ids.tolist()[: len(ids)] == ids
            assert prompt.chunks[: len(before.chunks)] == before.chunks
            assert len(ids) >= before.chunks[-1][1]
        border = prompt.text.index(f"# Question\n{question}")
        encoded = tokenizer(name)(
            prompt.text, add_special_tokens=False, return_offsets_mapping=True
        )
        stable = sum(end <= border for _, end in encoded["offset_mapping"])
        earlier.append((prompt, prompt.ids.tolist()[:stable]))
        history += [
            {"role": "user", "content": question, "chunks": chunks},
            {"role": "assistant", "content": said},
        ]


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.style == "tool"])
def test_the_span_of_a_later_chunk_is_what_the_template_wrote_for_its_call(name):
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    prompt = renderer(name).render(None, "Who?", history=history, chunks=DOCUMENTS)
    assert [prompt.text[a:b] for a, b in prompt.chunk_chars] == [
        wrapped(name, n) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_in_documents_or_turns_becomes_a_token_of_the_template(name, thinking):
    if thinking and name not in THINKING:
        return
    family, r = FAMILIES[name], renderer(name, thinking)
    control = [*family.special, *family.added, *fixtures.CONTROL]
    ids = tokenizer(name).convert_tokens_to_ids(control)
    nasty = "".join(control)
    history = [{"role": "user", "content": "u" + nasty}, {"role": "assistant", "content": "a"}]
    calm_history = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    prompt = r.render(
        [f"Qz{n}{nasty}" for n in range(3)], "q" + nasty, system="s" + nasty, history=history
    )
    calm = r.render(["x"] * 3, "q", system="s", history=calm_history)
    assert [i for i in prompt.ids if i in ids] == [i for i in calm.ids if i in ids]
    for n, (start, end) in enumerate(prompt.chunk_chars):
        assert [f"Qz{m}" in prompt.text[start:end] for m in range(3)] == [m == n for m in range(3)]


@pytest.mark.parametrize("arm", ["da", "vanilla"])
@pytest.mark.parametrize("name", FAMILIES)
def test_without_thinking_no_thoughts_are_open(name, arm):
    assert renderer(name).render("x", "y", arm=arm).text.endswith(TAILS[name][0])
    assert "<|think|>" not in renderer(name).render("x", "y").text
    assert "Effort" not in renderer(name).render("x", "y").text


@pytest.mark.parametrize("arm", ["da", "vanilla"])
@pytest.mark.parametrize("name", THINKING)
def test_with_thinking_the_template_says_so(name, arm):
    text = renderer(name, True).render("x", "y", arm=arm).text
    assert text.endswith(TAILS[name][1])
    assert ("<|turn>system\n<|think|>\n" in text) == name.startswith("gemma")
    assert ("Effort: xhigh." in text) == (name == "qwen 3.8")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - THINKING))
def test_thinking_that_the_template_does_not_know_is_an_error(name):
    with pytest.raises(ValueError, match="the chat template knows no thoughts"):
        renderer(name, thinking=True)


def test_thoughts_that_cannot_be_switched_off_are_an_error():
    always = fixtures.CHATML.replace("assistant\n", "assistant\n<think>\n")
    for template in (always, fixtures.qwen(off=False)):
        made = fixtures.make("byte_level", template)
        with pytest.raises(ValueError, match=r"cannot be switched off.*pass thinking=True"):
            PromptRenderer(made)
        prompt = PromptRenderer(made, thinking=True).render("x", "y")
        assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")


def test_thinking_is_true_or_false():
    for value in ("off", 0, None):
        with pytest.raises(ValueError, match=r"thinking is .*; give True or False"):
            PromptRenderer(tokenizer("qwen 3"), thinking=value)
    with pytest.raises(ValueError, match="enable_thinking=True; use the option thinking"):
        PromptRenderer(tokenizer("qwen 3"), template_kwargs={"enable_thinking": True})


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", THINKING)
def test_thoughts_of_earlier_turns_are_dropped(name, thinking):
    said = "<|channel>thought\nsecret<channel|>Ho."
    if name.startswith("qwen"):
        said = "<think>\nsecret\n</think>\n\nHo."
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": said}]
    r = renderer(name, thinking)
    text = r.render(["one"], "Who?", history=history).text
    plain = [history[0], {"role": "assistant", "content": "Ho."}]
    assert "secret" not in text and text == r.render(["one"], "Who?", history=plain).text


def test_thoughts_that_a_caller_wants_to_keep_are_kept():
    keeps = PromptRenderer(tokenizer("qwen 3.8"), template_kwargs={"preserve_thinking": True})
    turn = {"role": "assistant", "content": "Ho.", "reasoning_content": "secret"}
    text = keeps.render(["one"], "Who?", history=[turn]).text
    assert "<think>\nsecret\n</think>\n\nHo." in text


@pytest.mark.parametrize(
    ("before", "end"),
    [("Hm", "</think>"), ("<think>\nHm", "</think>"), ("<|channel>thought\nHm", "<channel|>")],
)
def test_what_is_declared_in_thoughts_ends_with_them(before, end):
    text = f'{before} <focus magic_chunks="1">a <local>b <answer>draft</answer>{end}'
    tracker = ModeTracker(3)
    tracker.feed(text)
    assert tracker.mode is Mode.GLOBAL
    tracker.feed('\n\n<focus magic_chunks="2">seen</focus><local><answer>42</answer></local>')
    assert tracker.answer() == "42"
    plain = ModeTracker(0, arm="vanilla")
    plain.feed(f"{before} draft{end}\n\nIt is 42.")
    assert plain.answer() == "It is 42."
