"""A path whose folder is replaced by another within one process, as in a notebook."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import references

from da_jax.checkpoints import convert, hf


@pytest.fixture
def folder(tmp_path):
    return references.write_folder("qwen3_untied", tmp_path / "model")


def embedding(folder, **options):
    return np.asarray(hf.flat_parameters(convert.load(folder, **options))["embedding"][...])


def test_a_conversion_can_be_removed_and_done_again(folder, tmp_path):
    for dtype in (jnp.float32, jnp.bfloat16):
        convert.convert(folder, tmp_path / "orbax", dtype=dtype)
        convert.verify(tmp_path / "orbax")
        shutil.rmtree(tmp_path / "orbax")


def test_a_conversion_that_was_interrupted_while_it_verified_can_be_done_again(folder, tmp_path):
    def interrupt(stage, done, total):
        if stage == "verifying" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32, progress=interrupt)
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    convert.verify(tmp_path / "orbax")


@pytest.mark.parametrize("quantized", [False, True])
def test_what_is_loaded_is_what_is_there_now(folder, tmp_path, quantized):
    other = references.write_folder("qwen3_untied", tmp_path / "other")
    negated = {name: -value for name, value in load_file(other / "model.safetensors").items()}
    save_file(negated, other / "model.safetensors")
    options = {"dtype": jnp.dtype(jnp.float32), "quantized": quantized}
    for source in (folder, other):
        convert.convert(source, tmp_path / "orbax", dtype=jnp.float32, verify=False)
        found = embedding(tmp_path / "orbax", **options)
        np.testing.assert_array_equal(found, embedding(source, **options))
        shutil.rmtree(tmp_path / "orbax")


def test_a_good_checkpoint_that_is_moved_into_the_place_of_another_is_not_called_damaged(
    folder, tmp_path
):
    for name, dtype in (("first", jnp.float32), ("second", jnp.bfloat16)):
        convert.convert(folder, tmp_path / name, dtype=dtype)
    for name in ("first", "second"):
        shutil.move(tmp_path / name, tmp_path / "orbax")
        convert.verify(tmp_path / "orbax")
        shutil.rmtree(tmp_path / "orbax")
