"""Examples for training: random models with a tokenizer of bytes, and what they are scored on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from da_jax import Style
from da_jax.engine.llm import load_tokenizer
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.recorded import Recorded
from da_jax.train import views
from da_jax.train.data import Encoder
from support import tiny

CHUNKS = tuple(f"part {letter}: " + letter * (9 + 5 * i) for i, letter in enumerate("abcdef"))
QUESTION = "which part?"
RESPONSES = (
    'read <focus magic_chunks="2">bb</focus> then <local>own words only</local> and '
    '<focus magic_chunks="1, 4-5">three</focus><local>so it is</local> done',
    "<local>nothing is looked up here</local>",
    'a wrong number <focus magic_chunks="77">widens</focus> and <local>closes</focus> badly',
    "plain words, `<local>` in code",
)


def writer(folder: Path) -> SimpleNamespace:
    """Tokenizer and prompts of a folder, without an engine."""
    tokenizer = load_tokenizer(folder)
    style = Style(**tiny.STYLE)
    return SimpleNamespace(tokenizer=tokenizer, renderer=PromptRenderer(tokenizer, style))


def encoder(llm, longest: int = 512) -> Encoder:
    """Encodes with the tokenizer and the prompts of an engine."""
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    table = views.token_table(llm.tokenizer)
    return Encoder(llm.renderer, llm.tokenizer, table, end, frozenset([end]), longest)


def example(response: str, **fields) -> Recorded:
    """A response to the question about the chunks."""
    asked = {"document": list(CHUNKS), "question": QUESTION, "response": response}
    return Recorded.of("f.jsonl, line 1", asked | fields)


def examples(**fields) -> list[Recorded]:
    """One a response."""
    return [example(text, **fields) for text in RESPONSES]
