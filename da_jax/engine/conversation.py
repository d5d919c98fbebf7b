"""A conversation about documents, to which later questions may add chunks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from da_jax.engine.request import Done, Event, Response
from da_jax.protocol.chunks import Chunk

if TYPE_CHECKING:
    from da_jax.engine.llm import LLM, Document


class Conversation:
    """Questions in turn, each with the chunks that were added since the one before.

    Chunks stay in the turn that brought them, so that the prompt of each question begins as that of
    the one before, up to its question. They are numbered on, or have ids of the caller's.

    A response enters the history with its whole text, as the client saw it: the values that it
    copied stay visible in every later mode, while its tags are text in a prompt and do not act.
    Thoughts are left out where the chat template knows them.

    A question is asked when the one before is answered: its prompt holds that answer.

    Args:
      llm: the model.
      documents: a text, or a list of chunks, that stand first; None for none.
      system: a system message.
      **options: those of `LLM.generate` for every question.
    """

    def __init__(
        self, llm: LLM, documents: Document = None, *, system: str | None = None, **options: Any
    ):
        _check(options)
        self._llm, self._documents = llm, documents
        self._options = {"system": system, **options}
        self._turns: list[dict[str, Any]] = []
        self._added: list[str | Chunk] = []
        self._turn: weakref.ref[Generator[Event, None, None]] | None = None  # being answered

    @property
    def history(self) -> list[dict[str, Any]]:
        """The turns so far, as `LLM.generate` takes them."""
        return [dict(turn) for turn in self._turns]

    def add(self, chunks: str | Chunk | Iterable[str | Chunk]) -> None:
        """Adds chunks, or a text that is cut into some, to the next question."""
        if isinstance(chunks, Chunk):
            chunks = [chunks]
        self._added += self._llm.renderer.split(chunks) if isinstance(chunks, str) else [*chunks]

    def ask(self, question: str, **options: Any) -> Response:
        """Answers a question.

        Args:
          question: the question.
          **options: those of `LLM.generate`, before those of the conversation.

        Raises:
          RequestError, ValueError: as `LLM.generate`; the conversation is then as before.
          RuntimeError: as `stream`.
        """
        *_, done = self.stream(question, **options)
        assert isinstance(done, Done)
        return done.response

    def stream(self, question: str, **options: Any) -> Generator[Event, None, None]:
        """Answers a question, yielding events as they happen; the last one is `Done`.

        Question and answer enter the history with `Done`; of an iterator that is closed before,
        nothing is kept, and the chunks that were added wait for the next question.

        Raises:
          RequestError, ValueError: as `LLM.stream`.
          RuntimeError: another question of this conversation is still being answered.
        """
        _check(options)
        turn = self._turn and self._turn()
        if turn and inspect.getgeneratorstate(turn) != inspect.GEN_CLOSED:
            raise RuntimeError(
                f"the question {question!r} needs the answer before it in its prompt, which is "
                "still being streamed; read that stream up to `Done`, or close it"
            )
        chunks = tuple(self._added)
        events = self._llm.stream(
            self._documents, question, history=self.history, chunks=chunks,
            **{**self._options, **options},
        )  # fmt: skip
        turn = self._follow(events, question, chunks)
        self._turn = weakref.ref(turn)  # one that is dropped is closed
        return turn

    def _follow(
        self, events: Generator[Event, None, None], question: str, chunks: Sequence[str | Chunk]
    ) -> Generator[Event, None, None]:
        try:
            for event in events:
                if isinstance(event, Done):
                    own = {"chunks": chunks} if chunks else {}
                    self._turns += [
                        {"role": "user", "content": question, **own},
                        {"role": "assistant", "content": event.response.text},
                    ]
                    del self._added[: len(chunks)]
                    self._turn = None
                yield event
        finally:
            events.close()


def _check(options: Mapping[str, Any]) -> None:
    """Refuses what the conversation itself says.

    Raises:
      ValueError: for history or chunks.
    """
    for name in ("history", "chunks"):
        if name in options:
            raise ValueError(f"{name} is what a conversation keeps; use `add` for chunks")
