"""Recorded responses for supervised fine-tuning: their tokens, and batches of fixed shapes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from da_jax.engine.detokenize import TokenTable
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.recorded import Recorded
from da_jax.train import views as views_lib
from da_jax.train.views import Views


class Encoded(NamedTuple):
    """A recorded response in tokens.

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
    """Turns recorded responses into tokens and masks.

    Attributes:
      renderer: writes the prompts.
      tokenizer: the fast tokenizer.
      table: its tokens as bytes, see `views.token_table`.
      end: the token that ends a turn.
      stop_ids: all tokens that end a response.
      longest: most tokens of prompt and response.
    """

    renderer: PromptRenderer
    tokenizer: Any
    table: TokenTable
    end: int
    stop_ids: frozenset[int]
    longest: int

    def encode(self, recorded: Recorded) -> Encoded:
        """Renders the prompt and follows the response's declarations.

        The token that ends a turn is added, unless the response has one, or its `finish_reason` is
        `length`. Declarations of the arm `da` act; the others see everything.

        Raises:
          ValueError: naming where it stands: it is too long, or its prompt has no text or cannot be
            rendered.
        """
        try:
            return self._encode(recorded)
        except ValueError as error:
            raise ValueError(f"{recorded.where}: {error}") from error

    def _encode(self, recorded: Recorded) -> Encoded:
        if "prompt_tokens" in recorded.fields:
            raise ValueError("prompt_tokens: a model learns from the prompt itself; give its text")
        prompt = recorded.prompt(self.renderer)
        response = recorded.response(self.tokenizer, len(self.table))
        cut = recorded.fields.get("finish_reason") == "length"
        if not cut and response[-1] not in self.stop_ids:
            response = (*response, self.end)
        ids = np.concatenate([prompt.ids, np.asarray(response, np.int32)])
        if len(ids) > self.longest:
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {len(response)} of response are more than "
                f"{self.longest}; raise the longest length, or leave the response out"
            )
        follow = lambda arm: views_lib.of_response(prompt, response, self.table, arm=arm)
        return Encoded(ids, len(prompt), follow(recorded.arm), follow(Arm.UNMASKED))


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
