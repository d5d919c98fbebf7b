"""A table in host memory: the same rows as from device memory, and no copy of it on any chip."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from da_jax.engine import compilations
from da_jax.kernels.aot import machines
from da_jax.kernels.aot.machines import MACHINES
from da_jax.models import host_table

SIZE, WIDTH = 50, 128
IDS = np.array([[0, 1, 49], [7, 7, 48]], np.int32)


def table_of(dtype, size=SIZE):
    return np.random.default_rng(0).normal(size=(size, WIDTH)).astype(dtype)


class Model(nnx.Module):
    def __init__(self, table):
        self.table = nnx.Param(table)
        self.factor = nnx.Param(jnp.ones(1))

    def __call__(self, ids):
        return host_table.rows(self.table[...], ids).astype(jnp.float32) * self.factor


def burst(table, ids):
    """Each step takes rows of the tokens that it made the step before; returns the last and ids."""

    def body(carry):
        step, ids, _ = carry
        found = host_table.rows(table, ids)
        made = (ids * 7 + jnp.argmax(found, axis=-1).astype(jnp.int32)) % table.shape[0]
        return step + 1, made, found

    start = (0, ids, jnp.zeros((*ids.shape, table.shape[1]), table.dtype))
    return jax.lax.while_loop(lambda carry: carry[0] < 16, body, start)[1:]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8])
@pytest.mark.parametrize("memory", ["host", "device"])
def test_rows_are_those_of_the_table(dtype, memory):
    table = table_of(dtype, size=52)
    placed = host_table.place(table) if memory == "host" else jnp.asarray(table)
    for run in (host_table.rows, jax.jit(host_table.rows)):
        found = run(placed, IDS)
        np.testing.assert_array_equal(found, table[IDS])
        assert found.sharding.memory_kind == "device"


def test_many_rows():
    table = table_of(jnp.bfloat16)
    ids = np.random.default_rng(1).integers(0, SIZE, size=(1, 131))
    found = jax.jit(host_table.rows)(host_table.place(table), ids)
    np.testing.assert_array_equal(found, table[ids])


@pytest.mark.parametrize("memory", ["host", "device"])
def test_ids_out_of_range_take_the_nearest_row(memory):
    table = table_of(jnp.bfloat16)
    placed = host_table.place(table) if memory == "host" else jnp.asarray(table)
    found = host_table.rows(placed, np.array([-3, SIZE, SIZE + 99]))
    np.testing.assert_array_equal(found, table[[0, -1, -1]])


def test_no_ids_give_no_rows():
    found = host_table.rows(host_table.place(table_of(jnp.float32)), np.zeros((2, 0), np.int32))
    assert found.shape == (2, 0, WIDTH)


def test_a_burst_takes_rows_of_the_tokens_it_makes():
    table, ids = table_of(jnp.bfloat16), IDS[:, :1]
    made, found = jax.jit(burst)(host_table.place(table), ids)
    for _ in range(16):
        expected = table[ids]
        ids = (ids * 7 + expected.argmax(axis=-1)) % SIZE
    np.testing.assert_array_equal(made, ids)
    np.testing.assert_array_equal(found, expected)


def test_the_table_lies_in_host_memory_and_the_type_says_so():
    placed = host_table.place(table_of(jnp.bfloat16))
    assert placed.sharding.memory_kind == "pinned_host"
    assert host_table.on_host(placed)
    assert not host_table.on_host(jnp.zeros((2, 2)))


def test_a_model_does_not_know_where_its_table_lies():
    table = table_of(jnp.bfloat16)
    answers = []
    for placed in (jnp.asarray(table), host_table.place(table)):
        graph, state = nnx.split(Model(placed))
        answers.append(jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, IDS))  # noqa: B023
    np.testing.assert_array_equal(*answers)


def test_a_program_compiles_once_when_its_state_lies_beside_the_table():
    table = host_table.place(table_of(jnp.bfloat16))
    step = jax.jit(lambda table, sums, ids: sums + host_table.rows(table, ids), donate_argnums=1)
    sums = jax.device_put(np.zeros((*IDS.shape, WIDTH)), table.sharding.with_memory_kind("device"))
    sums = step(table, sums, IDS)
    before = compilations.count()
    step(table, sums, IDS)
    assert compilations.count() == before


def test_a_device_without_host_memory_is_refused():
    memories = lambda: [SimpleNamespace(kind="device")]
    device = SimpleNamespace(platform="npu", device_kind="NPU 1", addressable_memories=memories)
    with pytest.raises(
        host_table.HostMemoryError, match=r"NPU 1 .* memory: per_layer_embeddings='device'$"
    ):
        host_table.place(table_of(jnp.bfloat16), device)


def test_a_tpu_refuses_short_rows():
    memories = lambda: [SimpleNamespace(kind="pinned_host")]
    device = SimpleNamespace(platform="tpu", device_kind="TPU v9", addressable_memories=memories)
    with pytest.raises(
        host_table.HostMemoryError, match=r"at least 128 numbers.* not of 64; .*='device'$"
    ):
        host_table.place(np.zeros((4, 64)), device)


def test_rows_that_share_a_word_come_in_groups():
    with pytest.raises(ValueError, match=r"multiple of 2 rows, not 49: append a row"):
        host_table.place(table_of(jnp.bfloat16, size=49))
    host_table.place(table_of(jnp.float32, size=49))


def test_a_table_is_a_matrix():
    with pytest.raises(ValueError, match=r"\[V, W\], not \[4\]"):
        host_table.place(np.zeros(4))


# Programs for chips that are not here, of the size of Gemma 4 E2B.

ROWS, PLE = 262_144, 8960
SLOW = ("TPU v4", "TPU v5p", "TPU v6e", "TPU7x", "H100", "A100", "L4", "T4", "B200")


@pytest.mark.parametrize(
    "name", ["TPU v5e", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_the_device_gets_rows_and_never_the_table(name, tmp_path):
    if not machines.installed(MACHINES[name]):
        pytest.skip(f"HOST TABLES WERE NOT COMPILED FOR {name}: {machines.INSTALL}")
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=machines.environment(MACHINES[name], tmp_path),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert found["host"] == ROWS * PLE * 2
        assert found["arguments"] < 1 << 20
        assert found["temporaries"] < 64 << 20
        assert not found["copies"]
        assert not found["asks_host"]


def compiled_sizes(name):
    """What the programs of a decode burst and of a prefill chunk need on a chip."""
    device = machines.devices(MACHINES[name])[0]
    prefill = lambda table, ids: host_table.rows(table, ids).astype(jnp.float32).sum(axis=-1)
    return [sizes_of(burst, (8, 1), device), sizes_of(prefill, (1, 512), device)]


def sizes_of(program, shape, device):
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    # A GPU that is only described says nothing of its memories, and only abstract meshes trust us.
    gpu = device.platform == "gpu"
    place = lambda kind: jax.sharding.NamedSharding(
        mesh.abstract_mesh if gpu else mesh, jax.sharding.PartitionSpec(), memory_kind=kind
    )
    table = jax.ShapeDtypeStruct((ROWS, PLE), jnp.bfloat16, sharding=place("pinned_host"))
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place("device"))
    traced = jax.jit(program).trace(table, ids)
    lowered = traced.lower(lowering_platforms=(machines.lowering(device),))
    if gpu:
        lowered._lowering.compile_args["backend"] = device.client
    compiled = lowered.compile(device_assignment=(device,) if gpu else None)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    whole = rf"\[{ROWS},{PLE}\]\S* (copy|copy-start|convert|fusion|custom-call)\("
    return {
        "host": memory.host_argument_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
        "copies": [line.strip() for line in text.splitlines() if re.search(whole, line)],
        "asks_host": "HostExecute" in text,
    }


if __name__ == "__main__":
    print(json.dumps(compiled_sizes(sys.argv[1])))
