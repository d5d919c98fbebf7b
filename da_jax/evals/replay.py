"""What Declarative Attention would have attended in recorded responses of any system.

No model runs: a response is walked through the same `Sequence` that the engine keeps for a request,
as if each of its tokens were forced, so that modes, views and sums are those of the engine.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from da_jax.engine.config import MAX_PAGE_SIZE
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.request import Done, Request, SamplingParams, TokenLogprob
from da_jax.evals.records import Run, runs
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.recorded import Recorded
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS
from da_jax.protocol.trace import Step
from da_jax.protocol.visibility import Scaffold

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a recorded response would have attended.

    Attributes:
      recorded: the response.
      summary: see `Trace.summary`. The reason for its end is the recorded one, else what its last
        token says, else None.
      steps: its decode steps.
    """

    recorded: Recorded
    summary: Mapping[str, Any]
    steps: Sequence[Step]

    @property
    def trace(self) -> tuple[Run, ...]:
        """The decode steps, those of one mode in a row together."""
        return runs(self.steps)

    def to_json(self) -> str:
        """One line, without the newline."""
        fields = self.recorded.fields
        kept = {name: fields[name] for name in ("id", "task", "score") if name in fields}
        return json.dumps(
            {
                "source": self.recorded.where,
                **kept,
                "arm": self.recorded.arm.value,
                "tokens": "recorded" if self.recorded.exact else "tokenized anew",
                "summary": self.summary,
                "trace": self.trace,
            },
            ensure_ascii=False,
        )


class Replayer:
    """Walks recorded responses as the engine would have.

    Args:
      tokenizer: of the model; it renders prompts and tokenizes texts.
      renderer: of the same tokenizer.
      stop_ids: tokens that end a response.
      page_size: tokens of a KV page.
      scaffold: what stays visible besides chunks: `all`, or `paper`.
      answer_mode: what `<answer>` does: `local`, `keep` or `global`.
      initial: the mode that responses of the arm `da` start in; None is GLOBAL.

    Raises:
      ValueError: the page size is out of range, or the tokenizer's decoder is not known.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        renderer: PromptRenderer,
        stop_ids: frozenset[int],
        *,
        page_size: int = 64,
        scaffold: Scaffold = "all",
        answer_mode: AnswerMode = "local",
        initial: Declaration | Mode | str | None = None,
    ):
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {page_size}; it must be from 1 to {MAX_PAGE_SIZE}")
        self.page_size, self._scaffold, self._answer_mode = page_size, scaffold, answer_mode
        self._initial = None if initial is None else Declaration.of(initial)
        self._tokenizer, self._renderer, self._stop_ids = tokenizer, renderer, stop_ids
        self._table = TokenTable.from_tokenizer(tokenizer, shown=(*THINK_STARTS, *THINK_ENDS))

    def replay(self, recorded: Recorded) -> Replayed:
        """Computes what a response would have attended, step by step.

        The mask has room for every focus, however small the chunks are.

        Raises:
          ValueError: the prompt cannot be rendered or read, or the response has no token, or one
            that the tokenizer does not have.
        """
        try:
            return self._replay(recorded)
        except ValueError as error:
            raise ValueError(f"{recorded.where}: {error}") from error

    def _replay(self, recorded: Recorded) -> Replayed:
        from da_jax.engine.sequence import Sequence as Walk

        ids = recorded.response(self._tokenizer, len(self._table))
        prompt = recorded.prompt(self._renderer)
        request = Request(
            prompt,
            SamplingParams(max_tokens=len(ids)),
            arm=recorded.arm,
            forced=ids,
            answer_mode=self._answer_mode,
            scaffold=self._scaffold,
            initial=self._initial if recorded.arm is Arm.DA else None,
        )
        longest = len(prompt) + len(ids)
        # One entry a page, and one more for each span that a view can have.
        entries = -(-longest // self.page_size) + len(prompt.chunks) + len(prompt.scaffold) + 2
        walk = Walk(
            0, request, self._table, self._stop_ids, key=np.zeros(2, np.uint32), max_len=longest,
            page_size=self.page_size, entries=entries,
        )  # fmt: skip
        walk.receive(TokenLogprob(token, 0.0) for token in ids)
        done = walk.read()[-1]
        assert isinstance(done, Done)
        response = done.response
        # `length` is only that the recording ends here.
        ended = None if response.finish_reason == "length" else response.finish_reason
        return Replayed(
            recorded,
            {**response.summary, "finish_reason": recorded.fields.get("finish_reason", ended)},
            response.steps,
        )


def sums(found: Iterable[Replayed]) -> dict[str, dict[str, Any]]:
    """Adds up the responses of each arm.

    Returns:
      By arm: ``responses``; ``tokenized_anew``, those whose token ids were not recorded;
      ``prompt_tokens``; ``tokens``, ``attended`` and ``read``, each by mode and in ``total``;
      ``attended_vanilla``; ``reduction``, of the sums; ``focus`` with ``attempts``, ``successes``,
      ``declines`` and ``success_rate`` (None without attempts); ``declines`` by reason;
      ``format_correct``, and ``scored`` with ``mean_score`` (None without scores).
    """
    arms: dict[str, list[Replayed]] = {}
    for one in found:
        arms.setdefault(one.recorded.arm.value, []).append(one)
    return {arm.value: _sum(arms[arm.value]) for arm in Arm if arm.value in arms}


def _sum(found: Sequence[Replayed]) -> dict[str, Any]:
    summaries = [one.summary for one in found]

    def added(name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for summary in summaries:
            total.update(summary[name])
        return dict(total)

    attended, vanilla = added("attended"), sum(s["attended_vanilla"] for s in summaries)
    focus = added("focus")
    scores = [one.recorded.fields["score"] for one in found if "score" in one.recorded.fields]
    return {
        "responses": len(found),
        "tokenized_anew": sum(not one.recorded.exact for one in found),
        "prompt_tokens": sum(s["prompt_tokens"] for s in summaries),
        "tokens": added("tokens"),
        "attended": attended,
        "read": added("read"),
        "attended_vanilla": vanilla,
        "reduction": 1 - attended["total"] / vanilla if vanilla else 0.0,
        "focus": focus
        | {"success_rate": focus["successes"] / focus["attempts"] if focus["attempts"] else None},
        "declines": added("declines"),
        "format_correct": sum(s["format_correct"] for s in summaries),
        "scored": len(scores),
        "mean_score": sum(scores) / len(scores) if scores else None,
    }
