"""Incremental detokenisation against `tokenizers` itself and against Python's UTF-8 decoder."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from da_jax.engine.detokenize import IncrementalDecoder, TokenTable

METASPACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
SPECIAL = [AddedToken("<|im_end|>", special=True), AddedToken("</think>", special=False)]


def byte_level():
    """Byte-level BPE, as Qwen's, with tokens that end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ('"', ">"), ("ä", "¸"), ("ð", "Ł"), ("<", "f")]
    words = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(SPECIAL)
    return tokenizer


def byte_fallback(*, strip):
    """BPE over pieces with `▁` and bytes, as Gemma's, or, with `strip`, as Llama's."""
    letters = [*'abcdefghijklmnopqrstuvwxyz0123456789<>/_=",.\n', "▁", "é", "世"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁", "▁"), ('"', ">")]
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [*letters, *("".join(merge) for merge in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip_steps = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([*METASPACE, *strip_steps])
    tokenizer.add_tokens([*SPECIAL, AddedToken("▁▁▁", normalized=False)])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level(),
    "gemma": byte_fallback(strip=False),
    "llama": byte_fallback(strip=True),
}
TABLES = {name: TokenTable.from_tokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
texts = st.lists(
    st.text(max_size=8)
    | st.sampled_from(
        [
            "A 世世ab",
            "😀👩‍👩‍👧",
            " the",
            "  ",
            "<|im_end|>",
            "</think>",
            '<focus magic_chunks="3">',
            "<0xEA>",
            "▁",
            "don't . ,",
            "ĉ",
            "e\u0301",
            "\ufffd",
            "१२",
            "\r\n",
        ]
    ),
    max_size=8,
).map("".join)


def stream(table, ids, step=1):
    decoder = IncrementalDecoder(table)
    deltas = [decoder.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [*deltas, decoder.flush()]


@every_tokenizer
@settings(max_examples=200, deadline=None)
@given(text=texts, step=st.integers(1, 4))
def test_the_deltas_of_a_valid_text_join_to_what_the_tokenizer_decodes(name, text, step):
    tokenizer, table = TOKENIZERS[name], TABLES[name]
    ids = tokenizer.encode(text).ids
    deltas = stream(table, ids, step)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
    "".join(deltas).encode()  # no surrogates
    assert "".join(stream(table, ids, len(ids) + 1)) == "".join(deltas)


@every_tokenizer
@settings(max_examples=100, deadline=None)
@given(text=texts.filter(lambda text: "\ufffd" not in text))
def test_each_delta_is_that_of_decode_stream(name, text):
    """Where text is valid; a leading space that is stripped is the only one it may time apart."""
    tokenizer, table = TOKENIZERS[name], TABLES[name]
    ids = tokenizer.encode(text).ids
    reference = DecodeStream(skip_special_tokens=False)
    expected = [reference.step(tokenizer, token_id) or "" for token_id in ids]
    if name == "llama":
        assert "".join(stream(table, ids)) == "".join(expected)
    else:
        assert stream(table, ids) == [*expected, ""]


@every_tokenizer
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_decode_to_their_bytes_and_hold_nothing_back(name, data):
    table = TABLES[name]
    ids = data.draw(st.lists(st.integers(-2, len(table) + 3), max_size=30))
    whole = b"".join(map(table.bytes_of, ids))
    text = whole.decode("utf-8", "replace")
    for space in range(table.strip):
        text = text[text.startswith(" ", space) :]
    assert "".join(stream(table, ids)) == text
    decoder, shown = IncrementalDecoder(table), ""
    for count, token_id in enumerate(ids, 1):
        shown += decoder.push([token_id])
        held = text.removeprefix(shown)
        done = b"".join(map(table.bytes_of, ids[:count])).decode("utf-8", "replace")
        assert text.startswith(shown)
        assert len(shown) >= len(done) - 1 - table.strip, held  # one unfinished character at most


def test_bytes_that_cannot_become_a_character_are_shown_at_once():
    table = TokenTable([bytes([byte]) for byte in range(256)])
    for data, shown in {
        b"\xff": "\ufffd",
        b"\x80a": "\ufffda",
        b"\xe4\xb8a": "\ufffda",
        b"\xe4\xb8": "",
        b"\xf0\x9f\x98\x80": "😀",
        b"\xed\xa0": "\ufffd\ufffd",  # the beginning of a surrogate
        b"\xed\x9f": "",
        b"\xf4\x90": "\ufffd\ufffd",
    }.items():
        decoder = IncrementalDecoder(table)
        assert "".join(decoder.push([byte]) for byte in data) == shown
        assert (shown + decoder.flush()) == data.decode("utf-8", "replace")


@every_tokenizer
def test_the_table_reads_every_token_as_the_tokenizer_does(name):
    tokenizer, table = TOKENIZERS[name], TABLES[name]
    assert len(table) == tokenizer.get_vocab_size() and table.known.all()
    for token_id in range(len(table)):
        text = table.bytes_of(token_id).decode("utf-8", "replace")
        assert text[text[:1] == " " and table.strip :] == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )


def test_added_tokens_of_a_byte_level_vocabulary_are_literal():
    tokenizer = byte_level()
    tokenizer.add_tokens(["café", "日本"])
    table = TokenTable.from_tokenizer(tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("café", "日本", "<|im_end|>")]
    assert "".join(stream(table, ids)) == "café日本<|im_end|>"


def test_ids_without_a_token_write_nothing():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 4}, []))
    tokenizer.decoder = decoders.ByteLevel()
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.known.tolist() == [True, False, False, False, True]
    assert "".join(stream(table, [0, 2, 99, -1, 4])) == "ab"


def test_a_spelled_out_byte_is_text_and_a_byte_token_is_the_byte():
    tokenizer, table = TOKENIZERS["gemma"], TABLES["gemma"]
    spelled = [tokenizer.token_to_id(char) for char in "<0"]
    assert "".join(stream(table, [*spelled, tokenizer.token_to_id("<0x3C>")])) == "<0<"
    assert (
        "".join(stream(table, [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "한".encode()]))
        == "한"
    )


@every_tokenizer
def test_contains_finds_the_tokens_that_can_end_a_tag(name):
    tokenizer, table = TOKENIZERS[name], TABLES[name]
    ends = table.contains(b">")
    assert ends.dtype == bool and ends.shape == (len(table),)
    texts = [
        tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(len(table))
    ]
    assert ends.tolist() == [">" in text for text in texts]
    assert ends[tokenizer.token_to_id('">')] and ends[tokenizer.token_to_id("</think>")]


@given(st.lists(st.binary(max_size=3), max_size=6), st.binary(min_size=1, max_size=3))
def test_contains_marks_every_token_at_which_the_needle_becomes_complete(pieces, needle):
    marked = TokenTable(pieces).contains(needle)
    for token_id in range(len(pieces)):
        before, after = b"".join(pieces[:token_id]), b"".join(pieces[: token_id + 1])
        if after.count(needle) > before.count(needle):
            assert marked[token_id]


def test_special_tokens_are_text_that_can_be_told_apart():
    tokenizer, table = TOKENIZERS["byte_level"], TABLES["byte_level"]
    end = tokenizer.token_to_id("<|im_end|>")
    assert np.flatnonzero(table.special).tolist() == [end]
    ids = [*tokenizer.encode("a</think>b").ids, tokenizer.token_to_id("ä"), end, 99999]
    decoder = IncrementalDecoder(table)
    assert decoder.pieces(ids) == [
        *(("a", False), ("</think>", False), ("b", False)),
        *(("\ufffd", False), ("<|im_end|>", True)),
    ]
    assert "".join(stream(table, ids)) == "a</think>b\ufffd<|im_end|>"


def test_a_tokenizer_of_transformers_is_read_alike():
    wrapped = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["gemma"])
    table = TokenTable.from_tokenizer(wrapped)
    assert [table.bytes_of(i) for i in range(len(table))] == [
        TABLES["gemma"].bytes_of(i) for i in range(len(table))
    ]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), *METASPACE[1:]]),
        decoders.Sequence([*METASPACE, decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([*METASPACE, decoders.Strip("_", 1, 0)]),
    ],
)
def test_unknown_decoders_are_refused(decoder):
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if decoder:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=r"decoder is .* known are"):
        TokenTable.from_tokenizer(tokenizer)


def test_what_is_no_fast_tokenizer_is_refused():
    with pytest.raises(TypeError, match="str is no"):
        TokenTable.from_tokenizer("gpt2")
