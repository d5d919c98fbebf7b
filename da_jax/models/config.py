"""What a model is made of, layer by layer. `hf_config` reads it from a `config.json`.

The list of layers is the one source for the models, the caches, the checkpoints and the sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Family = Literal[
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"
]
Kind = Literal["full", "sliding", "recurrent"]


class ConfigError(ValueError):
    """The configuration asks for something that this library does not compute."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: `default`, `linear`, `yarn`, `llama3` or `proportional`.
      partial: share of the head that rotates. The first dimensions do, in pairs (j, j + R/2) of
        the R rotated ones; with `proportional` the pairs (j, j + D/2) of the whole head, the first
        share of them.
      factor: context extension factor (`linear`, `yarn`, `llama3`).
      original_max_positions: context length before the extension (`yarn`, `llama3`).
      attention_factor: factor on cos and sin; None derives it from `factor` (`yarn`).
      beta_fast, beta_slow: rotations between which `yarn` blends.
      mscale, mscale_all_dim: alternative derivation of `attention_factor` (`yarn`).
      truncate: whether `yarn` rounds its correction range to whole dimensions.
      low_freq_factor, high_freq_factor: band between which `llama3` blends.
    """

    theta: float = 10_000.0
    kind: str = "default"
    partial: float = 1.0
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


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention, full or over a sliding window.

    Attributes:
      num_heads, num_kv_heads, head_dim: its shape.
      rope: rotary embedding of queries and keys.
      scale: factor on the scores.
      window: positions that a query sees back, itself included; None for all.
      donor: the earlier layer whose keys and values it reads. It has none of its own then.
      k_eq_v: whether keys and values come from one projection.
      output_gate: whether the query projection also gives a gate on the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    window: int | None = None
    donor: int | None = None
    k_eq_v: bool = False
    output_gate: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"sliding_window is {self.window}; a window holds at least its token")

    @property
    def kind(self) -> Kind:
        """`full` or `sliding`."""
        return "full" if self.window is None else "sliding"


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet: linear attention with a state instead of keys and values.

    Attributes:
      key_heads, value_heads: heads; each key head serves value_heads / key_heads value heads.
      key_dim, value_dim: sizes of a head.
      conv_width: tokens that the causal convolution sees, the present one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_value_heads {self.value_heads} is no multiple of "
                f"linear_num_key_heads {self.key_heads}"
            )

    @property
    def kind(self) -> Kind:
        """Always `recurrent`."""
        return "recurrent"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
      count: experts in all.
      top_k: experts of a token.
      hidden: width of an expert.
      shared: width of the expert that every token has, 0 for none.
      normalize: whether the weights of the chosen ones are made to sum to 1.
    """

    count: int
    top_k: int
    hidden: int
    shared: int = 0
    normalize: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise ConfigError(f"{self.top_k} experts a token of {self.count}; choose 1 to all")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer.

    Attributes:
      mixer: how tokens meet earlier ones.
      mlp: width of the dense MLP, 0 for none.
      experts: the mixture of experts; Gemma 4 has both.
    """

    mixer: Attention | GatedDelta
    mlp: int
    experts: Experts | None = None


@dataclasses.dataclass(frozen=True)
class PerLayerInputs:
    """Gemma 4's per-layer embeddings.

    Attributes:
      size: numbers a token and layer.
      vocab_size: rows of the table.
    """

    size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    Attributes:
      family: which model computes it.
      vocab_size: rows of the embedding, padding included.
      hidden_size: width of the residual stream.
      layers: the decoder layers.
      max_positions: longest sequence, in tokens, that the checkpoint declares.
      rms_eps: epsilon of every RMS norm.
      tie_embeddings: whether the output projection is the embedding.
      softcap: bound of the final logits, None for no bound.
      per_layer_inputs: Gemma 4's per-layer embeddings, None for models without.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    max_positions: int
    rms_eps: float
    tie_embeddings: bool
    softcap: float | None = None
    per_layer_inputs: PerLayerInputs | None = None

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, GatedDelta) or mixer.donor is None:
                continue
            donor = self.layers[mixer.donor].mixer if mixer.donor < i else None
            same = isinstance(donor, Attention) and dataclasses.replace(donor, k_eq_v=False) == (
                dataclasses.replace(mixer, donor=None, k_eq_v=False)
            )
            if not same:
                raise ConfigError(
                    f"layer {i} reads the keys and values of layer {mixer.donor}, which has none "
                    "of the same shape"
                )

    def layers_of(self, kind: Kind) -> tuple[int, ...]:
        """The layers that own a cache of this kind; those with a donor own none."""
        return tuple(
            i
            for i, layer in enumerate(self.layers)
            if layer.mixer.kind == kind and getattr(layer.mixer, "donor", None) is None
        )
