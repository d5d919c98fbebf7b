"""Orbax: what is written, what loads, and what is refused."""

import gc
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from etils import epath
from safetensors.numpy import load_file, save_file
from support import references

from da_jax.checkpoints import convert, hf, orbax, paths, sources, streaming
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.parameters import wanted
from da_jax.models import hf_config, registry

pytestmark = pytest.mark.long

METADATA = {
    "tokenizer.json": "{}", "tokenizer_config.json": "{}", "tokenizer.model": "x",
    "added_tokens.json": "{}", "special_tokens_map.json": "{}", "generation_config.json": "{}",
    "chat_template.jinja": "{{ x }}", "da_style.json": "{}", "merges.txt": "a b", "LICENSE": "L",
    "additional_chat_templates/tools.jinja": "{{ y }}",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return references.write_folder("qwen3_untied", tmp_path / "model")


def parameters(model):
    return {path: np.asarray(leaf[...]) for path, leaf in hf.flat_parameters(model).items()}


def load(folder, dtype=jnp.float32, **options):
    return parameters(convert.load(folder, dtype=dtype, **options))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def files(folder):
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", references.MODELS)
def test_a_converted_checkpoint_is_the_same_model(case, tmp_path):
    folder = references.write_folder(case, tmp_path / "hf")
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.bfloat16)
    assert_equal(load(tmp_path / "orbax", jnp.bfloat16), load(folder, jnp.bfloat16))


def test_the_folder_alone_is_enough_and_names_no_path(folder, tmp_path):
    for name, text in METADATA.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}})
    )
    (folder / "pytorch_model.bin").write_text("x")
    target = tmp_path / "made" / "orbax"
    convert.convert(folder, target, dtype=jnp.float32)
    found = files(target)
    assert {name for name in found if not name.startswith("params")} == {
        *METADATA, "config.json", "da_jax.json",
    }  # fmt: skip
    assert all((target / name).read_text() == text for name, text in METADATA.items())
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in found.values())
    before = load(target)
    shutil.move(target, tmp_path / "moved")
    shutil.rmtree(folder)
    assert_equal(load(tmp_path / "moved"), before)
    convert.verify(tmp_path / "moved")


def test_an_existing_checkpoint_is_refused_before_any_work(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    before = {name: path.stat().st_mtime_ns for name, path in files(tmp_path / "orbax").items()}
    shutil.rmtree(folder)
    with pytest.raises(FileExistsError, match="already holds"):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    after = {name: path.stat().st_mtime_ns for name, path in files(tmp_path / "orbax").items()}
    assert before == after


def test_progress_counts_the_bytes_of_each_stage(folder, tmp_path):
    seen = {}
    size = convert.convert(
        folder,
        tmp_path / "orbax",
        dtype=jnp.float32,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    expected = sum(v.nbytes for v in references.tensors(references.CASES["qwen3_untied"]).values())
    assert size == expected and list(seen) == ["converting", "verifying"]
    for steps in seen.values():
        assert steps == sorted(steps) and steps[0] == (0, size) and steps[-1] == (size, size)


@pytest.mark.parametrize("case", ["qwen3_moe", "gemma4_e2b", "qwen3_5"])
def test_int8_is_the_same_from_conversion_and_at_load_and_needs_no_flag(case, tmp_path):
    folder = references.write_folder(case, tmp_path / "hf")
    convert.convert(folder, tmp_path / "int8", dtype=jnp.bfloat16, quantize="int8")
    at_load = load(folder, jnp.bfloat16, quantized=True)
    assert_equal(load(tmp_path / "int8", jnp.bfloat16), at_load)
    assert_equal(load(tmp_path / "int8", jnp.bfloat16, quantized=True), at_load)
    assert any(value.dtype == np.int8 for value in at_load.values())
    convert.verify(tmp_path / "int8")


def test_an_orbax_checkpoint_becomes_int8_at_load_and_by_conversion(folder, tmp_path):
    at_load = load(folder, jnp.bfloat16, quantized=True)
    convert.convert(folder, tmp_path / "exact", dtype=jnp.float32)
    assert_equal(load(tmp_path / "exact", jnp.bfloat16, quantized=True), at_load)
    convert.convert(tmp_path / "exact", tmp_path / "again", dtype=jnp.bfloat16, quantize="int8")
    assert_equal(load(tmp_path / "again", jnp.bfloat16), at_load)
    stages = []
    with pytest.raises(CheckpointError, match="int8 already"):  # before all of it is read
        convert.convert(
            tmp_path / "again", tmp_path / "no", dtype=jnp.float32,
            progress=lambda stage, *_: stages.append(stage),
        )  # fmt: skip
    assert stages == []
    with pytest.raises(ValueError, match="'int4'"):
        convert.convert(folder, tmp_path / "no", dtype=jnp.float32, quantize="int4")
    assert not (tmp_path / "no").exists()


def test_arrays_of_many_blocks_and_chunks_survive(tmp_path, monkeypatch):
    folder = references.write_folder("qwen3_5_yarn", tmp_path / "hf")
    expected = load(folder)
    monkeypatch.setattr(sources, "BLOCK", 5000)
    monkeypatch.setattr(streaming, "CHUNK", 1250)
    monkeypatch.setattr(streaming, "_TOGETHER_BYTES", 10_000)
    monkeypatch.setattr(streaming, "_DATABASE_BYTES", 50_000)
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert len(list((tmp_path / "orbax/params/state").glob("ocdbt.process_*"))) > 5
    monkeypatch.undo()
    assert_equal(load(tmp_path / "orbax"), expected)
    convert.verify(tmp_path / "orbax")


def test_chunks_are_small_and_split_the_longer_side():
    for shape in (
        (262144, 5376), (5376, 21504), (256, 2048, 512), (128, 2816, 704), (262144, 10752),
        (5120, 248320), (10240, 1, 4), (5,),
    ):  # fmt: skip
        chunk = streaming.chunk_shape(shape)
        assert np.prod(chunk) <= streaming.CHUNK
        assert np.prod(chunk) > streaming.CHUNK / 4 or tuple(chunk) == shape
        assert len(shape) == 3 or max(chunk) <= 2.1 * min(chunk) or tuple(chunk) == shape


def test_an_orbax_checkpoint_of_another_shape_lists_the_faults(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    config = references.CASES["qwen3_untied"] | {"num_hidden_layers": 4, "intermediate_size": 64}
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        convert.load(tmp_path / "orbax", dtype=jnp.float32)
    assert "missing: layers.3.mlp.up.kernel" in str(error.value)
    assert "shape: layers.0.mlp.up.kernel is (64, 128), expected (64, 64)" in str(error.value)


def test_the_record_must_agree_with_what_is_stored(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    path = tmp_path / "orbax" / "da_jax.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"quantize": "int8"}))
    with pytest.raises(CheckpointError, match="missing: embedding_scale"):
        convert.load(tmp_path / "orbax", dtype=jnp.float32)
    path.write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(CheckpointError, match="update da-jax"):
        convert.load(tmp_path / "orbax", dtype=jnp.float32)


@pytest.fixture
def abandoned():
    """Collects the tasks that Orbax leaves behind when a load fails, within the test at fault."""
    yield
    gc.collect()


ABANDONED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ABANDONED
def test_damage_is_found_and_named(folder, tmp_path, abandoned):
    target = tmp_path / "orbax"
    convert.convert(folder, target, dtype=jnp.float32)
    checksums = convert.verify(target)
    assert checksums.keys() == load(folder).keys()
    largest = max((target / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged; 1 parameters or files"):
        convert.verify(target)
    path = target / "da_jax.json"
    record = json.loads(path.read_text())
    record["checksums"]["norm.scale"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"norm\.scale: .*, expected 0000"):
        convert.verify(target)
    largest.unlink()
    (target / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing(.|\n)*unreadable"):
        convert.verify(target)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert.load(target, dtype=jnp.float32)


def test_what_was_not_verified_cannot_be_checked_later(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32, verify=False)
    assert_equal(load(tmp_path / "orbax"), load(folder))
    with pytest.raises(CheckpointError, match="has no checksums"):
        convert.verify(tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="no Orbax checkpoint; convert it first"):
        convert.verify(folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert.verify(tmp_path / "nothing")


def test_what_storage_garbles_while_it_writes_is_caught(folder, tmp_path, monkeypatch):
    read = streaming.Stored.read
    monkeypatch.setattr(streaming.Stored, "read", lambda self, index: read(self, index) * 2)
    with pytest.raises(CheckpointError, match=r"differs from the source in .*embedding"):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert not orbax.is_orbax(tmp_path / "orbax")


def test_a_full_disk_is_one_error_that_names_the_destination(folder, tmp_path, monkeypatch):
    async def full(self, directory, name, context):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing file: No space left on device")

    monkeypatch.setattr(streaming._Leaf, "write", full)
    with pytest.raises(OSError, match=r"cannot write .*orbax: .*No space left(.|\n)*free space"):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert not (tmp_path / "orbax").exists()
    monkeypatch.undo()
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert_equal(load(tmp_path / "orbax"), load(folder))


def test_remote_destinations_are_described_as_such(bucket):
    remote = paths.absolute("gs://bucket/models/x")
    assert str(remote) == "gs://bucket/models/x" and paths.is_remote(remote)
    spec = streaming._database(remote / "params", "embedding")
    assert tensorstore.KvStore.Spec(spec).base.url == "gs://bucket/models/x/params/"
    assert not paths.is_remote(paths.absolute("x")) and paths.absolute("x").is_absolute()


def test_metadata_of_a_remote_checkpoint_is_copied_here_and_removed_at_the_end(
    folder, bucket, monkeypatch
):
    assert paths.local_metadata(folder) == folder
    (epath.Path(bucket) / "model").mkdir(parents=True)
    for name, path in files(folder).items():
        (epath.Path(bucket) / "model" / name).write_bytes(path.read_bytes())
    ends = []
    monkeypatch.setattr("atexit.register", lambda call, *args, **kw: ends.append((call, args, kw)))
    copy = paths.local_metadata(f"{bucket}/model")
    assert files(copy).keys() == {"config.json"}
    for call, arguments, options in ends:
        call(*arguments, **options)
    assert not copy.exists()


def damage(folder):
    """Changes one byte of the largest file of weights."""
    largest = max((folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0x01
    largest.write_bytes(data)


def test_parameters_can_keep_the_dtype_of_the_checkpoint(tmp_path):
    folder = references.write_folder("gemma4_e2b", tmp_path / "hf")
    plain = load(folder, jnp.bfloat16)["per_layer_embedding"]
    for name, quantize in (("exact", None), ("int8", "int8")):
        convert.convert(folder, tmp_path / name, dtype=jnp.bfloat16, quantize=quantize)
        found = load(tmp_path / name, jnp.float32, as_stored=("per_layer_embedding",))
        np.testing.assert_array_equal(found["per_layer_embedding"], plain)
        assert found["per_layer_embedding"].dtype == jnp.bfloat16
        assert found["norm.scale"].dtype == jnp.float32


def test_int8_folders_say_so(folder, tmp_path):
    convert.convert(folder, tmp_path / "exact", dtype=jnp.float32, verify=False)
    convert.convert(folder, tmp_path / "int8", dtype=jnp.float32, quantize="int8", verify=False)
    assert convert.is_int8(tmp_path / "int8") and not convert.is_int8(tmp_path / "exact")
    assert not convert.is_int8(folder)
    path = tmp_path / "int8" / "da_jax.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"complete": False}))
    with pytest.raises(CheckpointError, match="incomplete"):
        convert.is_int8(tmp_path / "int8")
    for wrong in ({"colour": "red"}, {"checksums": 3}):
        path.write_text(json.dumps(record | wrong))
        with pytest.raises(CheckpointError, match=r"da_jax\.json is damaged"):
            convert.is_int8(tmp_path / "int8")


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"tree_metadata": 3}', "not json"])
def test_a_damaged_manifest_is_one_error(folder, tmp_path, text):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32, verify=False)
    for path in list((tmp_path / "orbax" / "params").rglob("_METADATA")):
        path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match="orbax"):
        convert.load(tmp_path / "orbax", dtype=jnp.float32)


@ABANDONED
def test_a_byte_that_changed_is_noticed_at_load_and_by_conversion(folder, tmp_path, abandoned):
    target = tmp_path / "orbax"
    convert.convert(folder, target, dtype=jnp.float32)
    damage(target)
    for quantized in (False, True):
        with pytest.raises(CheckpointError, match=f"{target}(.|\n)*Digest mismatch"):
            convert.load(target, dtype=jnp.float32, quantized=quantized)
    with pytest.raises(CheckpointError, match=f"{target} is damaged"):
        convert.convert(target, tmp_path / "again", dtype=jnp.float32)
    assert not (tmp_path / "again").exists()


def test_a_source_that_differs_from_its_checksums_is_not_converted(folder, tmp_path):
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    path = tmp_path / "orbax" / "da_jax.json"
    record = json.loads(path.read_text())
    record["checksums"]["norm.scale"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"norm\.scale: .*, expected 0000"):
        convert.convert(tmp_path / "orbax", tmp_path / "again", dtype=jnp.float32)
    assert not (tmp_path / "again").exists()


def test_files_beside_the_weights_are_verified_too(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    (tmp_path / "orbax" / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json was changed"):
        convert.verify(tmp_path / "orbax")
    (tmp_path / "orbax" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        convert.verify(tmp_path / "orbax")


def rewrite(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("value", "dtype", "quantize", "words"),
    [
        (70_000, jnp.float16, None, r"range of float16 \(65504\); use bfloat16 or float32"),
        (np.nan, jnp.bfloat16, "int8", "infinite or undefined"),
        (np.inf, jnp.bfloat16, "int8", "infinite or undefined"),
    ],
)
def test_numbers_that_do_not_fit_name_the_parameter(
    folder, tmp_path, value, dtype, quantize, words
):
    rewrite(folder, "model.layers.1.mlp.up_proj.weight", lambda array: np.put(array, 7, value))
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.up\.kernel has .*{words}"):
        convert.convert(folder, tmp_path / "orbax", dtype=dtype, quantize=quantize)
    assert not (tmp_path / "orbax").exists()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_numbers_that_do_not_fit_are_refused_at_load_too(folder, tmp_path, quantize):
    name = "model.norm.weight"  # never int8
    rewrite(folder, name, lambda array: np.put(array, 7, np.inf))
    convert.convert(folder, tmp_path / "infinite", dtype=jnp.float32, quantize=quantize)
    assert np.isinf(load(tmp_path / "infinite", jnp.float16)["norm.scale"]).sum() == 1
    rewrite(folder, name, lambda array: np.put(array, 7, 70_000))
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32, quantize=quantize)
    with pytest.raises(CheckpointError, match=r"norm\.scale has .*range of float16 \(65504\); use"):
        load(tmp_path / "orbax", jnp.float16)
    assert load(tmp_path / "orbax", jnp.bfloat16)["norm.scale"].max() > 69_000


def test_an_unreadable_source_is_not_blamed_on_the_destination(folder, tmp_path, monkeypatch):
    def broken(self, index):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sources.Tensor, "read", broken)
    with pytest.raises(CheckpointError, match=f"cannot read .* of {folder}: .*Input/output"):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert not (tmp_path / "orbax").exists()


def test_a_failure_in_cleaning_does_not_hide_the_first_one(folder, tmp_path, monkeypatch):
    async def full(self, directory, name, context):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    def busy(self, **options):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(streaming._Leaf, "write", full)
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", busy)
    words = r"No space left(.|\n)*could not be removed.*resource busy"
    with pytest.raises(OSError, match=words):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="incomplete"):
        convert.load(tmp_path / "orbax", dtype=jnp.float32)
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)


def test_removing_is_tried_again(folder, tmp_path, monkeypatch):
    target = epath.Path(tmp_path / "orbax")
    convert.convert(folder, target, dtype=jnp.float32, verify=False)
    rmtree, calls = type(target).rmtree, []

    def once(self, **options):
        calls.append(self)
        if len(calls) == 1:
            raise OSError(39, "Directory not empty")
        rmtree(self, **options)

    monkeypatch.setattr(type(target), "rmtree", once)
    orbax.discard(target)
    assert len(calls) == 2 and not (target / "params").exists()


def test_destinations_that_cannot_be_are_refused(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, f"{folder}/", tmp_path / "link"):
        with pytest.raises(ValueError, match="is the source"):
            convert.convert(folder, same, dtype=jnp.float32)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is a file"):
        convert.convert(folder, tmp_path / "file", dtype=jnp.float32)
    words = f"{tmp_path / 'file'} is a file, and .* would be below it; name another"
    with pytest.raises(NotADirectoryError, match=words):
        convert.convert(folder, tmp_path / "file" / "a" / "b", dtype=jnp.float32)
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_that_holds_something_else_is_not_written_to(folder, tmp_path):
    other = references.write_folder("qwen3", tmp_path / "other")
    before = {name: path.read_bytes() for name, path in files(other).items()}
    words = rf"{other} holds other files \(config.json, model.safetensors\).* empty folder"
    with pytest.raises(FileExistsError, match=words):
        convert.convert(folder, other, dtype=jnp.float32)
    assert {name: path.read_bytes() for name, path in files(other).items()} == before
    (tmp_path / "empty").mkdir()
    convert.convert(folder, tmp_path / "empty", dtype=jnp.float32)


def test_a_conversion_that_failed_near_its_end_can_be_done_again(folder, tmp_path, monkeypatch):
    (folder / "tokenizer.json").write_text("{}")
    write, calls = orbax.Record.write, []

    def full(self, target):
        calls.append(self)
        if self.complete:
            raise OSError(28, "No space left on device")
        write(self, target)

    monkeypatch.setattr(orbax.Record, "write", full)
    with pytest.raises(OSError, match="free space"):
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    assert [record.complete for record in calls] == [False, True]
    monkeypatch.undo()
    assert (tmp_path / "orbax" / "tokenizer.json").exists()
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    convert.verify(tmp_path / "orbax")


def test_arrays_are_written_in_the_order_of_the_model(folder):
    config = hf_config.read(folder)
    model = hf.flat_parameters(registry.abstract(config, dtype=jnp.dtype(jnp.float32)))
    with hf.sources(folder, config) as stored:
        assert list(wanted(stored, model)) == list(model)
