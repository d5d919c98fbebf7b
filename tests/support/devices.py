"""Models on several simulated devices; run as a child process, for devices are counted at start.

`python -m support.devices JOB ...` with `XLA_FLAGS=--xla_force_host_platform_device_count` prints a
line of JSON for each job: `CASE:DEVICES` for `measure`, `engine:CASE:DEVICES` for `answers`,
`replicas:CASE:DEVICES` for those of two engines, `host:CASE:DEVICES` for those of an engine with
per-layer embeddings in host memory, `verify:CASE:DEVICES` for the checks of `da_jax.evals.verify`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from support import cases, references, tiny

TESTS = Path(__file__).parents[1]
HOLE = ((0, references.HIDDEN[0]), (references.HIDDEN[1], references.LENGTH))
ROWS, SLOTS, PAGE = 2, np.array([2, 0], np.int32), 16
OPTIONS: dict[str, dict[str, Any]] = {
    "engine": {}, "replicas": {"data_parallel": 2}, "host": {"per_layer_embeddings": "host"},
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def start(*arguments: str, devices: int = 8, module: str = "support.devices") -> subprocess.Popen:
    """Starts a module of the tests in a child with so many devices; its stdout is a pipe."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS),
        "PYTHONWARNINGS": "error",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=TESTS,
    )  # fmt: skip


def results(child: subprocess.Popen, timeout: float = 900) -> list[Any]:
    """What a child printed, a JSON document a line; fails with its errors if it failed."""
    out, errors = child.communicate(timeout=timeout)
    assert child.returncode == 0, errors[-4000:]
    return documents(out)


def documents(out: str) -> list[Any]:
    """The JSON objects in what a child printed, one a line."""
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def collectives(compiled: str) -> Counter:
    """Operations between devices in the text of a compiled program, by name."""
    found = Counter()
    for name in COLLECTIVES:
        found[name] = len(re.findall(rf"= .* {name}(?:-start)?\(", compiled))
    return +found


def measure(case: str, devices: int, folder: Path) -> dict[str, Any]:
    """Prefill in ragged chunks, then single steps under another mask, on several devices.

    Returns:
      `error`, the largest difference to the logits of transformers; `weights` and `caches`, bytes
      on each device; `planned`, those of the caches in the plan; `whole`, the parameters of more
      than 1024 numbers that every device has whole; `sums` and `gathers`, operations between
      devices in a step as it was traced; `compiled`, all of them that the compiler left;
      `attention`, those of writing to a layer's pages and attending to them.
    """
    import jax
    import jax.numpy as jnp

    from da_jax.cache import pools, states
    from da_jax.checkpoints import hf
    from da_jax.engine.rows import Rows, Shapes
    from da_jax.engine.runner import Runner, forward
    from da_jax.engine.sampling import SamplingRows
    from da_jax.kernels.paged_attention import compact, stack
    from da_jax.models import hf_config, parallel

    config = hf_config.read(folder)
    mesh = parallel.mesh(devices)
    place = lambda path, shape: jax.NamedSharding(mesh, parallel.spec(config, path, devices))
    model = hf.load(folder, dtype=jnp.dtype(jnp.float32), shardings=place)
    blocks = -(-references.LENGTH // PAGE)
    plan = pools.plan(
        config, page_size=PAGE, max_tokens=references.LENGTH, sequences=4, longest_step=24,
        dtype=jnp.float32, budget_bytes=2**40, devices=devices,
    )  # fmt: skip
    nothing = np.zeros(config.vocab_size)
    forms = Shapes((1,), (1,), 1, blocks + 4, blocks, 1)
    runner = Runner(model, forms, plan, costs=nothing, opens=nothing)

    def program(weights, caches, inputs):
        rows, position = inputs["rows"], inputs["position"]
        model = runner.model(weights)
        held = states.take(caches, rows.slot, position)
        hidden, held, _ = forward(
            model, plan, held, inputs["tokens"], position, inputs["q_lens"], rows, impl=None
        )
        return states.put(caches, held, rows.slot), model.logits(hidden)

    run = jax.jit(
        runner.on_devices(program), compiler_options={"xla_backend_optimization_level": 0}
    )
    used = lambda tree: per_device(jax.tree.leaves(tree), mesh)
    out = {"weights": used(runner.weights), "caches": used(runner.caches), "planned": plan.bytes}
    large = [(path, leaf.get_value()) for path, leaf in hf.flat_parameters(model).items()]
    out["whole"] = sorted(
        {
            re.sub(r"^layers\.\d+\.", "", path)
            for path, array in large
            if array.size > 1024 and array.addressable_shards[0].data.shape == array.shape
        }
    )
    ids, at = references.token_ids(), np.zeros(ROWS, np.int32)
    tables = np.random.default_rng(1).permutation(plan.num_pages).astype(np.int32)
    tables = tables[: ROWS * blocks].reshape(ROWS, -1)
    logits = np.full((ROWS, references.LENGTH, config.vocab_size), np.nan, np.float32)
    caches = jax.tree.map(lambda x: x + jnp.nan, runner.caches)
    for sizes in ((24, 5), (0, 24), (12, 7), (24, 24), *[(1, 1)] * 20):
        width, everything = (1, HOLE) if sizes == (1, 1) else (24, ((0, references.LENGTH),))
        tokens = np.full((ROWS, width), 499, np.int32)
        for row, size in enumerate(sizes):
            tokens[row, :size] = ids[row, at[row] : at[row] + size]
        mask = stack([compact(table, everything, PAGE, blocks + 4) for table in tables])
        rows = Rows(tables, mask, SLOTS, SamplingRows(*[np.zeros(0)] * 6))
        inputs = dict(tokens=tokens, position=at, q_lens=np.asarray(sizes, np.int32), rows=rows)
        if at[0] == references.LENGTH - 1:
            lowered = run.lower(runner.weights, caches, inputs)
            text = lowered.as_text()
            out |= {"sums": text.count("stablehlo.all_reduce"), "compiled": {}}
            out["gathers"] = text.count("stablehlo.all_gather")
            out["compiled"] = collectives(lowered.compile().as_text())
            only = _attention_only(runner, config, inputs, caches)
            out["attention"] = collectives(only.compile().as_text())
        caches, found = run(runner.weights, caches, inputs)
        for row, size in enumerate(sizes):
            logits[row, at[row] : at[row] + size] = found[row, :size]
        at = at + np.asarray(sizes, np.int32)
    assert at.tolist() == [references.LENGTH] * ROWS
    return out | {"logits": logits}


def _attention_only(runner, config, inputs, caches):
    """The first layer of full attention, from its projections on, as a lowered program."""
    import jax
    import jax.numpy as jnp

    from da_jax.cache.step import StepCache
    from da_jax.models import sharding

    layer, plan = config.layers_of("full")[0], runner.plan
    mixer = config.layers[layer].mixer

    def program(weights, caches, inputs):
        rows = inputs["rows"]
        step = StepCache(
            config, plan, caches, block_table=rows.block_table, mask=rows.mask, slot=rows.slot,
            position=inputs["position"], q_lens=inputs["q_lens"], width=1, impl=None,
        )  # fmt: skip
        out = step.attend(layer, inputs["q"], inputs["k"], inputs["k"])
        return step.caches, out

    heads = mixer.num_heads // sharding.attention_shards(mixer, plan.devices)
    keys = sharding.kv_heads(mixer, plan.devices)
    if mixer.num_kv_heads % plan.devices:  # each device takes its own of them
        keys = mixer.num_kv_heads
    inputs = {name: x for name, x in inputs.items() if name != "tokens"}
    inputs |= {"q": jnp.ones((ROWS, 1, heads, mixer.head_dim))}
    inputs |= {"k": jnp.ones((ROWS, 1, keys, mixer.head_dim))}
    return jax.jit(runner.on_devices(program)).lower(runner.weights, caches, inputs)


def engine(folder: Path, devices: int, **options: Any):
    """An engine on several devices, or several of them."""
    from da_jax import LLM, EngineConfig, Style

    settings: dict[str, Any] = dict(
        page_size=16, max_model_len=256, max_num_seqs=2, prefill_chunk=48, burst=4,
    )  # fmt: skip
    config = EngineConfig(tensor_parallel=devices, **settings | options)
    return LLM.from_pretrained(folder, style=Style(**tiny.STYLE), config=config)


def answers(llm) -> dict[str, Any]:
    """What an engine answers, greedy and sampled, while declarations change what is visible.

    Returns:
      `tokens` of each response, `logprobs` of each token, `modes` of each step, and `compiled`,
      programs after warm-up. `replicas` has the devices of each engine, and its prompts' chunks.
    """
    from da_jax import Done

    chunks = [f"part {letter}: " + letter * 12 for letter in "abcd"]
    scripts = ("<local>abc", 'x<focus magic_chunks="2,3">yy</focus>z', "a")
    requests = [
        llm.request(
            chunks, "q" * 30, forced=script, max_tokens=60, ignore_eos=True, temperature=i // 2,
            seed=i, logprobs=2,
        )
        for i, script in enumerate(scripts)
    ]  # fmt: skip
    done = [event for event in llm.loop.run(requests) if isinstance(event, Done)]
    responses = [event.response for event in sorted(done, key=lambda event: event.request_id)]
    return {
        "tokens": [response.token_ids for response in responses],
        "logprobs": [[entry.logprob for entry in response.logprobs] for response in responses],
        "compiled": llm.compilations_after_warmup,
        "replicas": [
            ([device.id for device in engine.runner.mesh.devices.flat], next(engine._turns))
            for engine in getattr(llm.loop, "engines", [llm.engine])
        ],
        "modes": [[step.mode.name for step in response.steps] for response in responses],
    }


def per_device(arrays: list, mesh) -> list[int]:
    """Bytes of arrays on each device."""
    found = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return [found[device] for device in mesh.devices.flat]


def main(jobs: list[str]) -> None:
    """Prints a line for each job `CASE:DEVICES`."""

    from da_jax.evals import verify

    @functools.cache
    def folder(case: str) -> Path:
        return tiny.write_folder(Path(tempfile.mkdtemp()) / case, case)

    alone: dict[str, np.ndarray] = {}
    for job in jobs:
        *whole, case, devices = job.split(":")
        if whole == ["verify"]:
            checks = verify.verify(engine(folder(case), int(devices), max_model_len=512), "float32")
            oracle = next(check.figures for check in checks if check.name == "oracle")
            print(json.dumps({"failed": verify.failed(checks), "oracle": oracle}), flush=True)
            continue
        if whole:
            found = answers(engine(folder(case), int(devices), **OPTIONS[whole[0]]))
            print(json.dumps({"job": job} | found), flush=True)
            continue
        found = measure(case, int(devices), folder(case))
        logits = found.pop("logits")
        alone.setdefault(case, logits)
        found["changed"] = float(np.abs(logits - alone[case]).max())
        if case in references.MODELS:
            error = references.expected(case, folder(case), masked=True).error(logits)
            found["error"] = error
        print(json.dumps({"job": job} | found), flush=True)


# Heads that eight devices can share, in families whose other cases are too small for it.
cases.CASES.setdefault(
    "wide_qwen3_5_moe",
    cases.CASES["qwen3_5_moe"]
    | {
        "num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "moe_intermediate_size": 64,
    },
)  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1:])
