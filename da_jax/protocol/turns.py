"""A conversation in the form of the OpenAI API, taken apart as prompts are rendered from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from da_jax.protocol.chunks import Chunk


class Turns(NamedTuple):
    """What a conversation consists of, under the names of `PromptRenderer.render`."""

    system: str | None
    history: Sequence[Mapping[str, Any]]
    question: str
    chunks: Sequence[str | Chunk]


def split(messages: Sequence[Mapping[str, Any]]) -> Turns:
    """Takes a conversation apart.

    Args:
      messages: {"role", "content"} in order: an optional system message first, then turns; the
        last one is the user's question. A user's turn may have "chunks" that come with it.

    Raises:
      ValueError: for a message without role or text, or when the last one is not the user's.
    """
    for index, message in enumerate(messages):
        if not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(
                f"message {index} is {dict(message)!r}; it needs a role and a text content"
            )
    system = None
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message must be the user's question (role 'user')")
    *history, last = messages
    return Turns(system, history, last["content"], last.get("chunks") or ())
