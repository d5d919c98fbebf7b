"""What has to be measured from outside: memory, killed conversions, many devices."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import save_file
from support import references

from da_jax.checkpoints import convert, hf, sources, streaming
from da_jax.checkpoints.errors import CheckpointError

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]


def start(script, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def parameters(folder):
    model = convert.load(folder, dtype=jnp.float32)
    return {path: np.asarray(leaf[...]) for path, leaf in hf.flat_parameters(model).items()}


MEMORY = """
    import sys, threading, time
    import jax.numpy as jnp
    from da_jax.checkpoints import convert, sources

    sources.BLOCK //= 8  # so that what is constant does not hide what grows with the tensor
    source, large, small, quantize = sys.argv[1:]

    def anonymous():  # bytes that are not pages of a file: those the system can drop at any time
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])

    def run(source, destination):
        convert.convert(
            source, destination, dtype=jnp.bfloat16, quantize=quantize if quantize else None
        )

    run(small, large + "-warm")  # what libraries keep for good
    before, peak, done = anonymous(), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous() - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(source, large)
    finally:
        done = True
        watcher.join()
    print(peak)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """200 MB of random weights, nearly all in a matrix of 94 MB and one that is transposed."""
    folder = tmp_path_factory.mktemp("large")
    config = references.CASES["qwen3_untied"] | {"vocab_size": 22_912, "hidden_size": 2048}
    small = references.CASES["qwen3_untied"] | {"vocab_size": 1, "hidden_size": 2048}
    tensors = references.tensors(small)
    bits = np.random.default_rng(0).integers(0, 2**16, (22_912, 2048), dtype=np.uint16)
    matrix = (bits & 0xBFFF).view(ml_dtypes.bfloat16)  # random, and below 2
    tensors |= {"lm_head.weight": matrix, "model.embed_tokens.weight": matrix[::-1].copy()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert sum(value.nbytes for value in tensors.values()) > 195e6
    return folder, matrix.nbytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("quantize", ["", "int8"])
def test_memory_does_not_grow_with_the_largest_tensor(large, tmp_path, quantize):
    folder, largest = large
    small = references.write_folder("qwen3_untied", tmp_path / "small")
    child = start(MEMORY, folder, tmp_path / "out", small, quantize)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    assert int(out) < 0.9 * largest, f"{int(out) / 1e6:.0f} MB"
    shutil.rmtree(tmp_path / "out")


KILLED = """
    import sys, time
    import jax.numpy as jnp
    from da_jax.checkpoints import convert

    source, destination, stage = sys.argv[1:]

    def progress(now, done, total):
        if now == stage and done > total // 2:
            print("half", flush=True)
            time.sleep(600)

    convert.convert(source, destination, dtype=jnp.float32, progress=progress)
"""


@pytest.mark.parametrize("stage", ["converting", "verifying"])
def test_a_killed_conversion_does_not_load_and_starts_over(tmp_path, stage):
    source = references.write_folder("qwen3_untied", tmp_path / "source")
    target = tmp_path / "target"
    child = start(KILLED, source, target, stage)
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with pytest.raises(CheckpointError, match=r"incomplete.*Run it again"):
        convert.load(target, dtype=jnp.float32)
    with pytest.raises(CheckpointError, match="is incomplete"):
        convert.verify(target)
    with pytest.raises(CheckpointError, match="incomplete"):
        convert.convert(target, tmp_path / "other", dtype=jnp.float32)
    stages = []
    convert.convert(
        source, target, dtype=jnp.float32, progress=lambda stage, *_: stages.append(stage)
    )
    assert stages[0] == "starting over"
    expected, found = parameters(source), parameters(target)
    assert all(np.array_equal(expected[path], found[path]) for path in expected | found)
    assert {path.name for path in target.iterdir()} == {"params", "config.json", "da_jax.json"}


class Slow:
    """Three small arrays of which the second fails at once and the others take their time."""

    shape, order, dtype = (64, 1), (0, 1), np.dtype(np.float32)

    def __init__(self, reads, fails):
        self.reads, self.fails = reads, fails

    def read(self, index):
        if self.fails:
            raise ValueError("boom")
        time.sleep(0.01)
        self.reads.append(index)
        return np.zeros([part.stop - part.start for part in index], np.float32)


def test_nothing_is_written_any_more_when_writing_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 1)
    monkeypatch.setattr(streaming, "CHUNK", 1)
    reads = []
    arrays = {name: Slow(reads, name == "b") for name in "abc"}
    with pytest.raises(ValueError, match="boom"):
        streaming.write(epath.Path(tmp_path / "out"), arrays, lambda size: None)
    count, files = len(reads), sorted(tmp_path.rglob("*"))
    assert count < 20
    time.sleep(0.1)
    assert len(reads) == count and sorted(tmp_path.rglob("*")) == files


def test_stopping_waits_for_the_writer():
    job = streaming._Job(lambda size: None)
    started, ended = threading.Event(), threading.Event()

    def write():
        with job.writer():
            started.set()
            while not job.stopped:
                time.sleep(0.001)
            time.sleep(0.05)
            ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    started.wait()
    job.stop()
    assert ended.is_set()
    thread.join()


SHARDED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from da_jax.checkpoints import convert, hf, sources

    folder, quantized = sys.argv[1], bool(sys.argv[2])
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((8,), ("x",))
    reads, read = [], sources.Tensor.read

    def watched(self, index):
        value = read(self, index)
        reads.append(value.size)
        return value

    sources.Tensor.read = watched

    def split(path, shape):  # along the output, the input, the experts, the vocabulary
        axis = {"down": -2, "o": -2, "out": -2}.get((["", *path.split(".")])[-2], -1)
        axis = 0 if len(shape) == 3 or path.startswith("embedding") else axis
        if len(shape) < 2 or shape[axis] % 8:
            return NamedSharding(mesh, P())
        names = [None] * len(shape)
        names[axis] = "x"
        return NamedSharding(mesh, P(*names))

    model = convert.load(folder, dtype=jnp.float32, quantized=quantized, shardings=split)
    found = {path: leaf[...] for path, leaf in hf.flat_parameters(model).items()}
    sizes = []
    for path, array in found.items():
        assert array.sharding.is_equivalent_to(split(path, array.shape), array.ndim), path
        sizes += [shard.data.size for shard in array.addressable_shards]
        if array.size > 2048 and array.ndim > 1 and "conv" not in path:
            assert max(sizes[-8:]) == array.size // 8, (path, array.shape)
    assert not reads or quantized or max(reads) <= max(sizes), (max(reads), max(sizes))

    sources.Tensor.read = read
    plain = convert.load(folder, dtype=jnp.float32, quantized=quantized)
    expected = {path: leaf[...] for path, leaf in hf.flat_parameters(plain).items()}
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        assert array.sharding.device_set == {jax.devices()[0]}
        np.testing.assert_array_equal(np.asarray(array), np.asarray(found[path]), err_msg=path)
    print(len(reads), len(found))
"""


@pytest.mark.parametrize("quantized", ["", "int8"])
@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_each_device_gets_its_part_and_no_more_is_read_at_once(tmp_path, kind, quantized):
    folder = references.write_folder("qwen3_5_moe", tmp_path / "hf")
    if kind == "orbax":
        convert.convert(folder, tmp_path / "orbax", dtype=jnp.float32)
    flags = "--xla_force_host_platform_device_count=8"
    child = start(SHARDED, tmp_path / kind, quantized, XLA_FLAGS=flags)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    reads, arrays = map(int, out.split())
    assert reads > arrays if kind == "hf" else reads == 0
