"""Small tokenizers of every kind, and chat templates that behave like the published ones."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from da_jax.protocol.styles import TOOL

CONTROL = ["<bos>", "<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>", "</think>"]
CORPUS = [
    "The river runs behind the market, and Magic Chunk 7 waits. # Question: who? <f> | im_start",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and\n\nblank lines\n  indented user assistant system tool model",
    'naïve café 東京、大阪。 emoji 👩‍👧 über {"a": [1]} <answer>yes</answer> Question question',
] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# System text folded into a user turn by the template itself, contents trimmed, roles checked.
TRIMMING = (
    "{{ '<bos>' }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>model\n' }}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
    TRIMMING
)
# Tool calls and responses are turns of their own; user text that looks like a response is taken
# for one.
TOOLS_IN_TURNS = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{{ '\n# Tools' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}"
    "{% if m.role == 'tool' or m.content.startswith('<tool_response>') %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name }} {{ c.function.arguments | tojson }}{{ '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
# Calls and responses share one model turn, and the response is a trimmed JSON string.
TOOLS_IN_ONE_TURN = (
    "{{ '<bos>' }}{% set ns = namespace(open=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '<|im_start|>system\n' + m.content }}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.tool_calls %}{% if not ns.open %}{{ '<|im_start|>model\n' }}{% endif %}"
    "{% set ns.open = true %}{% for c in m.tool_calls %}"
    "{{ '<tool_response>call:' + c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ 'value:' }}{{ m.content | trim | tojson }}"
    "{{ '</tool_response>' }}"
    "{% else %}{% if ns.open %}{{ '<|im_end|>\n' }}{% set ns.open = false %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|im_start|>model\n' }}"
)

# What follows behaves like the templates of the families that are served here.
GEMMA3 = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Tools are described in the first turn after the system's, whoever speaks there: a conversation
# cannot begin with a call.
LLAMA31 = (
    "{{ bos_token }}{% macro turn(role, text) %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}"
    "{% endmacro %}{% set about = '' %}{% if messages[0].role == 'system' %}"
    "{% set about = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}"
    "{{ turn('system', ('Environment: ipython\n' if tools else '') + about) }}"
    "{% if tools %}{{ turn('user', 'Functions:\n' + tools | tojson + messages[0].content | trim) }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{{ turn('assistant', m.tool_calls[0].function | tojson) }}{% elif m.role == 'tool' %}"
    "{{ turn('ipython', m.content | tojson) }}{% else %}{{ turn(m.role, m.content | trim) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)


def gemma4(*, empty_thoughts: bool, tool_role: bool = True) -> str:
    """Calls and responses share one model turn, in a notation without JSON.

    Args:
      empty_thoughts: Without thinking the prompt ends with thoughts that are empty.
      tool_role: Responses may be messages of their own; in the first published templates they
        belong to the message that calls.
    """
    response = (
        "{{ '<|tool_response>response:' + name + '{value:' + value(text) + '}<tool_response|>' }}"
        "{% set ns.open = true %}"
    )
    follow = (
        "{% for later in messages[loop.index:] %}{% if later.role != 'tool' %}"
        "{% set ns.stop = true %}{% endif %}{% if not ns.stop %}"
        "{% set name, text = m.tool_calls[0].function.name, later.content %}"
        + response
        + "{% endif %}{% endfor %}"
    )
    return (
        "{% macro value(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}"
        "{% elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}"
        "{{ k + ':' + value(x) }}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}{% elif v is iterable %}{{ '[' }}{% for x in v %}{{ value(x) }}"
        "{{ ',' if not loop.last }}{% endfor %}{{ ']' }}{% else %}{{ v | string }}{% endif %}"
        "{% endmacro %}{% macro spoken(text) %}{% set ns = namespace(out='') %}"
        "{% for part in text.split('<channel|>') %}"
        "{% set ns.out = ns.out + part.split('<|channel>')[0] %}{% endfor %}{{ ns.out | trim }}"
        "{% endmacro %}{{ bos_token }}{% set ns = namespace(open=false, stop=false) %}"
        "{% set first = messages[0] %}{% set told = first.role in ['system', 'developer'] %}"
        "{% if enable_thinking or tools or told %}{{ '<|turn>system\n' }}"
        "{{ '<|think|>\n' if enable_thinking }}{% if told %}{{ first.content | trim }}"
        "{% set messages = messages[1:] %}{% endif %}{% for t in tools or [] %}"
        "{{ '<|tool>declaration:' + t.function.name + value(t.function) + '<tool|>' }}{% endfor %}"
        "{{ '<turn|>\n' }}{% endif %}{% for m in messages %}"
        + ("{% if m.role != 'tool' %}" if tool_role else "{% if true %}")
        + "{% set model = m.role == 'assistant' %}{% if not (model and ns.open) %}"
        "{{ '<|turn>' + ('model' if model else m.role) + '\n' }}{% endif %}"
        "{% set ns.open, ns.stop = false, false %}{% for c in m.tool_calls %}"
        "{{ '<|tool_call>call:' + c.function.name + value(c.function.arguments) }}"
        "{{ '<tool_call|>' }}{% endfor %}{% for r in m['tool_responses'] %}"
        "{% set name, text = r.name, r.response %}"
        + response
        + "{% endfor %}"
        + ("{% if m.tool_calls and not ns.open %}" + follow + "{% endif %}" if tool_role else "")
        + "{{ spoken(m.content) if model else m.content | trim }}"
        "{{ '<turn|>\n' if m.content or not ns.open }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn>model\n' if not ns.open }}"
        + ("{{ '<|channel>thought\n<channel|>' if not enable_thinking }}" if empty_thoughts else "")
        + "{% endif %}"
    )


_QWEN_CALLS = {
    "json": '<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' + c.arguments | tojson'
    " + '}\n</tool_call>",
    "xml": "<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>",
}


def qwen(*, calls="xml", opens=True, default=True, effort=False, off=True) -> str:
    """Tool responses stand in user turns, and thoughts between `<think>` and `</think>`.

    Args:
      calls: "json" as Qwen 3 writes them, with tools after the system message and contents as they
        are; "xml" as Qwen 3.5 and later, with tools before it and contents trimmed.
      opens: With thinking the prompt ends with `<think>`; else the model writes it.
      default: What holds where the caller says nothing of thinking.
      effort: A sentence about effort comes first, and old thoughts are kept unless the caller says
        otherwise, and only as `reasoning_content` (Qwen 3.8).
      off: Thinking can be switched off.
    """
    trim = " | trim" if calls == "xml" else ""
    tools = "{% for t in tools or [] %}{{ '\n' + t | tojson }}{% endfor %}"
    about = "{{ first.content" + trim + " if told }}"
    kept = (
        "preserve_thinking is undefined or preserve_thinking or"
        if effort
        else "preserve_thinking or"
    )
    spoken = "" if effort else ".split('</think>')[-1].lstrip('\n')"
    empty = "'<think>\n\n</think>\n\n'" if off else "raise_exception('always thinks')"
    return (
        f"{{% set on = enable_thinking | default({str(default).lower()}) %}}"
        "{% set first = messages[0] %}{% set told = first.role == 'system' %}"
        + (
            "{% set hint = 'Effort: xhigh.\n\n' if on else '' %}"
            if effort
            else "{% set hint = '' %}"
        )
        + "{% if told or tools or hint %}{{ '<|im_start|>system\n' + hint }}"
        + ({"json": about + tools, "xml": tools + about}[calls])
        + "{{ '<|im_end|>\n' }}{% endif %}{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' and not"
        f" (m.content{trim}).startswith('<tool_response>') %}}{{% set ns.last = loop.index0 %}}"
        "{% endif %}{% endfor %}{% if ns.last < 0 %}{{ raise_exception('no question') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        f"{{% if {kept} loop.index0 > ns.last %}}{{{{ '<think>\n' }}}}"
        "{{ m.reasoning_content | default('') + '\n</think>\n\n' }}{% endif %}"
        f"{{{{ (m.content{trim}){spoken} }}}}{{% for call in m.tool_calls %}}"
        "{% set c = call.function %}{{ '"
        + _QWEN_CALLS[calls]
        + "' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}"
        f"{{{{ '\n<tool_response>\n' + m.content{trim} + '\n</tool_response>' }}}}"
        "{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
        "{% elif m.role == 'user' or not loop.first %}"
        f"{{{{ '<|im_start|>' + m.role + '\n' + m.content{trim} + '<|im_end|>\n' }}}}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if not on %}{{ "
        + empty
        + " }}"
        + ("{% else %}{{ '<think>\n' }}" if opens else "")
        + "{% endif %}{% endif %}"
    )


def filled_instructions(count: int, highest: int | None = None) -> str:
    """The instructions for so many chunks, up to a number of `highest` (by default `count`)."""
    text = TOOL.instructions.replace("{count}", str(count)).replace("{s}", "s" * (count != 1))
    return text.replace("{highest}", str(highest or count))


def conversation(
    documents: Sequence[str],
    history: Sequence[dict[str, Any]] = (),
    *,
    style: str,
    responses_on_call: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools that a caller would write by hand to ask "Who?", "Be brief."

    Args:
      documents: The chunks.
      history: Earlier turns.
      style: "tool" or "plain".
      responses_on_call: The messages that call tools hold their responses.
    """
    instructions = filled_instructions(len(documents))
    headed = [f"Magic Chunk {n}\n{text}" for n, text in enumerate(documents, 1)]
    system = {"role": "system", "content": TOOL.preamble + "\n\nBe brief."}
    turns = [*history, {"role": "user", "content": f"# Question\nWho?\n\n{instructions}"}]
    if style == "plain":
        first = "\n\n".join([*headed, turns[0]["content"]])
        return [system, {"role": "user", "content": first}, *turns[1:]], None
    name, calls = "get_magic_chunk", []
    for n, text in enumerate(headed, 1):
        function = {"name": name, "arguments": {"magic_chunk": n}}
        call: dict[str, Any] = {"role": "assistant", "content": ""}
        call["tool_calls"] = [{"type": "function", "function": function}]
        if responses_on_call:
            calls.append({**call, "tool_responses": [{"name": name, "response": text}]})
        else:
            calls += [call, {"role": "tool", "name": name, "content": text}]
    number = {"type": "integer", "description": "The number of the chunk."}
    parameters = {"type": "object", "properties": {"magic_chunk": number}}
    tool = {"name": name, "description": TOOL.tool_description}
    tool["parameters"] = parameters | {"required": ["magic_chunk"]}
    return [system, *calls, *turns], [{"type": "function", "function": tool}]


KINDS = [
    "byte_level",
    "metaspace_first",
    "metaspace_always",
    "metaspace_never",
    "replace",
    "prepend",
    "newline_tokens",
    "unigram",
    "word_level",
    "stripping",
    "normalized",
]


def make(
    kind: str,
    template: str | None = CHATML,
    *,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of one kind with a chat template, and further tokens, special or only added."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(kind)), bos_token="<bos>"
    )
    fast.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    fast.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    fast.chat_template = template
    return fast


@functools.cache
def _backend(kind: str) -> str:
    special = [AddedToken(t, special=t != "</think>", normalized=False) for t in CONTROL]
    if kind == "byte_level":
        tok = Tokenizer(models.BPE())
        tok.normalizer = normalizers.NFC()
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        tok = Tokenizer(models.Unigram())
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        tok.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=220,
            special_tokens=["<unk>", *CONTROL],
            unk_token="<unk>",
            show_progress=False,
        )
    elif kind == "word_level":
        tok = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tok.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *CONTROL], show_progress=False)
    else:
        tok = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        bytes_ = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=520, special_tokens=["<unk>", *CONTROL, *bytes_], show_progress=False
        )
        replace = normalizers.Replace(" ", "▁")
        tok.normalizer = replace
        if kind.startswith("metaspace"):
            tok.normalizer = None
            tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split("_")[1])
        elif kind == "prepend":
            tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        elif kind == "normalized":
            tok.normalizer = normalizers.Sequence([normalizers.Lowercase(), replace])
            special = [AddedToken(t, special=True, normalized=True) for t in CONTROL]
        elif kind == "stripping":
            special = [
                AddedToken(t, special=True, normalized=False, lstrip=i % 2 == 0, rstrip=i % 3 == 0)
                for i, t in enumerate(CONTROL)
            ]
        elif kind == "newline_tokens":
            special += [AddedToken("\n" * n, normalized=False) for n in (1, 2, 3)]
            tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.train_from_iterator(CORPUS, trainer)
    if kind not in ("byte_level", "unigram", "word_level"):  # bytes are ordinary vocabulary here
        data = json.loads(tok.to_str())
        data["added_tokens"] = []
        tok = Tokenizer.from_str(json.dumps(data))
    tok.add_tokens(special)
    return tok.to_str()
