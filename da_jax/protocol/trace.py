"""Accounts for the KV positions that the decode steps of one response attend."""

from __future__ import annotations

from typing import Any, NamedTuple

from da_jax.protocol.modes import Mode, Stats


class Step(NamedTuple):
    """One decode step.

    Attributes:
      mode: the mode that it ran under.
      attended: KV positions that its full attention attends, of tokens.
      read: KV positions that it reads, of whole pages.
      vanilla: KV positions that it would attend with everything visible.
    """

    mode: Mode
    attended: int
    read: int
    vanilla: int


class Trace:
    """Adds up what each decode step of one response saw; O(1) per step.

    The first token of a response comes from the prefill. Decode step t = 1 ... n - 1 of a response
    of n tokens feeds token t back and attends at most ``prompt_tokens + t`` positions. The last
    token is never fed back.

    Args:
      prompt_tokens: length of the prompt in tokens.
      log: keep each step in `steps`.
    """

    def __init__(self, prompt_tokens: int, *, log: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.steps: list[Step] | None = [] if log else None
        """The decode steps in order; None without `log`."""
        self._sums = {mode: [0, 0, 0] for mode in Mode}  # tokens, attended, read
        self._vanilla = 0
        self._count = 0

    def prefill(self, mode: Mode = Mode.GLOBAL) -> None:
        """Records the first token, which the prefill gave.

        Args:
          mode: the mode that it was chosen under.

        Raises:
          RuntimeError: it is already recorded.
        """
        if self._count:
            raise RuntimeError("the first token is already recorded; use one Trace per response")
        self._count = 1
        self._sums[mode][0] = 1

    def record(self, mode: Mode, attended: int, read: int) -> None:
        """Records one decode step.

        Args:
          mode: the mode that it ran under.
          attended: KV positions that its full attention attended.
          read: KV positions of the pages that it read.

        Raises:
          RuntimeError: the first token is not recorded yet.
          ValueError: `attended` is below 1 or above what exists at this step.
        """
        if not self._count:
            raise RuntimeError("a decode step before the first token; call prefill() first")
        vanilla = self.prompt_tokens + self._count
        if not 1 <= attended <= vanilla:
            raise ValueError(
                f"decode step {self._count} attends {attended} positions, but 1 to {vanilla} "
                "exist; record each step once, in order"
            )
        self._count += 1
        sums = self._sums[mode]
        sums[0] += 1
        sums[1] += attended
        sums[2] += read
        self._vanilla += vanilla
        if self.steps is not None:
            self.steps.append(Step(mode, attended, read, vanilla))

    @property
    def attended(self) -> int:
        """Attended tokens of the response so far."""
        return sum(attended for _, attended, _ in self._sums.values())

    def summary(self, stats: Stats, finish_reason: str | None = None) -> dict[str, Any]:
        """Sums the response up in values that JSON can hold.

        Args:
          stats: what the response declared.
          finish_reason: why it ended; None while it runs.

        Returns:
          ``prompt_tokens``; ``tokens``, ``attended`` and ``read``, each by mode and in
          ``total``; ``attended_vanilla``; ``reduction``, the part of it that was not attended;
          ``transitions``; ``focus``, with ``attempts``, ``successes`` and ``declines``;
          ``declines``, of any opener, by reason; ``mismatched_closers``; ``quoted``;
          ``format_correct``; ``finish_reason``.
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self._by_mode(0),
            "attended": self._by_mode(1),
            "read": self._by_mode(2),
            "attended_vanilla": self._vanilla,
            "reduction": 1 - self.attended / self._vanilla if self._vanilla else 0.0,
            "transitions": stats.transitions,
            "focus": {
                "attempts": stats.attempts,
                "successes": stats.successes,
                "declines": stats.focus_declines,
            },
            "declines": {str(reason): count for reason, count in stats.declines.items()},
            "mismatched_closers": stats.mismatched,
            "quoted": stats.quoted,
            "format_correct": stats.format_correct,
            "finish_reason": finish_reason,
        }

    def _by_mode(self, which: int) -> dict[str, int]:
        counts = {mode.value: sums[which] for mode, sums in self._sums.items()}
        return {"total": sum(counts.values())} | counts
