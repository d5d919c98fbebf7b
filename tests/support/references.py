"""What transformers (torch, eager, float32) computes on the tiny checkpoints.

A sample of it is committed in `tests/data/references.npz`. Where torch is installed all of it is
computed afresh, which also checks the committed sample. `python tests/support/references.py`
rewrites the file.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":  # run as a script: make `support` importable, as pytest does
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cases import CASES, MODELS, SAME_AS, VOCAB, has_delta, layer_types, text_config
from support.weights import tensors, write_folder

__all__ = [
    "CASES", "HAS_TORCH", "HIDDEN", "LENGTH", "MASK_FROM", "MODELS", "STRIDE", "VOCAB",
    "expected", "layer_errors", "tensors", "token_ids", "tolerance", "torch_logits",
    "visible_mask", "write_folder",
]  # fmt: skip
HAS_TORCH = importlib.util.find_spec("torch") is not None
STORED = Path(__file__).parents[1] / "data" / "references.npz"
LENGTH, STRIDE = 80, 8  # of logits every 8th position and every 8th column is committed
LAYER_POSITIONS = np.array([7, 39, 66, 79])  # of layer outputs these, in the first row
MASK_FROM, HIDDEN = 60, (10, 50)  # queries from position 60 on cannot see keys 10 .. 49


class Expected(NamedTuple):
    """Logits of transformers: `logits` is float32 [2, len(positions), len(columns)]."""

    positions: np.ndarray
    columns: np.ndarray
    logits: np.ndarray

    def error(self, logits: np.ndarray) -> float:
        """Largest absolute difference to logits [2, LENGTH, VOCAB]."""
        ours = logits[:, self.positions][:, :, self.columns]
        return float(np.abs(ours - self.logits).max())


def token_ids() -> np.ndarray:
    """int64 [2, LENGTH] random tokens."""
    return np.random.default_rng(0).integers(3, 490, size=(2, LENGTH))


def visible_mask(length: int = LENGTH) -> np.ndarray:
    """bool [length, length]: causal, and late queries see no key of the hidden range."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    return (j <= i) & ~((i >= MASK_FROM) & (j >= HIDDEN[0]) & (j < HIDDEN[1]))


def tolerance(case: str) -> float:
    """The absolute error of logits that a case is allowed."""
    return 1e-3 if has_delta(case) else 1e-4


def expected(case: str, folder: Path, *, masked: bool) -> Expected:
    """The logits of a case; with torch, of every position and column."""
    stored = _stored()[f"{SAME_AS.get(case, case)}.{'masked' if masked else 'plain'}"]
    some = np.arange(0, LENGTH, STRIDE), np.arange(0, VOCAB, STRIDE)
    if not HAS_TORCH:
        return Expected(*some, stored)
    logits = _computed(case, folder)["masked" if masked else "plain"]
    stale = Expected(*some, stored).error(logits)
    assert stale < 2 * tolerance(case), f"{STORED} is stale for {case}: {stale}; write it anew"
    return Expected(np.arange(LENGTH), np.arange(VOCAB), logits)


def layer_errors(case: str, folder: Path, layers: list[np.ndarray]) -> np.ndarray:
    """float [layers]: error of every layer's output, relative to its largest number.

    Args:
      case: name of the case.
      folder: its checkpoint.
      layers: [2, LENGTH, E] after each layer, of the plain forward pass.
    """
    ours, positions = np.stack([layer[0] for layer in layers]), LAYER_POSITIONS
    theirs = _stored()[f"{SAME_AS.get(case, case)}.layers"]
    if HAS_TORCH:
        positions, theirs = np.arange(LENGTH), _computed(case, folder)["layers"]
    difference = np.abs(ours[:, positions] - theirs).max((1, 2))
    return difference / np.abs(theirs).max((1, 2))


def torch_model(folder: Path, kind: type | None = None):
    """The checkpoint in transformers; no tensor of the text model is left over or missing.

    Args:
      folder: the checkpoint.
      kind: class of the model; by default the one that transformers chooses for text.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = (kind or transformers.AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    towers = ("vision_tower", "visual", "multi_modal_projector")
    lacking = {name for name in info["missing_keys"] if not any(t in name for t in towers)}
    faults = lacking | set(info["unexpected_keys"]) | set(info["mismatched_keys"])
    assert not faults, f"transformers does not take {sorted(faults)} of {folder}"
    return model.eval()


def torch_save(folder: Path, saved: Path) -> None:
    """Has transformers save the checkpoint as it saves a model that it did not load.

    What it loaded it would save as it found it.
    """
    import transformers

    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    loaded = torch_model(folder, kind)
    model = kind(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(saved)


def torch_logits(folder: Path, mask: np.ndarray | None = None) -> np.ndarray:
    """float32 [2, LENGTH, V] logits of transformers.

    Args:
      folder: a checkpoint.
      mask: bool [LENGTH, LENGTH], which keys a query sees in layers of full attention; by default
        all up to itself.
    """
    config = json.loads((folder / "config.json").read_text())
    return _forward(torch_model(folder), config, mask)


def _forward(model, config: dict, mask: np.ndarray | None) -> np.ndarray:
    import torch

    extra = {} if mask is None else {"attention_mask": _attention_mask(config, mask)}
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(token_ids()), use_cache=False, **extra)
    return out.logits.numpy()


def _attention_mask(config: dict, full: np.ndarray):
    """The mask as the model takes it: one for each kind of layer where there are kinds."""
    import torch

    def additive(mask: np.ndarray):
        mask = torch.where(torch.from_numpy(mask), 0.0, torch.finfo(torch.float32).min)
        return mask[None, None].expand(2, 1, *full.shape)

    if text_config(config)["model_type"] in ("llama", "qwen3_moe"):
        return additive(full)
    kinds = set(layer_types(config))
    out = {"full_attention": additive(full)}
    if "sliding_attention" in kinds:
        i, j = np.arange(len(full))[:, None], np.arange(len(full))[None]
        window = text_config(config)["sliding_window"]
        out["sliding_attention"] = additive((j <= i) & (j > i - window))
    if "linear_attention" in kinds:
        out["linear_attention"] = None
    return out


def torch_outputs(folder: Path) -> dict[str, np.ndarray]:
    """Logits `plain` and `masked` [2, LENGTH, V], and `layers` [layers, LENGTH, E] of row 0."""
    config, model = json.loads((folder / "config.json").read_text()), torch_model(folder)
    layers: list[np.ndarray] = []

    def record(module, inputs, output) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        layers.append(hidden[0].numpy().copy())

    inner = getattr(model.model, "language_model", model.model)
    hooks = [layer.register_forward_hook(record) for layer in inner.layers]
    plain = _forward(model, config, None)
    for hook in hooks:
        hook.remove()
    masked = _forward(model, config, visible_mask())
    return {"plain": plain, "masked": masked, "layers": np.stack(layers)}


_CACHE: dict[str, dict[str, np.ndarray]] = {}


def _computed(case: str, folder: Path) -> dict[str, np.ndarray]:
    """The outputs of a case, once a session: its folder is always the same."""
    if case not in _CACHE:
        _CACHE[case] = torch_outputs(folder)
    return _CACHE[case]


@functools.cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as data:
        return dict(data)


def main() -> None:
    """Rewrites the committed sample."""
    import tempfile

    out = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in MODELS:
            computed = torch_outputs(write_folder(case, Path(temporary) / case))
            for kind in ("plain", "masked"):
                out[f"{case}.{kind}"] = computed[kind][:, ::STRIDE, ::STRIDE]
            out[f"{case}.layers"] = computed["layers"][:, LAYER_POSITIONS]
            sizes = {kind: float(np.abs(value).max()) for kind, value in computed.items()}
            print(case, f"{len(computed['layers'])} layers, largest numbers", sizes)
    np.savez_compressed(STORED, **out)
    print(f"{STORED}: {STORED.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
