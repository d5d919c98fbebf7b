"""The shipped checkpoint gives the same probabilities with every kernel, in every mode."""

import json
from pathlib import Path

import numpy as np
import pytest

from da_jax import LLM
from da_jax.checkpoints import tiny
from da_jax.engine.runner import Runner
from da_jax.kernels.paged_attention import BackendError, choose, support
from da_jax.protocol.modes import Mode

pytestmark = pytest.mark.long

EXAMPLE = json.loads((Path(tiny.__file__).parent / "example.json").read_text())
KERNELS = ["mosaic_tpu:interpret", "triton:interpret"]


def load(attention):
    return LLM.from_pretrained(
        "tiny", dtype="float32", attention=attention, max_num_seqs=1, max_model_len=1024,
        page_size=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    """Chunks, the response of the portable backend, and its log-probabilities."""
    sentence = next(s for s in EXAMPLE["document"].split(". ") if "Nava=" in s) + ". "
    chunks = [EXAMPLE["document"][:300], sentence, EXAMPLE["document"][300:500]]
    llm = load("xla")
    response = llm.generate(chunks, EXAMPLE["question"], max_tokens=96)
    assert {mode for _, mode in response.segments} == set(Mode)
    score = lambda arm: llm.score(chunks, EXAMPLE["question"], response.token_ids, arm=arm)
    want = score("da")
    assert np.abs(want - score("unmasked")).max() > 1e-3  # the mask acts
    return chunks, response, want


@pytest.mark.parametrize("attention", KERNELS)
def test_kernels_agree_with_the_portable_backend_in_all_modes(attention, expected):
    try:
        choose(attention)
    except BackendError as error:
        pytest.skip(str(error))
    chunks, response, want = expected
    got = load(attention).score(chunks, EXAMPLE["question"], response.token_ids)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_backend_that_cannot_run_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("da_jax.checkpoints.convert.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(BackendError, match="'mosaic_tpu' cannot run this here: needs a TPU"):
        load("mosaic_tpu")


def test_a_backend_that_does_not_take_the_model_is_refused_before_anything_compiles(monkeypatch):
    if support.interpreter_obstacle("mosaic_gpu"):
        pytest.skip(support.interpreter_obstacle("mosaic_gpu"))
    monkeypatch.setattr(Runner, "warm_up", lambda *_: pytest.fail("compiled"))
    with pytest.raises(BackendError, match=r"pages of float32 on NVIDIA H200: it takes bfloat16"):
        load("mosaic_gpu:interpret")
