"""The second training step: from the checkpoint of the first to one that also does small tasks.

Run as ``python -m da_jax.checkpoints.tiny.second --out DIR``. Everything follows from the first
checkpoint, the seed and the plan. State is kept in ``--work``, and a run that was stopped goes on
from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.checkpoints import convert, hub, orbax, parameters
from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny import scenes, tasks
from da_jax.checkpoints.tiny.batches import Shape, make_batch
from da_jax.checkpoints.tiny.export import export
from da_jax.checkpoints.tiny.model import Config, Params
from da_jax.checkpoints.tiny.train import (
    Stage,
    exact_by_kind,
    make_optimizer,
    make_step,
    report_step,
)

MIX = {
    **{"find": 0.22, "read": 0.07, "first": 0.15, "second": 0.15},
    **{"read_first": 0.03, "read_second": 0.03, "missing": 0.05},
    **{"one": 0.08, "two": 0.08, "three": 0.1, "absent": 0.05, "spell": 0.07},
}
TOPICS = {
    **dict.fromkeys(scenes.TOPICS, 0.07),
    **{"story": 0.15, "repeats": 0.15, "chains": 0.15, "mixed": 0.25, "needle": 0.03},
}


LAST_MIX = MIX | {
    **{"first": 0.25, "second": 0.25, "read_first": 0.06, "read_second": 0.06, "find": 0.14},
    **{"absent": 0.1, "missing": 0.1, "two": 0.1, "one": 0.2, "spell": 0.1},
}
LAST_TOPICS = TOPICS | {"repeats": 0.4, "mixed": 0.35}


def shape(
    chunks: tuple[int, int], context: int, contexts: int, rows: int, last: bool = False
) -> Shape:
    """Batches of all topics, about a third of them in the plain prompt.

    At last with more of what is learnt late: ordinals, above all with everything visible, and in
    the plain prompt also keys that are not there. Then a focus may be misled, too.
    """
    drawn = Shape(chunks, context, contexts, rows, row=76, mix=MIX, topics=TOPICS, plain=0.3)
    if not last:
        return drawn
    return dataclasses.replace(
        drawn, mix=LAST_MIX, topics=LAST_TOPICS, plain=0.35, masked=0.65, misled=0.4
    )


def plan() -> tuple[Stage, ...]:
    """Few chunks first, as in the first step."""
    sizes = ((8, 26), 512, 4, 10), ((20, 54), 1024, 2, 14), ((40, 106), 2048, 1, 18)
    short, middle, long = (shape(*size) for size in sizes)
    short_last, middle_last, long_last = (shape(*size, last=True) for size in sizes)
    return (
        Stage(500, (shape((3, 8), 192, 8, 6),), (0.6, 0.6)),
        Stage(500, (short,), (0.6, 0.5)),
        Stage(800, (short, middle, short, long), (0.5, 0.02), probe=0.2),
        Stage(440, (short_last, middle_last, short_last, long_last), (0.5, 0.0), probe=0.2),
    )


_NAMES = {
    **{"input_norm": "input_norm.scale", "post_norm": "post_norm.scale"},
    **{f"{name}_norm": f"attention.{name}_norm.scale" for name in "qk"},
    **{name: f"attention.{name}.kernel" for name in "qkvo"},
    **{name: f"mlp.{name}.kernel" for name in ("gate", "up", "down")},
}


def first_params(seed: int, folder: Path = hub.SHIPPED["tiny"]) -> Params:
    """Parameters of the first checkpoint, as ``model.forward`` takes them.

    Entries that were reserved have drifted together, as pure negatives do. So the new words are
    drawn anew, with the mean and the spread of the words that are alike: keys, or all others.
    """
    model = convert.load(folder, dtype=jnp.dtype(jnp.float32))
    found = {k: v.get_value() for k, v in parameters.flat_parameters(model).items()}
    embed = np.array(found["embedding"])
    rng = np.random.default_rng((seed, 0))
    keys = [lang.IDS[f" {key}="] for key in lang.KEYS]
    others = [lang.IDS[f" {word}"] for word in (*lang.DETS, *lang.ADJS, *lang.NOUNS, *lang.VERBS)]
    for word in lang.LATER:
        like = embed[keys if word.endswith("=") else others]
        embed[lang.IDS[word]] = rng.normal(like.mean(0), like.std(0))
    count = len({name.split(".")[1] for name in found if name.startswith("layers.")})
    layers = [
        {name: found[f"layers.{index}.{theirs}"] for name, theirs in _NAMES.items()}
        for index in range(count)
    ]
    return {"embed": jnp.asarray(embed), "norm": found["norm.scale"], "layers": layers}


def report_held_out(params: Params, config: Config, shape: Shape) -> None:
    """Prints how many held-out responses are exact in each arm."""
    arms = {
        "da": {"masked": 1.0},
        "da, misled": {"masked": 1.0, "misled": 1.0},
        "unmasked": {},
        "unmasked, misled": {"misled": 1.0},
        "vanilla": {"plain": 1.0},
    }
    every = {"masked": 0.0, "misled": 0.0, "plain": 0.0, "gap": 0, "ids": 0.0, "held_out": True}
    for arm, changes in arms.items():
        sizes = {"contexts": max(8, shape.contexts), "rows": 12, "mix": dict.fromkeys(MIX, 1.0)}
        held_out = dataclasses.replace(shape, **sizes | every | changes)
        exact = exact_by_kind(params, config, held_out, np.random.default_rng(999))
        print(json.dumps({"chunks": shape.chunks, "arm": arm, "exact": exact}), flush=True)


SAVE_EVERY = 50


def train(seed: int, work: Path, stages: tuple[Stage, ...]) -> Params:
    """Runs the plan, from where a run in the folder ``work`` stopped.

    Args:
        seed: decides new embeddings and all data.
        work: folder that keeps the state.
        stages: the plan.

    Raises:
        ValueError: the folder keeps the state of another seed or plan.
    """
    work.mkdir(parents=True, exist_ok=True)
    config = Config(vocab_size=len(lang.VOCABULARY))
    params = first_params(seed)
    optimizer = make_optimizer(params, stages)
    state = optimizer.init(params)
    done = (1, 0)
    kept = work / "state.pkl"
    if kept.exists():
        its_seed, its_stages, done, params, state = pickle.loads(kept.read_bytes())
        if (its_seed, its_stages) != (seed, stages):
            raise ValueError(f"{kept} is of another seed or plan; give another folder with --work")
    step = make_step(config, optimizer)
    began = time.time()
    for index, stage in enumerate(stages, 1):
        for number in range(1, stage.steps + 1):
            if (index, number) <= done:
                continue
            rng = np.random.default_rng((seed, index, number))
            batch, _ = make_batch(rng, stage.shapes[number % len(stage.shapes)])
            params, state, loss, (nll, right) = step(params, state, batch, stage.probe)
            if number % 25 == 0:
                report_step(index, number, time.time() - began, loss, nll, right)
            last = number == stage.steps
            if last or number % SAVE_EVERY == 0:
                at = (seed, stages, (index, number), *jax.tree.map(np.asarray, (params, state)))
                unfinished = work / "state.pkl.new"
                unfinished.write_bytes(pickle.dumps(at))
                unfinished.replace(kept)
            if last or number % (4 * SAVE_EVERY) == 0:
                for shape in {shape.chunks: shape for shape in stage.shapes}.values():
                    report_held_out(params, config, shape)
    return params


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("tiny-training-2"))
    parser.add_argument("--out", type=Path, default=hub.SHIPPED["tiny-2"])
    arguments = parser.parse_args()
    if orbax.is_orbax(arguments.out):
        parser.error(f"{arguments.out} holds a checkpoint already; move it away or give --out")
    params = train(arguments.seed, arguments.work, plan())
    with tempfile.TemporaryDirectory() as folder:
        config = Config(vocab_size=len(lang.VOCABULARY))
        export(params, config, Path(folder), tasks.STYLE, lang.VOCABULARY)
        convert.convert(Path(folder), arguments.out, dtype=jnp.bfloat16)


if __name__ == "__main__":
    main()
