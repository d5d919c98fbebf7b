"""Fingerprints tell checkpoints apart, and not their places."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from etils import epath

from da_jax.checkpoints import record
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.hub import TINY
from da_jax.evals import identity


@pytest.fixture
def folder(tmp_path):
    """A folder with a file of weights that is too long to be read whole."""
    (tmp_path / "config.json").write_text("{}")
    weights = np.random.default_rng(0).integers(0, 256, 12 * 2**20, np.uint8)
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    return tmp_path


def test_a_copy_has_the_same_fingerprint(tmp_path):
    shutil.copytree(TINY, tmp_path / "copy")
    assert identity.checkpoint(tmp_path / "copy") == identity.checkpoint(TINY)
    assert identity.tokenizer(tmp_path / "copy") == identity.tokenizer(TINY)


def test_other_weights_of_the_same_shape_have_another(folder):
    before = identity.checkpoint(folder)
    path = folder / "model.safetensors"
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[:] = np.roll(data, 1)  # as after a training step, nearly every byte changes
    path.write_bytes(data.tobytes())
    after = identity.checkpoint(folder)
    assert after["weights"] != before["weights"] and after["config"] == before["config"]
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert identity.checkpoint(folder)["config"] != before["config"]


def test_every_byte_of_a_short_file_counts(tmp_path):
    shutil.copytree(TINY, tmp_path / "copy")
    before = identity.checkpoint(TINY)["weights"]
    path = max((tmp_path / "copy" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert identity.checkpoint(tmp_path / "copy")["weights"] != before


def test_checksums_of_a_conversion_stand_for_its_weights(folder):
    written = record.Record(True, "float32", checksums={"a": "1"})
    written.write(epath.Path(folder))
    before = identity.checkpoint(folder)
    (folder / "model.safetensors").unlink()
    assert identity.checkpoint(folder) == before
    dataclasses.replace(written, checksums={"a": "2"}).write(epath.Path(folder))
    assert identity.checkpoint(folder) != before
    dataclasses.replace(written, complete=False).write(epath.Path(folder))
    with pytest.raises(CheckpointError, match="incomplete"):
        identity.checkpoint(folder)


def test_another_chat_template_is_another_tokenizer(tmp_path):
    shutil.copytree(TINY, tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    assert identity.tokenizer(tmp_path / "copy") != identity.tokenizer(TINY)
    assert identity.checkpoint(tmp_path / "copy") == identity.checkpoint(TINY)
