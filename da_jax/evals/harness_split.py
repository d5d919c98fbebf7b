"""Cuts a prompt of lm-evaluation-harness into the document and the question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Split = Callable[[Mapping[str, Any], str], tuple[str, str]]
"""(example, prompt) to (document, question)."""

# A line that names what it begins, as RULER ("Question:") and GraphWalks ("Operation:") have it.
_LABEL = re.compile(r"^[ \t*#]*(?:question|operation|query|problem)[ \t*]*:", re.I | re.M)
_LONGEST_QUESTION = 2000  # characters after a label; more is a document that has such lines
_LEAST_FIELD = 8  # characters of a field that is looked for around the document
_ASKS = re.compile(rf"{_LABEL.pattern}|[?？]\s*\Z", _LABEL.flags)
_CUE = re.compile(r"[^\n?!.。？！]{0,80}")  # what only invites the answer: "Answer:", "It is"


def split_prompt(example: Mapping[str, Any], prompt: str) -> tuple[str, str]:
    """Cuts a prompt of the harness into the document and the question.

    A task of the harness gives one text, and the question must be no part of the document: it would
    be hidden with the last chunk. The longest field of the example is looked up in the prompt.

    * It makes up half of the prompt or more, and the question stands around it: the field is the
      document; the question is what stands before and after it.
    * Nothing around it asks (nothing is there but the example's `gen_prefix`, or a cue such as
      "Answer:"): the field ends with the question, as those of RULER and GraphWalks do. It is cut
      there, and what stands around the field goes to the question.
    * There is no such field: all of the prompt is cut in the same way.

    A text with the question at its end is cut before the last line that begins with "Question:",
    "Operation:" or the like; else before its last paragraph, if that is less than half of it; else
    before its last line.

    Args:
      example: the row of the data set.
      prompt: what the harness made of it, with its `gen_prefix` at the end.

    Returns:
      (document, question); the document is empty where nothing comes before the question.
    """
    prompt = prompt.rstrip()
    texts = {name: v.strip() for name, v in example.items() if isinstance(v, str) and v.strip()}
    prefix = texts.pop("gen_prefix", "")
    field = max((text for text in texts.values() if text in prompt), key=len, default="")
    if 2 * len(field) < len(prompt):
        return _cut_end(prompt)
    before, _, after = prompt.rpartition(field)
    around = _paragraphs(before, after)
    said = after.strip().removesuffix(prefix).strip()
    others = (text for text in texts.values() if len(text) >= _LEAST_FIELD and text not in field)
    asked = any(text in around for text in others) or _CUE.fullmatch(said) is None
    document, question = _cut_end(field)
    if before.strip() and not prefix and not _ASKS.search(question):
        asked = True
    if asked or (around and not document):
        return field, around
    return document, _paragraphs(before, f"{question}{after}")


def _cut_end(text: str) -> tuple[str, str]:
    """Cuts a text before the question that it ends with."""
    labels = [found.start() for found in _LABEL.finditer(text)]
    if labels and len(text) - labels[-1] <= min(_LONGEST_QUESTION, len(text) // 2):
        at = labels[-1]
    else:
        at = text.rfind("\n\n") + 1
        if at < len(text) // 2:
            at = text.rfind("\n") + 1
    return text[:at].rstrip(), text[at:].strip()


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(stripped for text in texts if (stripped := text.strip()))
