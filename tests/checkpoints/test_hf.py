import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import references

from da_jax.checkpoints import convert, hf, orbax


@pytest.fixture
def folder(tmp_path):
    return references.write_folder("qwen3_untied", tmp_path / "model")


def parameters(model):
    return {path: np.asarray(leaf[...]) for path, leaf in hf.flat_parameters(model).items()}


def assert_equal(left, right):
    left, right = parameters(left), parameters(right)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def test_every_number_of_the_file_arrives(folder):
    tensors = references.tensors(references.CASES["qwen3_untied"])
    loaded = parameters(hf.load(folder, dtype=jnp.float32))
    np.testing.assert_array_equal(loaded["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded["head.kernel"], tensors["lm_head.weight"].T)
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(loaded["layers.2.mlp.down.kernel"], tensors[name].T)
    assert sum(v.size for v in loaded.values()) == sum(v.size for v in tensors.values())


def test_all_faults_come_in_one_error(folder):
    tensors = references.tensors(references.CASES["qwen3_untied"])
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(hf.CheckpointError) as error:
        hf.load(folder, dtype=jnp.float32)
    message = str(error.value)
    assert "4 faults" in message
    assert "missing: model.norm.weight" in message
    assert "shape: model.layers.0.mlp.up_proj.weight is (3, 3), expected (128, 64)" in message
    assert "unmapped: model.layers.7.mlp.up_proj.weight" in message
    assert "dtype: lm_head.weight is I32" in message


def test_sharded_files_are_read_through_their_index(folder):
    whole = hf.load(folder, dtype=jnp.float32)
    tensors = references.tensors(references.CASES["qwen3_untied"])
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in chosen}, folder / f"part{part}.safetensors")
        weight_map |= dict.fromkeys(chosen, f"part{part}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(hf.load(folder, dtype=jnp.float32), whole)
    (folder / "part1.safetensors").unlink()
    with pytest.raises(hf.CheckpointError, match=r"part1\.safetensors"):
        hf.load(folder, dtype=jnp.float32)


def test_a_tensor_in_two_files_is_a_fault(folder):
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, folder / "zeros.safetensors")
    with pytest.raises(hf.CheckpointError, match=r"twice: model\.norm\.weight"):
        hf.load(folder, dtype=jnp.float32)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(hf.CheckpointError, match="no weight_map"):
        hf.load(folder, dtype=jnp.float32)


def test_a_folder_without_weights_and_a_broken_file_are_explained(folder):
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(hf.CheckpointError, match="download it again"):
        hf.load(folder, dtype=jnp.float32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(hf.CheckpointError, match=r"no \*\.safetensors"):
        hf.load(folder, dtype=jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_saved_as_hugging_face_and_loaded_again_is_the_same(folder, tmp_path, dtype):
    model = hf.load(folder, dtype=dtype)
    (tmp_path / "out").mkdir()
    hf.save(model, references.CASES["qwen3_untied"], tmp_path / "out")
    assert_equal(hf.load(tmp_path / "out", dtype=dtype), model)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_orbax_round_trip_is_exact_and_carries_the_metadata(folder, tmp_path, dtype):
    (folder / "da_style.json").write_text("{}")
    model = hf.load(folder, dtype=dtype)
    convert.convert(folder, tmp_path / "orbax", dtype=dtype)
    assert orbax.is_orbax(tmp_path / "orbax")
    assert (tmp_path / "orbax" / "da_style.json").exists()
    files = [path for path in (tmp_path / "orbax").rglob("*") if path.is_file()]
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
    assert_equal(convert.load(tmp_path / "orbax", dtype=dtype), model)
    with pytest.raises(FileExistsError, match="already holds"):
        convert.convert(folder, tmp_path / "orbax", dtype=dtype)


def test_an_orbax_checkpoint_of_another_shape_lists_the_faults(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    config = references.CASES["qwen3_untied"] | {"num_hidden_layers": 4, "intermediate_size": 64}
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(config))
    with pytest.raises(hf.CheckpointError) as error:
        orbax.load(tmp_path / "orbax", dtype=jnp.float32)
    assert "missing: layers.3.mlp.up.kernel" in str(error.value)
    assert "shape: layers.0.mlp.up.kernel is (64, 128), expected (64, 64)" in str(error.value)


def test_names_resolve_to_folders_or_say_what_is_wrong(tmp_path, monkeypatch):
    assert convert.resolve(tmp_path) == tmp_path
    assert convert.resolve("tiny") == convert.TINY
    with pytest.raises(FileNotFoundError, match="no folder"):
        convert.resolve("no-such-model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="hub"):
        convert.resolve("nobody/no-such-model")


def test_a_hub_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    asked = {}

    def download(name, *, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert convert.resolve("owner/name", revision="v1") == tmp_path
    assert asked["name"] == "owner/name" and asked["revision"] == "v1"
    assert "*.safetensors" in asked["patterns"] and "*.bin" not in asked["patterns"]
