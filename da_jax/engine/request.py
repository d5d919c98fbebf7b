"""What a caller asks for, and what comes back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

from da_jax.engine.config import MAX_LOGPROBS, MAX_STOP_IDS
from da_jax.protocol import ids as ids_lib
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode
from da_jax.protocol.prompt import PromptMap
from da_jax.protocol.trace import Step
from da_jax.protocol.visibility import Scaffold


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a response ends.

    Attributes:
      max_tokens: most tokens of the response, the stop token included.
      temperature: 0 is greedy.
      top_k: sample among the k likeliest tokens; 0 is no limit.
      top_p: sample among the likeliest tokens whose probabilities sum to top_p.
      presence_penalty: subtracted from the logit of every token that the response already has.
      seed: makes the request reproducible whatever its neighbours; None draws one.
      stop: strings that end the response; they and what follows are not returned.
      stop_token_ids: token ids that end the response, besides the checkpoint's own.
      ignore_eos: go on after the checkpoint's own stop tokens (for benchmarks).
      logprobs: None, or how many of the likeliest tokens to report at each position (0 to 20).
      stop_after_answer: end at `</answer>`.
      guided: while a protocol tag is written, choose only among the tokens that make it one to
        honour, with chunks that exist. No other text is changed, but other markup whose name
        begins with that of a tag (`<focusing>`) is not written. The arm `vanilla` has no tags. A
        stop string or `max_tokens` may still cut a tag off.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stop_after_answer: bool = False
    guided: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str | int):
                value = (value,)
            object.__setattr__(self, name, tuple(value or ()))
        whole = {"max_tokens": 1, "top_k": 0, "seed": None, "logprobs": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
            if least is not None and not least <= value < 2**31:
                raise ValueError(f"{name} is {value!r}; it must be {least} or more, below 2**31")
        rules = {
            "temperature": (0 <= self.temperature <= 1000, "from 0 (greedy) to 1000"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2"),
            "stop": (all(isinstance(s, str) and s for s in self.stop), "of non-empty strings"),
            "stop_token_ids": (len(self.stop_token_ids) <= MAX_STOP_IDS, f"{MAX_STOP_IDS} at most"),
            "guided": (isinstance(self.guided, bool), "True or False"),
            "logprobs": ((self.logprobs or 0) <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
        }
        for name, (good, rule) in rules.items():
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
      prompt: rendered prompt with its chunk spans.
      params: sampling and stopping.
      arm: whether declarations act.
      forced: response tokens that are fed as if the model had written them, before it writes on.
        Nothing ends the response before they are used up.
      answer_mode: what `<answer>` does: `local`, `keep` or `global`.
      scaffold: what stays visible besides chunks: `all`, or `paper` (16 tokens and the question).
      priority: smaller goes first; among equals whoever came first.
      deadline: seconds after it was added; then it ends with what it has. None, or infinity, for no
        deadline.
      initial: the mode that the response starts in, its first token included; its own tags act
        from there, and the end of its thoughts widens. None is GLOBAL. Arm `da` only.
      visible: numbers of the chunks that the whole response sees, its first token included,
        whatever it declares; () is none of them. Its declarations are followed, and counted, but
        do not act. None: the declarations act. Arm `da` only, and not with `initial`.
    """

    prompt: PromptMap
    params: SamplingParams
    arm: Arm = Arm.DA
    forced: tuple[int, ...] = ()
    answer_mode: AnswerMode = "local"
    scaffold: Scaffold = "all"
    priority: int = 0
    deadline: float | None = None
    initial: Declaration | None = None
    visible: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise ValueError(f"priority is {self.priority!r}; it must be a whole number")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline!r}; it must be seconds above 0, or None")
        if self.deadline == math.inf:  # the engine would remember it for ever
            object.__setattr__(self, "deadline", None)
        for name, choices in (("answer_mode", AnswerMode), ("scaffold", Scaffold)):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")
        for name in ("initial", "visible"):
            if getattr(self, name) is not None and self.arm is not Arm.DA:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} in the arm '{self.arm}', which sees "
                    "everything; use the arm 'da', or leave it out"
                )
        known_ids = self.prompt.span_of
        if self.initial is not None:
            ids_lib.check_known("initial", self.initial.focus, known_ids)
        if self.visible is None:
            return
        if self.initial is not None:
            raise ValueError(
                f"visible is {self.visible!r} and initial is {self.initial!r}; give one of them, "
                "for where the visible chunks are fixed no mode acts"
            )
        ids = {ids_lib.check_id("a chunk of visible", chunk) for chunk in self.visible}
        object.__setattr__(self, "visible", tuple(sorted(ids)))
        ids_lib.check_known("visible", sorted(ids), known_ids)

    @property
    def start(self) -> Declaration:
        """What the first token of the response sees."""
        if self.visible is None:
            return self.initial or Declaration(Mode.GLOBAL)
        return Declaration(Mode.FOCUS, self.visible) if self.visible else Declaration(Mode.LOCAL)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one response token and of the likeliest alternatives (natural log)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Response:
    """A finished response.

    Attributes:
      text: the response as the client sees it: without special tokens other than the markers of
        thoughts, cut before a stop string.
      answer: the last `<answer>`, else the last LOCAL text, else the whole text after the thoughts.
      finish_reason: `stop`, `length`, `tool_call`, `cancelled` or `deadline`.
      prompt_tokens, completion_tokens: counts; a stop token counts as a token.
      token_ids: every token that was computed.
      segments: (text, mode) pieces of the raw text in order.
      logprobs: one entry a token when asked for.
      summary: the accounting of the response, see `da_jax.protocol.trace`.
      steps: the accounting step by step.
    """

    text: str
    answer: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]
    segments: tuple[tuple[str, Mode], ...]
    summary: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the cache."""

    request_id: int
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """New text, written under `mode`."""

    request_id: int
    text: str
    mode: Mode


@dataclasses.dataclass(frozen=True)
class ModeChange:
    """From the next forward pass on, the response sees what `mode` and `focus` show.

    Where the request fixes what is visible, it is what the response declared.
    """

    request_id: int
    mode: Mode
    focus: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Decline:
    """A declaration that could not be honoured: the response sees everything instead."""

    request_id: int
    tag: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Done:
    """The response is complete."""

    request_id: int
    response: Response


Event = PrefillProgress | TextDelta | ModeChange | Decline | Done
