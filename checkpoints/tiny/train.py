"""Trains the tiny checkpoint: from a seed to the folder that ships, on one CPU core.

Run as ``python -m da_jax.checkpoints.tiny.train``. Everything follows from the seed and the plan.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from da_jax.checkpoints import convert, orbax
from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.batches import ROLES, Batch, Shape, make_batch
from da_jax.checkpoints.tiny.export import export
from da_jax.checkpoints.tiny.model import Config, Params, forward, init

EARLY = {"one": 0.5, "two": 0.2, "three": 0.1, "absent": 0.06, "spell": 0.14}
LATE = {"one": 0.35, "two": 0.2, "three": 0.15, "absent": 0.1, "spell": 0.2}
LAST = {"one": 0.25, "two": 0.2, "three": 0.25, "absent": 0.12, "spell": 0.18}


@dataclass(frozen=True)
class Stage:
    """A part of the plan.

    Attributes:
        steps: optimizer steps.
        shapes: the batches, in turn.
        rate: factor of the learning rate at the start and at the end of the stage.
        probe: weight of the deep supervision.
    """

    steps: int
    shapes: tuple[Shape, ...]
    rate: tuple[float, float] = (1.0, 1.0)
    probe: float = 0.3


def plan() -> tuple[Stage, ...]:
    """Few chunks first, then ever more: finding a chunk's number is what takes long to appear."""
    shape = lambda chunks, context, contexts, rows, mix, copy=0.0: Shape(
        chunks, context, contexts, rows, mix=mix, copy=copy, newlines=0.1
    )
    short = shape((8, 26), 512, 4, 10, LAST)
    return (
        Stage(1100, (shape((2, 4), 120, 8, 4, EARLY, 0.3),), probe=0.5),
        Stage(600, (shape((3, 8), 192, 8, 4, EARLY, 0.1),)),
        Stage(350, (shape((3, 10), 256, 8, 5, LATE, 0.05),)),
        Stage(300, (shape((8, 26), 512, 4, 10, LATE, 0.03),)),
        Stage(120, (shape((20, 54), 1024, 2, 14, LATE),), (0.7, 0.7), probe=0.2),
        Stage(
            240,
            (
                short,
                shape((20, 54), 1024, 2, 14, LAST),
                short,
                shape((40, 106), 2048, 1, 18, LAST),
            ),
            (0.7, 0.05),
            probe=0.2,
        ),
    )


PEAK = 1.5e-3
"""AdamW's learning rate for embedding and norms; Muon's for the matrices is five times as much."""


def make_optimizer(params: Params, stages: tuple[Stage, ...]) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    ends = np.cumsum([stage.steps for stage in stages])
    pieces = [optax.linear_schedule(*stage.rate, stage.steps) for stage in stages]
    factor = optax.join_schedules(pieces, [int(end) for end in ends[:-1]])
    rate = lambda step: PEAK * factor(step) * jnp.minimum(1.0, (step + 1) / 30)
    labels = jax.tree.map(lambda x: "muon" if x.ndim == 2 else "adam", params)
    labels["embed"] = "adam"
    rules = {
        "muon": optax.contrib.muon(lambda step: 5 * rate(step)),
        "adam": optax.adamw(rate, b2=0.98, weight_decay=0.01),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(rules, labels))


def loss_fn(params: Params, config: Config, batch: Batch, probe: float):
    """Mean over response tokens, and again over each kind of token that has to be looked up.

    The deep supervision ("probe") asks every token of a chunk for the chunk's number after the
    second layer; it adds no weights.

    Returns:
        The loss, and per kind of token the negative log-likelihood and the share of right ones.
    """
    logits, inner = forward(params, config, batch)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.target[..., None], -1)[..., 0]
    right = logits.argmax(-1) == batch.target
    mean = lambda values, where: (values * where).sum() / jnp.maximum(where.sum(), 1)
    where = {name: batch.role == i for i, name in enumerate(ROLES) if name}
    where["all"] = (batch.role >= 0) & ~where["copy"]
    parts = {name: mean(nll, mask) for name, mask in where.items()}
    number = jnp.maximum(batch.chunk_id, 0)[..., None]
    missed = -jnp.take_along_axis(inner, number, -1)[..., 0]
    parts["probe"] = mean(missed, batch.chunk_id >= 0)
    weights = {"all": 1.0, "id": 1.0, "value": 0.3, "letter": 0.3, "copy": 1.0, "probe": probe}
    loss = sum(weights[name] * parts[name] for name in parts)
    return loss, (parts, {name: mean(right, mask) for name, mask in where.items()})


def exact_by_kind(
    params: Params, config: Config, shape: Shape, rng: np.random.Generator
) -> dict[str, float]:
    """Share of responses in a batch that greedy decoding gets right to the last token.

    Greedy decoding repeats a response exactly if and only if every token is the most likely one
    after the right ones before it, so one forward pass decides it.
    """
    batch, placed = make_batch(rng, shape)
    logits, _ = jax.jit(forward, static_argnums=1)(params, config, batch)
    wrong = (np.asarray(logits.argmax(-1)) != batch.target) & (batch.role >= 0)
    hits: dict[str, list[bool]] = {}
    for p in placed:
        exact = not wrong[p.context, p.row, p.start : p.end].any()
        hits.setdefault(p.question.kind, []).append(exact)
        hits.setdefault("all", []).append(exact)
    return {kind: round(float(np.mean(hits[kind])), 4) for kind in sorted(hits)}


def report_held_out(params: Params, config: Config, shape: Shape) -> None:
    """Prints how many held-out responses are exact with the masks on and off."""
    for masked in (1.0, 0.0):
        held_out = Shape(
            shape.chunks,
            shape.context,
            contexts=max(2, shape.contexts),
            rows=16,
            masked=masked,
            gap=0,
            ids=0.0,
            held_out=True,
        )
        exact = exact_by_kind(params, config, held_out, np.random.default_rng(999))
        line = {"chunks": shape.chunks, "masked": masked == 1.0, "exact": exact}
        print(json.dumps(line), flush=True)


def make_step(config: Config, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """(params, state, batch, probe) to (params, state, loss, (nll, right)), compiled."""
    grad = jax.value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def step(params, state, batch, probe):
        (loss, parts), gradient = grad(params, config, batch, probe)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss, parts

    return step


def report_step(
    stage: int, number: int, seconds: float, loss: Any, nll: dict[str, Any], right: dict[str, Any]
) -> None:
    """Prints what a step measured, as a line of JSON."""
    show = lambda values: {k: round(float(v), 3) for k, v in values.items()}
    line = {
        **{"stage": stage, "step": number, "seconds": round(seconds)},
        **{"loss": round(float(loss), 3), "nll": show(nll), "right": show(right)},
    }
    print(json.dumps(line), flush=True)


def train(seed: int, work: Path, stages: tuple[Stage, ...], done: int = 0) -> Params:
    """Runs the plan.

    Args:
        seed: decides the initial parameters and all data.
        work: folder that keeps the state after each stage.
        stages: the plan.
        done: go on after this stage of an earlier run in the same folder.
    """
    work.mkdir(parents=True, exist_ok=True)
    config = Config(vocab_size=len(lang.VOCABULARY))
    params = init(jax.random.key(seed), config)
    optimizer = make_optimizer(params, stages)
    state = optimizer.init(params)
    if done:
        params, state = pickle.loads((work / f"stage{done}.pkl").read_bytes())
    step = make_step(config, optimizer)
    began = time.time()
    for index, stage in enumerate(stages[done:], done + 1):
        rng = np.random.default_rng((seed, index))
        for number in range(1, stage.steps + 1):
            batch, _ = make_batch(rng, stage.shapes[number % len(stage.shapes)])
            params, state, loss, (nll, right) = step(params, state, batch, stage.probe)
            if number % 25 == 0:
                report_step(index, number, time.time() - began, loss, nll, right)
        kept = jax.tree.map(np.asarray, (params, state))
        (work / f"stage{index}.pkl").write_bytes(pickle.dumps(kept))
        for shape in {shape.chunks: shape for shape in stage.shapes}.values():
            report_held_out(params, config, shape)
    return params


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("tiny-training"))
    parser.add_argument("--done", type=int, default=0, help="go on after this stage")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    arguments = parser.parse_args()
    if orbax.is_orbax(arguments.out):
        parser.error(f"{arguments.out} holds a checkpoint already; move it away or give --out")
    params = train(arguments.seed, arguments.work, plan(), arguments.done)
    with tempfile.TemporaryDirectory() as folder:
        export(params, Config(vocab_size=len(lang.VOCABULARY)), Path(folder))
        convert.convert(Path(folder), arguments.out, dtype=jnp.bfloat16)


if __name__ == "__main__":
    main()
