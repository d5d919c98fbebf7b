"""The models against transformers: plain forward, and a mask that changes on the way."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import references
from support.cases import SAME_AS
from support.dense import dense_forward

from da_jax.checkpoints import hf

CAUSAL = np.tril(np.ones((references.LENGTH,) * 2, bool))
CASES = (*references.MODELS, *SAME_AS)
SHORT = 37  # valid tokens of a padded row


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = references.write_folder(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, folder, hf.load(folder, dtype=np.float32)


@pytest.fixture(scope="module")
def plain(case):
    return dense_forward(case[2], references.token_ids(), CAUSAL)


def test_every_layer_equals_transformers(case, plain):
    """Comes first: it names the layer where a wrong model goes wrong."""
    name, folder, model = case
    assert len(plain.layers) == len(model.config.layers)
    errors = references.layer_errors(name, folder, plain.layers)
    off = np.flatnonzero(errors > references.tolerance(name) / 5)
    where = [f"{i} ({model.config.layers[i].mixer.kind}): {errors[i]:.1e}" for i in off[:1]]
    assert not where, f"first layer that is off: {where[0]} of its largest number; all: {errors}"


def test_forward_equals_transformers(case, plain):
    name, folder, _ = case
    expected = references.expected(name, folder, masked=False)
    assert expected.error(plain.logits) < references.tolerance(name)


def test_a_declared_mask_equals_transformers(case):
    name, folder, model = case
    expected = references.expected(name, folder, masked=True)
    masked = dense_forward(model, references.token_ids(), references.visible_mask())
    assert expected.error(masked.logits) < references.tolerance(name)


def test_the_declared_mask_changes_only_the_rows_that_it_hides_keys_from(case):
    name, folder, _ = case
    plain = references.expected(name, folder, masked=False)
    masked = references.expected(name, folder, masked=True)
    change = np.abs(masked.logits - plain.logits).max(axis=(0, 2))
    assert change[plain.positions < references.MASK_FROM].max() < 1e-4
    assert change[plain.positions >= references.MASK_FROM].min() > 0.1


def test_right_padding_leaves_valid_tokens_unchanged(case, plain):
    name, _, model = case
    lengths, ids = np.array([66, SHORT]), references.token_ids()
    padded = np.where(np.arange(references.LENGTH) < lengths[:, None], ids, 499)
    ragged = dense_forward(model, padded, CAUSAL, lengths)
    for row, length in enumerate(lengths):
        error = np.abs(ragged.logits[row, :length] - plain.logits[row, :length]).max()
        assert error < references.tolerance(name) / 10
    if not ragged.states or name in SAME_AS:
        return
    alone = dense_forward(model, ids[1:, :SHORT], CAUSAL[:SHORT, :SHORT])
    assert ragged.states.keys() == alone.states.keys() == set(model.config.layers_of("recurrent"))
    for layer, state in alone.states.items():  # after the last valid token
        for ours, expected in zip(ragged.states[layer], state):
            np.testing.assert_allclose(ours[1], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not references.HAS_TORCH, reason="asks transformers, which needs torch")
@pytest.mark.parametrize("name", CASES)
def test_the_form_that_is_called_transformers_is_what_transformers_saves(name, tmp_path):
    """So that loading both forms can be tested where there is no torch."""
    references.torch_save(references.write_folder(name, tmp_path / "published"), tmp_path / "saved")
    references.write_folder(name, tmp_path / "ours", "transformers")
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("ours", "saved"))
    towers = ("vision_tower", "visual", "multi_modal_projector")
    assert ours.keys() == {key for key in theirs if not any(tower in key for tower in towers)}
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)
    ours, saved = (
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("ours", "saved")
    )
    for config in (ours, saved):
        config |= config.pop("text_config", {})
        config.pop("vision_config", None)
    assert {key: saved.get(key, "absent") for key in ours} == ours
