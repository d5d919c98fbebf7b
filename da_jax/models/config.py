"""Model configurations, read from a Hugging Face `config.json`.

A configuration that this library would compute differently from the checkpoint's authors is
refused: every field that changes the arithmetic is either understood or an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """The configuration asks for something that this library does not compute."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: `default`, `linear`, `yarn` or `llama3`.
      factor: context extension factor (all kinds but `default`).
      original_max_positions: context length before the extension (`yarn`, `llama3`).
      attention_factor: factor on cos and sin; None derives it from `factor` (`yarn`).
      beta_fast, beta_slow: rotations between which `yarn` blends.
      mscale, mscale_all_dim: alternative derivation of `attention_factor` (`yarn`).
      truncate: whether `yarn` rounds its correction range to whole dimensions.
      low_freq_factor, high_freq_factor: band between which `llama3` blends.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads both spellings: `rope_parameters`, and `rope_theta` with `rope_scaling`."""
        rope: dict[str, Any] = dict(
            config.get("rope_parameters") or config.get("rope_scaling") or {}
        )
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        rope.pop("type", None)
        theta = rope.pop("rope_theta", config.get("rope_theta", cls.theta))
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("partial_rotary_factor other than 1 is not supported by this model")
        names: dict[str, str] = {"original_max_position_embeddings": "original_max_positions"}
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {
            names.get(key, key): value for key, value in rope.items() if value is not None
        }
        if unknown := sorted(values.keys() - known):
            raise ConfigError(
                f"unknown RoPE parameters {unknown} (rope_type {kind!r}): this library would "
                "ignore them and compute other positions than the checkpoint's authors"
            )
        if kind not in ("default", "linear", "yarn", "llama3"):
            raise ConfigError(
                f"rope_type {kind!r} is not supported; known: default, linear, yarn, llama3"
            )
        if kind in ("yarn", "llama3"):
            values.setdefault("original_max_positions", config.get("max_position_embeddings"))
        if kind != "default" and "factor" not in values:
            raise ConfigError(f"rope_type {kind!r} needs a factor; the configuration has none")
        return cls(theta=float(theta), kind=kind, **values)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: Qwen 3, or a Llama-type model (the same without q/k norm).

    Attributes:
      model_type: the name in `config.json`.
      vocab_size: rows of the embedding, padding included.
      hidden_size, intermediate_size: widths of the residual stream and of the MLP.
      num_layers, num_heads, num_kv_heads, head_dim: shape of the attention.
      max_positions: longest sequence, in tokens, that the checkpoint declares.
      rms_eps: epsilon of every RMS norm.
      rope: rotary embedding.
      tie_embeddings: whether the output projection is the embedding.
      qk_norm: whether queries and keys are normalised per head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the parsed `config.json` of a Qwen 3 or Llama-type checkpoint.

        Raises:
          ConfigError: for a model type or an option that is not computed here.
        """
        model_type = config.get("model_type")
        if model_type not in ("qwen3", "llama"):
            raise ConfigError(
                f"model_type {model_type!r} is not supported; known: qwen3, llama "
                "(Llama-type without biases, such as SmolLM2)"
            )
        for option, expected in _FIXED_OPTIONS.items():
            if config.get(option, expected) not in (expected, None):
                raise ConfigError(
                    f"{option}={config[option]!r} is not supported for {model_type} "
                    f"(only {expected!r})"
                )
        other_layers: set[str] = set(config.get("layer_types") or ()) - {"full_attention"}
        if other_layers:
            raise ConfigError(f"layer_types {sorted(other_layers)} are not supported")
        missing = [key for key in _REQUIRED if key not in config]
        if missing:
            raise ConfigError(f"config.json lacks {missing}; is it the file of a {model_type}?")
        heads = config["num_attention_heads"]
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_positions=config["max_position_embeddings"],
            rms_eps=config["rms_norm_eps"],
            rope=RopeConfig.from_hf(config),
            tie_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=model_type == "qwen3",
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `folder/config.json`."""
        return cls.from_hf(read_json(folder / "config.json"))


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_FIXED_OPTIONS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing or broken file is a ConfigError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a model folder?") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
