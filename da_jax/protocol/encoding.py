"""Text to tokens and character offsets, such that caller's text can never become a control token.

A tokenizer looks for its added tokens (`<|im_start|>`, `<think>`) anywhere in a text. Here only
those written by the chat template and the style count. A twin of the tokenizer is built in which
every control token is spelled in private-use characters, as many as the token has characters; the
trusted parts of a text are respelled before encoding, so that the same spelling in a document is
ordinary text, and everything else (normalisation, prefix spaces, white space stripped by an added
token, character offsets) is the tokenizer's own in one single pass.

Control tokens are the special tokens, and of the other added ones those that occur in the template,
the style, or a marker of thoughts or tool calls. The rest (Gemma's `<table>` and `<b>`) are text
and stay as they are, as do tokens of white space alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Token ids [N] int32 and the characters [start, end) of each, monotone; none is empty.

    The offsets are contiguous int64: `searchsorted` would copy any other array at each call.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """Returns the span of all tokens that touch the characters [start, end)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        return first, max(first, int(np.searchsorted(self.starts, end, side="left")))


class Spelling:
    """Stand-ins of equal length, in private-use characters, for the control tokens."""

    def __init__(self, tokens: Iterable[str], characters: Iterator[str]) -> None:
        self._rest = next(characters)
        self.names = {t: next(characters) + self._rest * (len(t) - 1) for t in tokens}
        self._tokens = {name[0]: token for token, name in self.names.items()}
        heads = "".join(map(re.escape, self._tokens))
        self._pattern = re.compile(f"[{heads}]{self._rest}*") if heads else None

    def undo(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the text in pieces, with the tokens put back, and whether a piece is a token."""
        end = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield text[end : match.start()], False
            yield self._tokens[match[0][0]], True
            end = match.end()
        yield text[end:], False


class SafeEncoder:
    """Encodes text whose parts are trusted (template, style) or not (document, question).

    Args:
      tokenizer: A fast Hugging Face tokenizer.
      structure: Texts of the template and the style. An added token that occurs in one of them is a
        control token, even if it is not special; one number in it is as good as another.

    Raises:
      TypeError: If the tokenizer is not backed by the `tokenizers` library.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, structure: Iterable[str]
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TypeError(
                f"{type(tokenizer).__name__} gives no character offsets; load a fast tokenizer "
                "(a folder with tokenizer.json)"
            )
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._single = {t.content for t in added if t.single_word}
        written = "\n".join(map(_numberless, structure))
        self._control = sorted(
            t.content
            for t in added
            if t.content.strip(" \t\r\n\v\f▁") and (t.special or _numberless(t.content) in written)
        )
        lengths: dict[str, set[int]] = {}
        for token in self._control:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {c: sorted(n, reverse=True) for c, n in lengths.items()}
        self._known = frozenset(self._control)
        heads = "".join(map(re.escape, self._lengths))
        self._heads = re.compile(f"[{heads}]" if heads else r"(?!)")
        self._twins: dict[str, tuple[Spelling, tokenizers.Tokenizer, np.ndarray]] = {}
        self._twin(frozenset())

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields (position, token) of the control tokens in a text: leftmost, longest."""
        end = 0
        for match in self._heads.finditer(text):
            i = match.start()
            if i < end:
                continue
            for n in self._lengths[match[0]]:
                token = text[i : i + n]
                if token in self._known and not self._inside_word(text, i, token):
                    yield i, token
                    end = i + n
                    break

    def respell(self, text: str, spelling: Spelling) -> str:
        """Replaces the control tokens in a text by their stand-ins."""
        out, end = [], 0
        for i, token in self.find(text):
            out += [text[end:i], spelling.names[token]]
            end = i + len(token)
        return "".join([*out, text[end:]])

    def encode(self, parts: Sequence[tuple[str, bool]]) -> Encoding:
        """Encodes the concatenation of the parts.

        Args:
          parts: (text, trusted) pairs; control tokens are recognised in trusted text only.

        Returns:
          The encoding; offsets count the characters of the concatenation. No beginning-of-text
          token is added: the template writes its own.
        """
        spelling, twin, id_map = self._twin(private_characters_in(text for text, _ in parts))
        # Joined before they are respelled: a token may lie across two trusted parts.
        runs = itertools.groupby((part for part in parts if part[0]), key=lambda part: part[1])
        joined = [("".join(text for text, _ in run), trusted) for trusted, run in runs]
        text = "".join(self.respell(t, spelling) if trusted else t for t, trusted in joined)
        encoding = twin.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        starts = np.minimum.accumulate(offsets[::-1, 0])[::-1].copy()
        # A zero-width token (a prefix space) goes with the character that follows it.
        ends = np.maximum.accumulate(np.maximum(offsets[:, 1], offsets[:, 0] + 1))
        return Encoding(id_map[ids], starts, ends)

    def _inside_word(self, text: str, start: int, token: str) -> bool:
        if token not in self._single:
            return False
        around = text[max(start - 1, 0) : start] + text[start + len(token) :][:1]
        return re.search(r"\w", around) is not None

    def _twin(self, used: frozenset[str]) -> tuple[Spelling, tokenizers.Tokenizer, np.ndarray]:
        spelling = Spelling(self._control, private_characters(used))
        key = "".join(spelling.names.values())
        if key not in self._twins:
            if len(self._twins) > 1:  # keep the first, which serves all usual texts
                self._twins.popitem()
            self._twins[key] = (spelling, *self._build(spelling))
        return self._twins[key]

    def _build(self, spelling: Spelling) -> tuple[tokenizers.Tokenizer, np.ndarray]:
        spec = json.loads(self._backend.to_str())
        _respell_model(spec["model"], spelling.names)
        for token in spec["added_tokens"]:
            token["content"] = spelling.names.get(token["content"], token["content"])
        # The post-processor would only add special tokens and trim white space off the offsets.
        spec.update(post_processor=None, truncation=None, padding=None)
        twin = tokenizers.Tokenizer.from_str(json.dumps(spec))
        size = max([*twin.get_vocab().values(), 0]) + 1
        id_map = np.arange(size, dtype=np.int32)
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            name = spelling.names.get(token.content, token.content)
            id_map[twin.token_to_id(name)] = token_id
        return twin, id_map


def _numberless(text: str) -> str:
    return re.sub("[0-9]+", "0", text)


def private_characters(used: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the private-use characters that are not in `used`, always in the same order.

    Raises:
      ValueError: When none is left.
    """
    for code in itertools.chain(range(0x10FFFD, 0xFFFFF, -1), range(0xFFFFD, 0xEFFFF, -1)):
        if chr(code) not in used:
            yield chr(code)
    raise ValueError("the text uses nearly all private-use characters; remove some")


def private_characters_in(texts: Iterable[str]) -> frozenset[str]:
    """Returns the private-use characters (planes 15 and 16) that occur in the texts."""
    return frozenset(c for text in texts for c in set(text) if ord(c) >= 0xF0000)


def _respell_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames the control tokens in a model's vocabulary, so that plain text cannot yield them."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: the position is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        return
    present = vocab.keys() & names.keys()
    for token in present:
        vocab[names[token]] = vocab.pop(token)
    if present and model.get("merges"):
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if present.isdisjoint((a, b, a + b))]
    if model.get("unk_token") in present:
        model["unk_token"] = names[model["unk_token"]]
