"""The shipped checkpoint gives the same probabilities with every kernel, in every mode."""

import json
from pathlib import Path

import numpy as np
import pytest

from da_jax import LLM
from da_jax.checkpoints import tiny
from da_jax.kernels.paged_attention import BackendError, choose
from da_jax.protocol.modes import Mode

EXAMPLE = json.loads((Path(tiny.__file__).parent / "example.json").read_text())
KERNELS = ["mosaic_tpu:interpret", "triton:interpret"]


def load(attention):
    return LLM.from_pretrained(
        "tiny", dtype="float32", attention=attention, max_num_seqs=1, max_model_len=1024,
        page_size=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    """Chunks, the response of the portable backend, and its log-probabilities in each arm."""
    sentence = next(s for s in EXAMPLE["document"].split(". ") if "Nava=" in s) + ". "
    chunks = [EXAMPLE["document"][:300], sentence, EXAMPLE["document"][300:500]]
    llm = load("xla")
    response = llm.generate(chunks, EXAMPLE["question"], max_tokens=96)
    assert {mode for _, mode in response.segments} == set(Mode)
    scores = {
        arm: llm.score(chunks, EXAMPLE["question"], response.token_ids, arm=arm)
        for arm in ("da", "unmasked", "vanilla")
    }
    assert np.abs(scores["da"] - scores["unmasked"]).max() > 1e-3  # the mask acts
    return chunks, response, scores


@pytest.mark.parametrize("attention", KERNELS)
def test_kernels_agree_with_the_portable_backend_in_all_modes(attention, expected):
    try:
        choose(attention)
    except BackendError as error:
        pytest.skip(str(error))
    chunks, response, scores = expected
    llm = load(attention)
    for arm, want in scores.items():
        got = llm.score(chunks, EXAMPLE["question"], response.token_ids, arm=arm)
        np.testing.assert_allclose(got, want, atol=1e-4, err_msg=arm)
