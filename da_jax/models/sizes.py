"""What a model costs: parameters, bytes of memory, and bytes read by a decode step.

Arithmetic on a `ModelConfig` alone; nothing here imports JAX, so a plan takes milliseconds.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from da_jax.kernels import chips
from da_jax.models import dtypes, sharding
from da_jax.models.config import Attention, GatedDelta, Kind, Layer, ModelConfig
from da_jax.models.tensors import Tensor, tensors

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by dtype of the activations."""

_LOGITS = 4  # arrays of logits at once: sampling sorts them with their ids
_COMPILER = (
    128 << 20
)  # bytes of a program whatever the model: kernels' buffers, weights on their way
_DELTA_CHUNK = 64  # tokens that the delta rule takes at once
_LANES = 128  # a pool row holds key and value of a head of at most 64, or scales, in as many


def parameters(config: ModelConfig) -> int:
    """Numbers in the checkpoint's text model."""
    return sum(tensor.size for tensor in tensors(config))


def parameters_read(config: ModelConfig, batch: int = 1) -> float:
    """Parameters that a decode step of `batch` sequences reads.

    Rows gathered from an embedding do not count. Of a mixture of experts counts what the batch is
    expected to choose, if every sequence chooses evenly and on its own.
    """
    return sum(tensor.size * share for tensor, share in _shares(config, batch))


def distinct_experts(count: int, top_k: int, batch: int) -> float:
    """Experts that at least one of `batch` tokens is expected to choose."""
    return count * (1 - (1 - top_k / count) ** batch)


def weight_bytes(config: ModelConfig, *, itemsize: int, int8: bool, devices: int = 1) -> int:
    """Bytes of all parameters, with `itemsize` bytes a number, or int8 and its scales.

    Where several devices share the model, see `sharding`, what each of them has.
    """

    total = 0
    for tensor in tensors(config):
        parts = _parts(config, tensor.path, devices)
        if int8 and tensor.scales:
            total += tensor.size // parts
            total += 4 * tensor.scales // _parts(config, tensor.path + "_scale", devices)
        else:
            total += tensor.size * itemsize // parts
    return total


def per_layer_embedding_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of Gemma 4's table of per-layer embeddings, 0 for other models."""
    inputs = config.per_layer_inputs
    return inputs.vocab_size * inputs.size * len(config.layers) * itemsize if inputs else 0


def kv_bytes_per_token(
    config: ModelConfig, kind: Kind, *, itemsize: int, quantized: bool = False, read: bool = False
) -> int:
    """Bytes of keys and values of one token in the layers of a kind.

    Args:
      config: the model.
      kind: `full` or `sliding`.
      itemsize: bytes of a number.
      quantized: 8 bits a number instead, and a float32 scale for each key and value of a head.
      read: count every layer that reads them, so those of a donor more than once, instead of the
        layers that store them.
    """
    return sum(
        _kv_bytes(mixer, itemsize, quantized)
        for mixer in _attentions(config, kind)
        if read or mixer.donor is None
    )


def state_bytes_per_sequence(config: ModelConfig, *, itemsize: int) -> int:
    """Bytes of the recurrent states of one sequence.

    The memory of a layer is float32; of its convolution the last `conv_width - 1` inputs are kept,
    in numbers of `itemsize` bytes.
    """
    return sum(
        (mixer.conv_width - 1) * mixer.channels * itemsize
        + 4 * mixer.value_heads * mixer.key_dim * mixer.value_dim
        for layer in config.layers
        if isinstance(mixer := layer.mixer, GatedDelta)
    )


@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations of a decode step for one token; a multiplication and an addition are two.

    Attributes:
      weights: products with parameters.
      full: attention of full layers, for each position that is attended.
      sliding: attention of sliding layers.
    """

    weights: float
    full: int
    sliding: int


def operations(config: ModelConfig, *, context: int, devices: int = 1) -> Operations:
    """What one token at the end of `context` computes, on each of the devices that share it.

    The updates of recurrent states are left out: their bytes take longer.
    """
    weights = sum(
        2 * tensor.size * share / _parts(config, tensor.path, devices)
        for tensor, share in _shares(config, 1)
    )
    config = sharding.part(config, devices)
    return Operations(
        weights,
        sum(4 * m.num_heads * m.head_dim for m in _attentions(config, "full")),
        sum(
            4 * m.num_heads * m.head_dim * min(context, m.window or 0)
            for m in _attentions(config, "sliding")
        ),
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step moves between the device and its memory.

    Attributes:
      weights: parameters.
      full: keys and values of full layers, all of the context visible.
      sliding: keys and values of sliding layers.
      states: recurrent states, read and written.
    """

    weights: float
    full: int
    sliding: int
    states: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.full + self.sliding + self.states

    @property
    def savable_share_kv(self) -> float:
        """Share that declarations can save of what grows with the sequences: caches and states."""
        cache = self.full + self.sliding + self.states
        return self.full / cache if cache else 0.0

    @property
    def savable_share_all(self) -> float:
        """Share that declarations can save of all bytes."""
        return self.full / self.total

    def speedup(self, visible: float) -> float:
        """How much faster a step bound by memory is when this share of the context is visible."""
        return self.total / (self.total - (1 - visible) * self.full)


def traffic(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    itemsize: int,
    int8: bool = False,
    kv_quantized: bool = False,
    devices: int = 1,
) -> Traffic:
    """What a decode step of `batch` sequences of `context` tokens each moves.

    `int8` is about the weights, `kv_quantized` about keys and values. Where several devices share
    the model, it is what each of them moves.
    """
    weights = sum(
        _bytes(tensor, itemsize, int8) * share / _parts(config, tensor.path, devices)
        for tensor, share in _shares(config, batch)
    )
    config = sharding.part(config, devices)
    full = kv_bytes_per_token(config, "full", itemsize=itemsize, quantized=kv_quantized, read=True)
    return Traffic(
        weights=weights,
        full=batch * context * full,
        sliding=batch
        * sum(
            min(context, mixer.window or 0) * _kv_bytes(mixer, itemsize, kv_quantized)
            for mixer in _attentions(config, "sliding")
        ),
        states=2 * batch * state_bytes_per_sequence(config, itemsize=itemsize),
    )


@dataclasses.dataclass(frozen=True)
class Use:
    """How a model is run, as far as its memory depends on it.

    Attributes:
      batch: sequences that decode at once.
      context: tokens of each, prompt and response.
      dtype: of activations, of weights unless `int8`, and where `kv_dtype` is `auto` of keys and
        values.
      int8: whether weights are int8 with scales.
      kv_dtype: of keys and values, see `dtypes.KV_DTYPES`.
      page_size: tokens of a KV page.
      prefill_chunk: tokens of a prefill step.
      per_layer_on_host: whether Gemma 4's per-layer embeddings are kept off the device.
      devices: how many share the model.
    """

    batch: int = 1
    context: int = 32_768
    dtype: str = "bfloat16"
    int8: bool = False
    kv_dtype: str = "auto"
    page_size: int = 64
    prefill_chunk: int = 512
    per_layer_on_host: bool = False
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "context", "page_size", "prefill_chunk", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(ITEMSIZE)}")
        if self.kv_dtype not in dtypes.KV_DTYPES:
            raise ValueError(
                f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(dtypes.KV_DTYPES)}"
            )

    @property
    def kv_quantized(self) -> bool:
        """Whether keys and values have 8 bits and a scale."""
        return dtypes.KV_DTYPES[self.kv_dtype] is not None

    @property
    def itemsize(self) -> int:
        """Bytes of a number of `dtype`."""
        return ITEMSIZE[self.dtype]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device, on each where several share the model.

    Attributes:
      weights: parameters, without those on the host.
      pages: paged keys and values of full layers.
      rings: keys and values of sliding layers: the window and a prefill step.
      states: recurrent states.
      workspace: activations of the largest step and logits, estimated.
    """

    weights: int
    pages: int
    rings: int
    states: int
    workspace: int

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.weights + self.pages + self.rings + self.states + self.workspace


def memory(config: ModelConfig, use: Use) -> Memory:
    """What the model needs on the device."""
    host = per_layer_embedding_bytes(config, use.itemsize) if use.per_layer_on_host else 0
    if host and sharding.divided_axis(config, "per_layer_embedding", use.devices) is not None:
        host //= use.devices
    weights = weight_bytes(config, itemsize=use.itemsize, int8=use.int8, devices=use.devices)
    config = sharding.part(config, use.devices)
    pages, rings = _cache_bytes(config, use)
    return Memory(
        weights=weights - host,
        pages=pages,
        rings=rings,
        states=use.batch * state_bytes_per_sequence(config, itemsize=use.itemsize),
        workspace=workspace_bytes(config, use),
    )


def longest_context(config: ModelConfig, use: Use, bytes_free: int) -> int:
    """The most tokens that each of `use.batch` sequences can have in so many bytes.

    It is a whole number of pages, at most `config.max_positions`, and 0 where not one page fits.
    `use.context` does not matter.
    """
    need = memory(config, use)
    room = bytes_free - (need.total - need.pages - need.rings)
    part = sharding.part(config, use.devices)
    pages = range(1, -(-config.max_positions // use.page_size) + 1)
    fit = bisect.bisect_right(
        pages,
        room,
        key=lambda n: sum(_cache_bytes(part, dataclasses.replace(use, context=n * use.page_size))),
    )
    return min(config.max_positions, fit * use.page_size)


def per_layer_on_host(config: ModelConfig, use: Use, device_bytes: int) -> bool:
    """Whether Gemma 4's per-layer embeddings are better kept off a device with so much memory.

    They are where the weights would fill more than half of it. A step reads one row a token.
    """
    weights = weight_bytes(config, itemsize=use.itemsize, int8=use.int8, devices=use.devices)
    return config.per_layer_inputs is not None and weights > device_bytes / 2


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a model runs on one device, or on as many alike as share it.

    Attributes:
      chip: name of the device, as in `kernels.chips`.
      memory: its memory in bytes, of which `USABLE_SHARE` counts.
      dtype: what the model would run in there.
      context: tokens that each sequence can have, 0 where it does not fit.
      note: why it does not fit or needs another dtype; empty otherwise.
    """

    chip: str
    memory: int
    dtype: str
    context: int
    note: str


def fits(config: ModelConfig, use: Use) -> list[Fit]:
    """The longest context on every chip, the model on `use.devices` of them."""
    return [_fit(config, use, chip) for chip in chips.CHIPS]


USABLE_SHARE = 0.9
"""Of a device's memory; the rest is for the runtime, compiled programs and fragmentation."""


def _fit(config: ModelConfig, use: Use, chip: chips.Chip) -> Fit:
    notes: list[str] = []
    capacity = chip.memory
    platform = "tpu" if chip.family.startswith("tpu") else "gpu"
    target = chips.describe(platform, chip.kinds[0])
    if reason := dtypes.problem(use.dtype, config.family, target):
        best = dtypes.automatic(config.family, target)
        narrow = dtypes.problem("float16", config.family, target) if best == "float32" else None
        notes += filter(None, (reason, narrow))
        use = dataclasses.replace(use, dtype=best)
    try:
        dtypes.resolve_kv(use.kv_dtype, use.dtype, target)
    except ValueError as error:
        notes.append(str(error))
        use = dataclasses.replace(use, kv_dtype="int8")  # which takes as much
    if per_layer_on_host(config, use, capacity):
        use = dataclasses.replace(use, per_layer_on_host=True)
        notes.append("per-layer embeddings stay on the host")
    usable = int(capacity * USABLE_SHARE)
    context = longest_context(config, use, usable)
    if not context:
        need = memory(config, dataclasses.replace(use, context=1))
        what = "weights" if need.weights > usable else "weights, states and one page"
        size = need.weights if need.weights > usable else need.total
        notes.insert(0, f"{what} need {size / 2**30:.1f} GiB of {usable / 2**30:.1f} usable")
    return Fit(chip.name, capacity, use.dtype, context, "; ".join(notes))


def _attentions(config: ModelConfig, kind: Kind) -> list[Attention]:
    """The attention of every layer of a kind, with a donor or not."""
    return [
        mixer
        for layer in config.layers
        if isinstance(mixer := layer.mixer, Attention) and mixer.kind == kind
    ]


def _shares(config: ModelConfig, batch: int) -> Iterator[tuple[Tensor, float]]:
    """Every parameter and the share of it that a decode step reads."""
    for tensor in tensors(config):
        if tensor.read == "routed":
            experts = config.layers[int(tensor.path.split(".")[1])].experts
            assert experts is not None
            chosen = distinct_experts(experts.count, experts.top_k, batch)
            yield tensor, chosen / experts.count
        else:
            yield tensor, float(tensor.read == "step")


def _parts(config: ModelConfig, path: str, devices: int) -> int:
    """Into how many parts a parameter is divided among devices."""
    return 1 if sharding.divided_axis(config, path, devices) is None else devices


def _bytes(tensor: Tensor, itemsize: int, int8: bool) -> int:
    return tensor.size + 4 * tensor.scales if int8 and tensor.scales else tensor.size * itemsize


def _kv_bytes(mixer: Attention, itemsize: int, quantized: bool) -> int:
    """Bytes of key and value of one token, without what a pool pads."""
    head = mixer.head_dim + 4 if quantized else mixer.head_dim * itemsize
    return 2 * mixer.num_kv_heads * head


def _page_bytes(mixer: Attention, use: Use) -> int:
    """Bytes of a page: small heads share padded rows with their values, rows of scales are padded.

    The same as `Layout.page_bytes` of the pool, which needs JAX.
    """
    heads = mixer.num_kv_heads
    numbers = use.page_size * heads * max(2 * mixer.head_dim, _LANES)
    if not use.kv_quantized:
        return numbers * use.itemsize
    padded = min(1 << (heads - 1).bit_length(), -(-heads // 8) * 8)
    return numbers + 4 * 2 * padded * -(-use.page_size // _LANES) * _LANES


def _cache_bytes(config: ModelConfig, use: Use) -> tuple[int, int]:
    """Bytes of the pages of full layers, and of the rings of sliding ones.

    A ring holds a prefill step and the window before it, wherever in a page they start; it is
    never longer than the context.
    """
    pages, rings, context = 0, 0, -(-use.context // use.page_size)
    for layer in config.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDelta) or mixer.donor is not None:
            continue
        if mixer.window is None:
            pages += context * _page_bytes(mixer, use)
        else:
            blocks = (mixer.window + use.prefill_chunk - 2) // use.page_size + 2
            rings += min(blocks, context) * _page_bytes(mixer, use)
    return use.batch * pages, use.batch * rings


def workspace_bytes(config: ModelConfig, use: Use) -> int:
    """Bytes that prefill and decode need besides weights and caches: an estimate from above.

    The activations alive at once in the widest layer; the logits and what sampling sorts of them;
    the recurrent states of a batch, which a burst carries; one matrix of a layer in another layout
    or dtype; the head in float32 where the rest is float16; and what compilers take whatever the
    model is. `da-jax bench aot --model` compares it with compiled programs.
    """
    width = max(_layer_width(config, layer) for layer in config.layers)
    if config.per_layer_inputs:
        width += 3 * len(config.layers) * config.per_layer_inputs.size
    activations = max(use.prefill_chunk, use.batch) * (width + 4 * config.hidden_size)
    inside = [t for t in tensors(config) if t.path.startswith("layers.") and t.read == "step"]
    states = use.batch * state_bytes_per_sequence(config, itemsize=use.itemsize)
    # XLA for a GPU multiplies one row by a float16 matrix in float32, all of the matrix at once;
    # by an int8 one too, unless it is the embedding, which is taken in parts.
    head = 4 * config.vocab_size * config.hidden_size if use.dtype == "float16" else 0
    return (
        use.itemsize * (2 * activations + 2 * max(t.size for t in inside))
        + _LOGITS * 4 * use.batch * config.vocab_size
        + 2 * states
        + head
        + _COMPILER
    )


def _layer_width(config: ModelConfig, layer: Layer) -> int:
    """Numbers a token that a layer has at once."""
    mixer, experts = layer.mixer, layer.experts
    if isinstance(mixer, GatedDelta):
        # float32 inside: three times the heads, and per head the rows of a chunk by each other.
        mixing = 2 * (6 * mixer.channels + 6 * _DELTA_CHUNK * mixer.value_heads)
    else:
        mixing = (4 if mixer.output_gate else 3) * mixer.num_heads * mixer.head_dim
    feeding = 3 * layer.mlp
    if experts:
        feeding += 3 * (experts.top_k * (experts.hidden + config.hidden_size) + experts.shared)
    return max(mixing, feeding)
