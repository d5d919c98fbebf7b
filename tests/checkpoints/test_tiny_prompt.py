"""What the tiny checkpoint was trained on is what the prompt renderer writes, token for token."""

import jax
import numpy as np
import pytest
import transformers

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.batches import Shape, make_batch
from da_jax.checkpoints.tiny.export import STYLE, export
from da_jax.checkpoints.tiny.model import Config, init
from da_jax.protocol.prompt import PromptRenderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = Config(vocab_size=len(lang.VOCABULARY))
    export(init(jax.random.key(0), config), config, folder)
    return PromptRenderer(transformers.AutoTokenizer.from_pretrained(folder))


def test_the_style_travels_with_the_folder(renderer):
    assert renderer.style == STYLE


@pytest.mark.parametrize("seed", range(5))
def test_every_line_of_a_document_is_a_chunk(renderer, seed):
    document = lang.make_document(np.random.default_rng(seed), 1 + 7 * seed, held_out=False)
    assert renderer.split(document.text) == document.text.splitlines(keepends=True)


@pytest.mark.parametrize("newlines", [0.0, 0.5])
def test_training_batches_hold_the_rendered_prompt(renderer, newlines):
    """Ids and chunk spans of context and question, with and without the last newline."""
    shape = Shape((1, 12), 320, contexts=4, rows=8, gap=0, ids=0.0, newlines=newlines)
    endings = set()
    for seed in range(3):
        batch, placed = make_batch(np.random.default_rng(seed), shape)
        for p in placed:
            context = batch.context[p.context][batch.chunk[p.context] >= 0]
            chunk = batch.chunk[p.context][: len(context)]
            asked = batch.rows[p.context, p.row, p.start : p.response]
            source = p.document.text if not newlines else p.document.chunk_texts
            prompt = renderer.render(source, p.question.text)
            np.testing.assert_array_equal(prompt.ids, np.concatenate([context, asked]))
            places = [np.flatnonzero(chunk == n + 1) for n in range(len(p.document.chunks))]
            assert prompt.chunks == tuple((at[0], at[-1] + 1) for at in places)
            assert batch.position[p.context, : len(context)].tolist() == list(range(len(context)))
            assert batch.row_position[p.context, p.row, p.start] == len(context)
            endings.add(p.document.text[-1])
    assert endings == {"\n", "."}
