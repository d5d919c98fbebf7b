"""Turns token ids into text, incrementally and byte-exactly.

A token is a string of bytes and the text is their concatenation read as UTF-8: a character may
span tokens, and a token may hold parts of characters. So a vocabulary is a table of bytes, and a
sequence keeps one incremental UTF-8 decoder.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from da_jax.protocol.guide import Guides

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """What each token id of a vocabulary writes, in bytes.

    Args:
        pieces: the bytes of each id; None where an id has no token.
        special: ids of the special tokens.
        strip: space characters that the tokenizer removes from the start of a text, at most.

    Attributes:
        known: bool [len(table)], ids that have a token.
        special: bool [len(table)], ids of special tokens.
        strip: as given.
    """

    def __init__(
        self, pieces: Iterable[bytes | None], special: Iterable[int] = (), strip: int = 0
    ) -> None:
        pieces = list(pieces)
        self._pieces = [piece or b"" for piece in pieces]
        self.known = np.array([piece is not None for piece in pieces], bool)
        self.special = np.zeros(len(pieces), bool)
        self.special[list(special)] = True
        self.strip = strip
        self._guides: dict[int, Guides] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, shown: Iterable[str] = ()) -> TokenTable:
        """Reads the table of a tokenizer.

        Args:
            tokenizer: a `tokenizers.Tokenizer`, or a fast tokenizer of `transformers`.
            shown: tokens that are text like others, even where they are special.

        Raises:
            TypeError: it is neither.
            ValueError: its decoder is of a kind that this table cannot reproduce.
        """
        tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(
                f"{type(tokenizer).__name__} is no tokenizers.Tokenizer and no fast tokenizer of "
                "transformers; load the model's tokenizer.json"
            )
        to_bytes, literal, strip = _read_decoder(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        size = 1 + max((*vocabulary.values(), *added), default=-1)
        pieces: list[bytes | None] = [None] * size
        for piece, token_id in vocabulary.items():
            pieces[token_id] = to_bytes(piece)
        for token_id, token in added.items():
            normalized = tokenizer.id_to_token(token_id) or token.content  # what `decode` reads
            pieces[token_id] = token.content.encode() if literal else to_bytes(normalized)
        shown = set(shown)
        special = [i for i, t in added.items() if t.special and t.content not in shown]
        return cls(pieces, special, strip)

    def __len__(self) -> int:
        """One more than the largest id that has a token."""
        return len(self._pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """What `token_id` writes; nothing where the (padded) vocabulary has no such token."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def contains(self, needle: bytes) -> np.ndarray:
        """Finds the tokens at which `needle` can become complete in a text.

        Args:
            needle: one or more bytes.

        Returns:
            bool [len(table)]: the token holds `needle`, or begins with an end of it.
        """
        ends = tuple(needle[at:] for at in range(1, len(needle)))
        return np.array([needle in p or p.startswith(ends) for p in self._pieces], bool)

    def guides(self, vocabulary: int) -> Guides:
        """What guides responses, made once for all engines that share the table.

        Args:
          vocabulary: size of the logits.

        Raises:
          ValueError: as `Guides`.
        """
        if vocabulary not in self._guides:
            self._guides[vocabulary] = Guides(self._pieces, vocabulary)
        return self._guides[vocabulary]


class IncrementalDecoder:
    """Decodes the tokens of one text as they come.

    What it returns, joined, is the text; a character is returned with the token that completes it.
    A byte that is part of no character becomes U+FFFD as soon as that is certain.

    Args:
        table: the vocabulary.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = table.strip

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next token ids; returns the text that they complete, special tokens too."""
        return self._decode(b"".join(map(self._table.bytes_of, ids)))

    def pieces(self, ids: Iterable[int]) -> list[tuple[str, bool]]:
        """Like `push`, with what special tokens wrote told apart.

        Returns:
            (text, whether a special token wrote it), in order, no text empty.
        """
        special = self._table.special
        pieces = []
        for token_id in ids:
            is_special = 0 <= token_id < len(special) and bool(special[token_id])
            if is_special:  # it is whole characters, so what is pending stays incomplete
                pieces.append((self.flush(), False))
            pieces.append((self.push([token_id]), is_special))
        return [(text, is_special) for text, is_special in pieces if text]

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character wait for the next token."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for bytes still pending, if any."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        pending = self._decoder.getstate()[0]
        if pending[:1] == b"\xed" and pending[1:] >= b"\xa0":  # a surrogate, which UTF-8 has not
            text += self._decoder.decode(b"", True)
        if self._strip and text:
            kept = text.lstrip(" ")
            cut = min(self._strip, len(text) - len(kept))
            self._strip = 0 if kept else self._strip - cut
            text = text[cut:]
        return text


def _read_decoder(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool, int]:
    """Reads how a tokenizer decodes.

    Returns:
        What turns a piece of the vocabulary into bytes, whether added tokens stand for themselves,
        and how many spaces are stripped from the start of a text.
    """
    probe = Tokenizer(models.BPE())
    if tokenizer.decoder:
        probe.decoder = tokenizer.decoder
    decoder: dict[str, Any] = json.loads(probe.to_str())["decoder"] or {"type": None}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(), True, 0
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
        nothing = {"type": "Strip", "content": " ", "start": 0, "stop": 0}
        strip = [*steps, nothing][3]
        if pattern and strip["content"] == " " and not strip["stop"]:
            return _byte_fallback(pattern, content), False, strip["start"]
    raise ValueError(
        f"the tokenizer's decoder is {json.dumps(decoder)}; known are ByteLevel, and a Sequence of "
        "Replace (of a string), ByteFallback, Fuse and, optionally, Strip (of leading spaces)"
    )


def _byte_level() -> Callable[[str], bytes]:
    """Undoes GPT-2's map of bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + at): byte for at, byte in enumerate(others)}
    latin = str.maketrans({char: chr(byte) for char, byte in byte_of.items()})
    mapped = re.compile(f"[{re.escape(''.join(byte_of))}]*")

    def to_bytes(piece: str) -> bytes:
        if mapped.fullmatch(piece):
            return piece.translate(latin).encode("latin-1")
        return piece.encode()  # no byte-level piece: it stands for itself

    return to_bytes


def _byte_fallback(pattern: str, content: str) -> Callable[[str], bytes]:
    """Undoes SentencePiece's spelling of spaces and of bytes that have no piece."""

    def to_bytes(piece: str) -> bytes:
        text = piece.replace(pattern, content)
        byte = _BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.encode()

    return to_bytes
