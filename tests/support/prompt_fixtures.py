"""Small tokenizers of every kind, and chat templates that behave like the published ones."""

import functools
import json

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

CONTROL = ["<bos>", "<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>", "</think>"]
CORPUS = [
    "The river runs behind the market, and Magic Chunk 7 waits. # Question: who? <f> | im_start",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and\n\nblank lines\n  indented user assistant system tool model",
    'naïve café 東京、大阪。 emoji 👩‍👧 über {"a": [1]} <answer>yes</answer> Question question',
] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>\n' }}{% endif %}"
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

KINDS = [
    "byte_level",
    "metaspace_first",
    "metaspace_always",
    "metaspace_never",
    "prepend",
    "newline_tokens",
    "unigram",
    "word_level",
    "stripping",
    "normalized",
]


def make(kind: str, template: str | None = CHATML) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of one kind with a chat template."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(kind)), bos_token="<bos>"
    )
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
