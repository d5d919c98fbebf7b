"""Examples for supervised fine-tuning: JSON lines, their tokens, and batches of fixed shapes.

A line is an object with these keys:

* ``document``: a text, which the prompt style cuts into chunks, or a list of chunks (texts); null,
  or left out, for none;
* ``question``: a text;
* ``response``: the text to be learnt, with its tags; the token that ends a turn is added;
* ``system`` (optional): a system message;
* ``history`` (optional): earlier turns, as for ``LLM.generate``;
* ``arm`` (optional): ``da`` (the default), ``unmasked`` or ``vanilla``. In ``da`` the declarations
  act in the share of draws that ``masked`` says, and otherwise everything stays visible.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from da_jax.engine.detokenize import TokenTable
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptRenderer
from da_jax.train import views as views_lib
from da_jax.train.views import Views

_TYPES: dict[str, tuple[type, ...]] = {
    "document": (str, list, type(None)),
    "question": (str,),
    "response": (str,),
    "system": (str, type(None)),
    "history": (list,),
    "arm": (str,),
}
_NEEDED = ("question", "response")


@dataclasses.dataclass(frozen=True)
class Example:
    """One line of the data.

    Attributes:
      document: a text, chunks, or None.
      question: what is asked.
      response: what is learnt.
      system: a system message.
      history: earlier turns.
      arm: which prompt, and whether declarations may act.
    """

    question: str
    response: str
    document: str | tuple[str, ...] | None = None
    system: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()
    arm: Arm = Arm.DA

    @classmethod
    def from_json(cls, line: str) -> Example:
        """Reads one line.

        Raises:
          ValueError: it is no JSON object, a key is missing or unknown, or a value is of a wrong
            kind.
        """
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"a JSON object is needed, not {fields!r}")
        unknown, missing = fields.keys() - _TYPES, set(_NEEDED) - fields.keys()
        if unknown or missing:
            raise ValueError(
                f"unknown keys {sorted(unknown)}, missing {sorted(missing)}; "
                f"known are {', '.join(_TYPES)}"
            )
        for name, value in fields.items():
            if not isinstance(value, _TYPES[name]):
                kinds = " or ".join(
                    "null" if kind is type(None) else kind.__name__ for kind in _TYPES[name]
                )
                raise ValueError(f"{name} is {value!r}; give a {kinds}")
        chunks = fields.get("document")
        if isinstance(chunks, list):
            if strange := [chunk for chunk in chunks if not isinstance(chunk, str)]:
                raise ValueError(f"document holds {strange[0]!r}; its chunks are texts")
            fields["document"] = tuple(chunks)
        if not fields["response"].strip():
            raise ValueError("response is empty; there is nothing to learn")
        fields["history"] = tuple(fields.get("history", ()))
        return cls(**fields | {"arm": Arm(fields.get("arm", "da"))})


def read(path: str | Path) -> list[Example]:
    """Reads a file of JSON lines; empty lines are skipped.

    Raises:
      ValueError: naming the line that is wrong, or when there is none.
      OSError: the file cannot be read.
    """
    examples = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            examples.append(Example.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise ValueError(f"{path} holds no example; give one JSON object a line")
    return examples


class Encoded(NamedTuple):
    """An example in tokens.

    Attributes:
      ids: int32 [T], prompt and response.
      prompt: tokens of the prompt.
      masked: what each token sees as declared.
      unmasked: the same with everything visible.
    """

    ids: np.ndarray
    prompt: int
    masked: Views
    unmasked: Views


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns examples into tokens and masks.

    Attributes:
      renderer: writes the prompts.
      tokenizer: the fast tokenizer.
      table: its tokens as bytes, see `views.token_table`.
      end: the token that ends a turn.
      longest: most tokens of prompt and response.
    """

    renderer: PromptRenderer
    tokenizer: Any
    table: TokenTable
    end: int
    longest: int

    def encode(self, example: Example) -> Encoded:
        """Renders the prompt and follows the response's declarations.

        Raises:
          ValueError: it is too long, or the prompt cannot be rendered.
        """
        prompt = self.renderer.render(
            example.document, example.question, system=example.system, history=example.history,
            arm=example.arm,
        )  # fmt: skip
        response = self.tokenizer.encode(example.response, add_special_tokens=False)
        response = [*response, self.end]
        ids = np.concatenate([prompt.ids, np.asarray(response, np.int32)])
        if len(ids) > self.longest:
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {len(response)} of response are more than "
                f"{self.longest}; raise the longest length, or leave the example out"
            )
        follow = lambda arm: views_lib.of_response(prompt, response, self.table, arm=arm)
        return Encoded(ids, len(prompt), follow(example.arm), follow(Arm.UNMASKED))

    def encode_all(self, examples: Sequence[Example], source: object) -> list[Encoded]:
        """Encodes examples of a file.

        Raises:
          ValueError: naming the example that is wrong, counted from 1.
        """
        encoded = []
        for number, example in enumerate(examples, 1):
            try:
                encoded.append(self.encode(example))
            except ValueError as error:
                raise ValueError(f"{source}, example {number}: {error}") from error
        return encoded


class Batch(NamedTuple):
    """Sequences on the right side of which padding stands; B of them, T tokens each.

    Attributes:
      tokens: int32 [B, T].
      length: int32 [B], tokens of each.
      view: int32 [B, T], see `Views`.
      spans: int32 [B, V, S, 2].
      query: int32 [B, R], positions whose logits choose a token of the response.
      target: int32 [B, R], that token.
      weight: float32 [B, R], 0 for padding.
    """

    tokens: np.ndarray
    length: np.ndarray
    view: np.ndarray
    spans: np.ndarray
    query: np.ndarray
    target: np.ndarray
    weight: np.ndarray


class Shape(NamedTuple):
    """Sizes that batches share, so that few programs are compiled: T, R, V and S of `Batch`."""

    tokens: int
    response: int
    views: int
    spans: int

    @classmethod
    def holding(cls, encoded: Sequence[Encoded]) -> Shape:
        """The smallest one for all of these; T and R are rounded up to steps of a power of two."""
        views = [view for e in encoded for view in (e.masked, e.unmasked)]
        return cls(
            _rounded(max(len(e.ids) for e in encoded)),
            _rounded(max(len(e.ids) - e.prompt for e in encoded), 16),
            max(len(view.spans) for view in views),
            max(view.spans.shape[1] for view in views),
        )


def _rounded(count: int, least: int = 128) -> int:
    """The next power of two, from `least` on."""
    return max(least, 1 << (count - 1).bit_length())


def collate(rows: Sequence[tuple[Encoded, bool]], shape: Shape) -> Batch:
    """Pads examples, each with whether its declarations act, to one shape."""
    count = len(rows)
    batch = Batch(
        tokens=np.zeros((count, shape.tokens), np.int32),
        length=np.array([len(e.ids) for e, _ in rows], np.int32),
        view=np.zeros((count, shape.tokens), np.int32),
        spans=np.zeros((count, shape.views, shape.spans, 2), np.int32),
        query=np.zeros((count, shape.response), np.int32),
        target=np.zeros((count, shape.response), np.int32),
        weight=np.zeros((count, shape.response), np.float32),
    )
    for row, (example, masked) in enumerate(rows):
        views, size = example.masked if masked else example.unmasked, len(example.ids)
        response = size - example.prompt
        batch.tokens[row, :size] = example.ids
        batch.view[row, :size] = views.view
        batch.spans[row, : len(views.spans), : views.spans.shape[1]] = views.spans
        batch.query[row, :response] = np.arange(example.prompt - 1, size - 1)
        batch.target[row, :response] = example.ids[example.prompt :]
        batch.weight[row, :response] = 1
    return batch


def batches(
    encoded: Sequence[Encoded], size: int, *, masked: float = 0.75, seed: int = 0
) -> Iterator[Batch]:
    """Draws batches without end; every example comes once before any comes again.

    Examples of similar length share a batch, padded to a power of two.

    Args:
      encoded: the examples.
      size: examples a batch.
      masked: share of draws in which declarations act.
      seed: decides order and draws.
    """
    rng = np.random.default_rng(seed)
    buckets: dict[int, list[Encoded]] = defaultdict(list)
    for example in encoded:
        buckets[_rounded(len(example.ids))].append(example)
    shapes = {length: Shape.holding(examples) for length, examples in buckets.items()}
    waiting: dict[int, list[Encoded]] = defaultdict(list)
    while True:
        for i in rng.permutation(len(encoded)):
            example = encoded[int(i)]
            length = _rounded(len(example.ids))
            waiting[length].append(example)
            if len(waiting[length]) == size:
                rows = [(each, bool(rng.random() < masked)) for each in waiting.pop(length)]
                yield collate(rows, shapes[length])
