"""Compiles the programs of a model for a chip that is not there, and says what they need.

A compiler for one chip may abort where another was used before, so each target has a child process:
`python -P -m da_jax.engine.aot MODEL TARGET ...` prints one line of JSON for each program.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from da_jax.cache import pools
from da_jax.cache import sharding as cache_sharding
from da_jax.checkpoints import known
from da_jax.checkpoints.parameters import flat_parameters
from da_jax.engine import engine, memory, packing, runner
from da_jax.engine.config import EngineConfig
from da_jax.kernels import chips
from da_jax.kernels.aot import machines
from da_jax.models import dtypes, host_table, parallel, registry, sharding, sizes
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder

Row = dict[str, Any]
SECONDS = 900  # most time for one target
_MARK = "@aot "  # compilers write to the same stream
_STOP_IDS = 4  # of a checkpoint, about


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled.

    Attributes:
      model: its name, see `checkpoints.known.find`.
      batch: sequences of the decode program.
      context: longest sequence, in tokens.
      int8: weights in 8 bits.
      devices: how many share the model.
      kv_dtype: of keys and values, see `EngineConfig`.
    """

    model: str
    batch: int = 8
    context: int = 32_768
    int8: bool = False
    devices: int = 1
    kv_dtype: str = "auto"

    def config(self) -> ModelConfig:
        """The model's configuration."""
        return known.find(self.model).config

    def settings(self) -> EngineConfig:
        """Settings of the engine."""
        return EngineConfig(
            max_num_seqs=self.batch, max_model_len=self.context, kv_dtype=self.kv_dtype,
            tensor_parallel=self.devices,
        )  # fmt: skip

    def abstract(self, devices: Sequence[jax.Device]) -> Decoder:
        """The model without its weights, but with their places and the dtype that `auto` means."""
        config, device = self.config(), devices[0]
        target = chips.describe(device.platform, device.device_kind)
        dtype = jnp.dtype(dtypes.automatic(config.family, target))
        model = registry.abstract(config, dtype=dtype, quantized=self.int8)
        place_weights(model, self.mesh(devices), host=on_host(self, device))
        return model

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The devices that share the model."""
        return Mesh(np.array(devices[: self.devices]), (parallel.AXIS,))


def rows(plan: Plan, targets: Sequence[str]) -> list[Row]:
    """Compiles prefill, decode and the copy of a slot for each target, one after the other.

    The caches are what the engine would plan there: see `memory`.

    Returns:
      Rows `target, program, ok, error, seconds`, and for what was compiled `argument_bytes` and
      `temp_bytes` on the device, `workspace_bytes` that the plan keeps for the latter,
      `host_bytes`, `cache_bytes` (among the arguments), `page_tokens` that the caches hold, and
      `memory_bytes`, the memory of the device. A program is not ok if it copies the caches, needs
      more than the plan keeps, or does not fit.

    Raises:
      ValueError: an unknown model or target.
    """
    sharding.check(plan.config(), plan.devices)
    return [row for machine in machines.named(targets) for row in _machine(plan, machine)]


def _machine(plan: Plan, machine: machines.Machine) -> list[Row]:
    head = {"target": machine.name, "program": "", "ok": False, "seconds": None}
    if not machines.installed(machine):
        return [head | {"error": machines.INSTALL}]
    command = [
        sys.executable, "-P", "-m", "da_jax.engine.aot", plan.model, machine.name,
        f"--batch={plan.batch}", f"--context={plan.context}", f"--devices={plan.devices}",
        f"--kv-dtype={plan.kv_dtype}", *["--int8"] * plan.int8,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="da-jax-aot-") as scratch:
        environment = machines.environment(machine, Path(scratch))
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace",
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [head | {"error": f"not done within {SECONDS} s"}]
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    found = [json.loads(line[len(_MARK) :]) for line in lines]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        found.append(head | {"error": f"exit code {done.returncode}: {last[0]}"})
    return found


def programs(
    plan: Plan, devices: Sequence[jax.Device], cache: pools.CachePlan
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function that compiles it) of each program; nothing is computed or allocated."""
    config, device = plan.config(), devices[0]
    settings, model, mesh = plan.settings(), plan.abstract(devices), plan.mesh(devices)
    forms = engine.shapes(settings, plan.context, _STOP_IDS)
    vocabulary = config.vocab_size
    made = runner.Runner(
        model, forms, cache, costs=np.zeros(vocabulary, np.int32),
        opens=np.zeros(vocabulary, bool), caches=cache_sharding.described(config, cache, mesh),
    )  # fmt: skip
    everywhere = NamedSharding(mesh, PartitionSpec())
    around = mesh.abstract_mesh if mesh.size > 1 else machines.context(device)

    def compiled(program: Any, inputs: dict[str, Any]) -> Any:
        flat = packing.pack(inputs)
        given = jax.ShapeDtypeStruct(flat.shape, flat.dtype, sharding=everywhere)
        with use_abstract_mesh(around):
            traced = program.trace(made.weights, made.caches, given)
            return traced.lower(lowering_platforms=(machines.lowering(device),)).compile()

    names = {
        ("decode", plan.batch): f"decode, batch {plan.batch}",
        ("prefill", settings.prefill_chunk): f"prefill, {settings.prefill_chunk} tokens",
        ("copy", 0): "copy of a slot",
    }
    for kind, program, inputs in made.programs():
        name = names.get((kind, runner.program_size(kind, inputs)))
        if name:
            yield name, functools.partial(compiled, program, inputs)


def place_weights(model: Decoder, mesh: Mesh, *, host: bool) -> None:
    """Gives the parameters of an abstract model their shardings.

    Args:
      model: of `registry.abstract`.
      mesh: the devices.
      host: whether per-layer embeddings are in host memory.
    """
    for path, leaf in flat_parameters(model).items():
        shape = leaf.get_value()
        there = NamedSharding(mesh, parallel.spec(model.config, path, mesh.size))
        if host and path == "per_layer_embedding":
            there = there.with_memory_kind(host_table.MEMORY)
        leaf.set_value(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=there))


def on_host(plan: Plan, device: jax.Device) -> bool:
    """Whether per-layer embeddings are compiled for host memory: on a TPU that has little."""
    chip = chips.chip_of(device.device_kind)
    use = sizes.Use(int8=plan.int8, devices=plan.devices)
    return (
        device.platform == "tpu"  # a described GPU lists no memories
        and chip is not None
        and sizes.per_layer_on_host(plan.config(), use, chip.memory)
    )


def memory_plan(
    plan: Plan, devices: Sequence[jax.Device]
) -> tuple[memory.MemoryPlan, pools.CachePlan]:
    """What the engine would plan on devices that are not there.

    Raises:
      ValueError: the model does not fit there, or keys and values cannot have that dtype.
    """
    target = chips.describe(devices[0].platform, devices[0].device_kind)
    assert target.chip is not None
    model, settings = plan.abstract(devices), plan.settings()
    forms, dtype = engine.shapes(settings, plan.context, _STOP_IDS), model.dtype.name
    kv_dtype = dtypes.resolve_kv(plan.kv_dtype, dtype, target)
    room = memory.Room(
        device=target.kind,
        memory=target.chip.memory,
        fraction=settings.memory_fraction,
        weights=memory.weight_bytes(model),
        others=0,
        workspace=memory.workspace(plan.config(), dtype, forms, plan.devices),
        copies=memory.copied_share(plan.config(), settings, kv_dtype, target.platform),
    )
    return memory.plan_for(
        plan.config(), settings, room, forms, plan.context, dtype=dtype, kv_dtype=kv_dtype
    )  # fmt: skip


def child(plan: Plan, target: str) -> None:
    """Compiles every program for a target and prints a line for each."""
    (machine,) = machines.named([target])
    devices = machines.devices(machine, max(4, plan.devices))
    planned, cache = memory_plan(plan, devices)
    for name, compile_ in programs(plan, devices, cache):
        began = time.monotonic()
        row: Row = {"target": machine.name, "program": name, "ok": False}
        try:
            analysis = compile_().memory_analysis()
        except Exception as error:  # noqa: BLE001  whatever a compiler throws is the result
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        else:
            row |= _judged(analysis, planned, machine.chip.memory)
        row["seconds"] = round(time.monotonic() - began, 1)
        print(f"\n{_MARK}{json.dumps(row)}", flush=True)


def _judged(analysis: Any, planned: memory.MemoryPlan, capacity: int) -> Row:
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    kept, faults = planned.workspace, []
    if analysis.alias_size_in_bytes < planned.caches:
        faults.append(
            f"only {analysis.alias_size_in_bytes / 1e9:.2f} GB of {planned.caches / 1e9:.2f} GB of "
            "caches are updated in place"
        )
    if analysis.temp_size_in_bytes > kept:
        faults.append(
            f"needs {analysis.temp_size_in_bytes / 1e9:.2f} GB while it runs, the memory plan "
            f"keeps {kept / 1e9:.2f}"
        )
    if needed > capacity:
        faults.append(f"needs {needed / 2**30:.1f} GiB of {capacity / 2**30:.1f}")
    return {
        "ok": not faults,
        "error": "; ".join(faults),
        "argument_bytes": analysis.argument_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
        "workspace_bytes": kept,
        "host_bytes": analysis.host_argument_size_in_bytes,
        "cache_bytes": planned.caches,
        "page_tokens": planned.page_tokens,
        "memory_bytes": capacity,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments that `rows` gives."""
    parser = argparse.ArgumentParser(description="Internal: use `da-jax bench aot --model`.")
    parser.add_argument("model")
    parser.add_argument("target")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--kv-dtype", required=True)
    given = parser.parse_args(arguments)
    plan = Plan(given.model, given.batch, given.context, given.int8, given.devices, given.kv_dtype)
    child(plan, given.target)


if __name__ == "__main__":
    main()
