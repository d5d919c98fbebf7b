"""The models against transformers: plain forward, and a mask that changes on the way."""

import numpy as np
import pytest
from support import references
from support.dense import dense_logits

from da_jax.checkpoints import hf


@pytest.fixture(scope="module", params=references.CASES)
def case(request, tmp_path_factory):
    folder = references.write_folder(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, folder, hf.load(folder, dtype=np.float32)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "declared"])
def test_forward_equals_transformers(case, masked):
    name, folder, model = case
    positions, expected = references.expected(name, folder, masked=masked)
    causal = np.tril(np.ones((references.LENGTH,) * 2, bool))
    mask = references.visible_mask() if masked else causal
    logits = dense_logits(model, references.token_ids(), mask)[:, positions]
    assert np.abs(logits - expected).max() < 1e-4


def test_the_declared_mask_changes_only_the_rows_that_it_hides_keys_from(case):
    name, folder, _ = case
    positions, plain = references.expected(name, folder, masked=False)
    _, masked = references.expected(name, folder, masked=True)
    change = np.abs(masked - plain).max(axis=(0, 2))
    assert change[positions < references.MASK_FROM].max() < 1e-4
    assert change[positions >= references.MASK_FROM].min() > 0.1
