import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import references

from da_jax.checkpoints import hf
from da_jax.models.config import ConfigError

FORMS = ("published", "transformers")


@pytest.fixture
def folder(tmp_path):
    return references.write_folder("qwen3_untied", tmp_path / "model")


def parameters(model):
    return {path: np.asarray(leaf[...]) for path, leaf in hf.flat_parameters(model).items()}


def load(folder, dtype=jnp.float32, **options):
    return parameters(hf.load(folder, dtype=dtype, **options))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def change(folder, **tensors):
    """Rewrites the weights: None removes a tensor."""
    path = folder / "model.safetensors"
    kept = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in kept.items() if value is not None}, path)


@pytest.mark.parametrize("case", references.CASES)
def test_every_number_of_the_file_arrives_once_from_either_form(case, tmp_path):
    stored = references.tensors(references.CASES[case])
    expected = np.sort(np.concatenate([value.reshape(-1) for value in stored.values()]))
    loaded = [load(references.write_folder(case, tmp_path / form, form)) for form in FORMS]
    assert_equal(*loaded)
    found = np.concatenate([value.reshape(-1) for value in loaded[0].values()])
    np.testing.assert_array_equal(np.sort(found), expected)


@pytest.mark.parametrize("case", ["gemma3_cond", "gemma4_e2b", "gemma4_12b_cond", "qwen3_5_cond",
                                  "qwen3_5_moe_cond", "qwen3_next"])  # fmt: skip
def test_what_a_text_model_does_not_need_is_left_out(case, tmp_path):
    plain = references.write_folder(case, tmp_path / "plain")
    full = references.write_folder(case, tmp_path / "full", unused=True)
    count = len(load_file(full / "model.safetensors")) - len(load_file(plain / "model.safetensors"))
    assert count >= 2
    assert_equal(load(full), load(plain))


def test_matrices_are_transposed_and_fused_experts_taken_apart(tmp_path):
    config = references.CASES["qwen3_5_moe"]
    stored = references.tensors(config)
    loaded = load(references.write_folder("qwen3_5_moe", tmp_path))
    np.testing.assert_array_equal(loaded["embedding"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded["head.kernel"], stored["lm_head.weight"].T)
    layer, width = "model.layers.2.", config["moe_intermediate_size"]
    fused = stored[f"{layer}mlp.experts.gate_up_proj"]
    down = stored[f"{layer}mlp.experts.down_proj"]
    for e in range(config["num_experts"]):
        gate, up = fused[e, :width].T, fused[e, width:].T
        np.testing.assert_array_equal(loaded["layers.2.moe.gate"][e], gate)
        np.testing.assert_array_equal(loaded["layers.2.moe.up"][e], up)
        np.testing.assert_array_equal(loaded["layers.2.moe.down"][e], down[e].T)
    heads, keys = config["linear_num_key_heads"], config["linear_num_key_heads"] * 16
    for ours, theirs in (("qkv_by_head.kernel", "in_proj_qkv"), ("conv", "conv1d")):
        tensor = stored[f"{layer}linear_attn.{theirs}.weight"]
        q, k, v = np.split(tensor, (keys, 2 * keys))
        groups = zip(*(np.split(x, heads) for x in (q, k, v)))
        tensor = np.concatenate([part for group in groups for part in group])
        expected = tensor if ours == "conv" else tensor.T
        np.testing.assert_array_equal(loaded[f"layers.2.delta.{ours}"], expected)


def test_projections_that_are_grouped_by_key_head_are_taken_apart(tmp_path):
    config = references.CASES["qwen3_next"]
    stored = references.tensors(config)
    loaded = load(references.write_folder("qwen3_next", tmp_path))
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv, ratio = config["linear_key_head_dim"], config["linear_value_head_dim"], values // keys
    groups = stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(
        keys, 2 * dk + 2 * ratio * dv, -1
    )
    pairs = stored["model.layers.0.linear_attn.in_proj_ba.weight"].reshape(keys, 2 * ratio, -1)
    z = np.concatenate([group[2 * dk + ratio * dv :] for group in groups])
    qkv = np.concatenate([group[: 2 * dk + ratio * dv] for group in groups])
    np.testing.assert_array_equal(loaded["layers.0.delta.qkv_by_head.kernel"], qkv.T)
    np.testing.assert_array_equal(loaded["layers.0.delta.z.kernel"], z.T)
    b = np.concatenate([pair[:ratio] for pair in pairs])
    a = np.concatenate([pair[ratio:] for pair in pairs])
    np.testing.assert_array_equal(loaded["layers.0.delta.b.kernel"], b.T)
    np.testing.assert_array_equal(loaded["layers.0.delta.a.kernel"], a.T)


def test_all_faults_come_in_one_error(folder):
    change(
        folder,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=np.zeros((3, 3), np.float32),
        model__layers__7__mlp__up_proj__weight=np.zeros((3, 3), np.float32),
        lm_head__weight=np.zeros((512, 64), np.int32),
    )
    with pytest.raises(hf.CheckpointError) as error:
        hf.load(folder, dtype=jnp.float32)
    message = str(error.value)
    assert "4 faults" in message
    assert "missing: model.norm.weight (for norm.scale)" in message
    assert "shape: model.layers.0.mlp.up_proj.weight is (3, 3), expected (128, 64)" in message
    assert "unmapped: model.layers.7.mlp.up_proj.weight" in message
    assert "dtype: lm_head.weight is I32" in message


def test_an_expert_that_is_missing_is_named_as_the_file_would_name_it(tmp_path):
    folder = references.write_folder("qwen3_5_moe_cond", tmp_path, "transformers")
    names = [n for n in load_file(folder / "model.safetensors") if ".experts.3.up_proj" in n]
    change(folder, **{names[0].replace(".", "__"): None})
    with pytest.raises(hf.CheckpointError, match=f"1 faults:\n  missing: {names[0]}"):
        hf.load(folder, dtype=jnp.float32)


def test_fused_experts_of_a_wrong_width_are_a_fault(tmp_path):
    folder = references.write_folder("gemma4_26b_moe", tmp_path)
    change(folder, model__layers__1__experts__gate_up_proj=np.zeros((8, 128, 64), np.float32))
    with pytest.raises(hf.CheckpointError) as error:
        hf.load(folder, dtype=jnp.float32)
    assert "gate_up_proj is (8, 128, 64), expected (8, 64, 64)" in str(error.value)
    assert "1 faults" in str(error.value)


def test_sharded_files_are_read_through_their_index(folder):
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in chosen}, folder / f"part{part}.safetensors")
        weight_map |= dict.fromkeys(chosen, f"part{part}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(load(folder), whole)
    (folder / "part1.safetensors").unlink()
    with pytest.raises(hf.CheckpointError, match=r"part1\.safetensors"):
        hf.load(folder, dtype=jnp.float32)


def test_a_tensor_that_stands_twice_is_a_fault(folder):
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, folder / "zeros.safetensors")
    with pytest.raises(hf.CheckpointError, match=r"twice: model\.norm\.weight .* one file"):
        hf.load(folder, dtype=jnp.float32)
    (folder / "zeros.safetensors").unlink()
    change(folder, model__language_model__norm__weight=np.zeros(64, np.float32))
    with pytest.raises(hf.CheckpointError, match=r"twice: .* as \['model\.language_model\.norm"):
        hf.load(folder, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": 1, "b": "x"}}, r"names \[1\] as files"),
        ({"weight_map": {"a": None}}, r"names \[None\] as files"),
    ],
)
def test_a_broken_index_is_refused(folder, index, words):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(hf.CheckpointError, match=words):
        hf.load(folder, dtype=jnp.float32)


def test_a_tied_head_may_only_be_a_copy_of_the_embedding(tmp_path):
    folder = references.write_folder("qwen3", tmp_path)
    expected = load(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lm_head__weight=embedding)
    assert_equal(load(folder), expected)
    for wrong in (np.roll(embedding, 1), embedding[:-1].copy()):
        change(folder, lm_head__weight=wrong)
        with pytest.raises(hf.CheckpointError, match=r"lm_head.*Set it to false in config\.json"):
            hf.load(folder, dtype=jnp.float32)


def test_a_file_that_is_missing_broken_or_cut_short_is_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for wrong in (whole[: len(whole) // 2], whole[:20], b"\x08\0\0\0\0\0\0\0not json"):
        path.write_bytes(wrong)
        with pytest.raises(hf.CheckpointError, match=r"model\.safetensors is cut short or no"):
            hf.load(folder, dtype=jnp.float32)
    path.unlink()
    with pytest.raises(hf.CheckpointError, match=r"no \*\.safetensors"):
        hf.load(folder, dtype=jnp.float32)


def test_quantised_files_and_unknown_models_are_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    header["lm_head.weight"] |= {"dtype": "F8_E4M3", "shape": [512, 256]}
    text = json.dumps(header).encode().ljust(size)
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    with pytest.raises(hf.CheckpointError, match=r"dtype: lm_head\.weight is F8_E4M3, expected"):
        hf.load(folder, dtype=jnp.float32)
    config = json.loads((folder / "config.json").read_text())
    for more, words in (
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\).*original"),
        ({"model_type": "mamba"}, "'mamba' is not supported"),
    ):
        (folder / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(ConfigError, match=words):
            hf.load(folder, dtype=jnp.float32)


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_float_in_the_file_becomes_the_wanted_one(folder, stored, dtype):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(stored) for k, v in tensors.items()}, folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    loaded = load(folder, dtype)["layers.1.mlp.down.kernel"]
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, tensors[name].astype(stored).astype(dtype).T)


@pytest.mark.parametrize("case", ["llama", "qwen3_untied", "qwen3_moe", "qwen3_next",
                                  "qwen3_5_moe_cond", "gemma3_cond", "gemma4_e2b",
                                  "gemma4_26b_moe"])  # fmt: skip
def test_saved_as_hugging_face_and_loaded_again_is_the_same(case, tmp_path):
    model = hf.load(references.write_folder(case, tmp_path / "in"), dtype=jnp.bfloat16)
    (tmp_path / "out").mkdir()
    hf.save(model, references.CASES[case], tmp_path / "out")
    assert_equal(load(tmp_path / "out", jnp.bfloat16), parameters(model))


def test_int8_covers_the_matrices_and_nothing_else(tmp_path):
    folder = references.write_folder("qwen3_5_moe", tmp_path)
    exact, small = load(folder), load(folder, jnp.bfloat16, quantized=True)
    quantised = {path for path, value in small.items() if value.dtype == np.int8}
    leaves = {path.split(".", 2)[2] if path.startswith("layers.") else path for path in quantised}
    assert leaves == {
        "embedding", "head.kernel",
        *(f"attention.{x}.kernel" for x in "qkvo"),
        *(f"delta.{x}.kernel" for x in ("qkv_by_head", "z", "out")),
        *(f"moe.{x}" for x in ("gate", "up", "down")),
        *(f"moe.shared.{x}.kernel" for x in ("gate", "up", "down")),
    }  # fmt: skip
    assert small.keys() == exact.keys() | {f"{path}_scale" for path in quantised}
    for path in quantised:
        axis = -1 if path == "embedding" else -2
        step = np.expand_dims(small[f"{path}_scale"], axis).astype(np.float64)
        assert np.abs(small[path] * step - exact[path]).max() <= step.max() / 2 * (1 + 1e-5)
        assert np.all(np.abs(small[path] * step - exact[path]) <= step / 2 * (1 + 1e-5)), path
    for path in exact.keys() - quantised:
        wanted = np.float32 if path.endswith(("a_log", "dt_bias")) else jnp.bfloat16
        assert small[path].dtype == wanted, path
