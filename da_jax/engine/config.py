"""Settings of the engine: the one source for the Python API and the command line."""

from __future__ import annotations

import dataclasses

from da_jax.models.dtypes import DTYPES, KV_DTYPES
from da_jax.models.sizes import USABLE_SHARE

MAX_PAGE_SIZE = 32_767  # the block mask packs two slot numbers in an int32
MAX_STOP_IDS = 8  # of a request, besides the checkpoint's own: the width of a device array
MAX_LOGPROBS = 20  # as in the OpenAI API


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model.

    Attributes:
      dtype: dtype of activations, and of weights, keys and values unless `weights` and `kv_dtype`
        say otherwise; `auto` is bfloat16 on an accelerator that has it and float32 on a CPU, where
        bfloat16 products are several times slower. See `da_jax.models.dtypes`.
      weights: `int8` keeps matrices in 8 bits with a scale for each output; `auto` is what the
        checkpoint says, int8 or `dtype`.
      per_layer_embeddings: where those of Gemma 4 E2B and E4B are: `device`, `host`, or `auto`,
        which is the host where the weights would fill more than half of the device.
      page_size: tokens of a KV page.
      max_model_len: longest sequence in tokens, prompt and response; None is what the checkpoint
        declares, 32,768 at most.
      max_num_seqs: most sequences that decode at once.
      kv_cache_bytes: upper limit, in bytes, of what sequences keep on the device: sliding windows
        and recurrent states of `max_num_seqs` sequences, and pages of keys and values. None is what
        the device has left, on a CPU 4 GiB at most; see `da_jax.engine.memory`.
      prefill_chunk: tokens of a prefill step.
      burst: most decode steps between two looks of the host. A sequence whose mode may have changed
        pauses earlier, so the value never changes a result.
      attention: attention backend; None chooses by platform, see `da-jax env`.
      step_tokens: tokens that a step may compute. A burst of B sequences takes B times `burst` of
        them, waiting prompts the rest, but at least one chunk.
      max_waiting: most requests that wait; beyond it `Engine.add` refuses, and `Engine.run` holds
        its requests back.
      prefix_cache: find the pages of a prompt's beginning that an earlier prompt left.
      prefix_snapshots: copies of sliding windows and recurrent states that are kept for it, by a
        model that has such layers; each takes as much as a sequence's own.
      tensor_parallel: devices that share the model, each with a part of every layer's heads and
        widths; see `da_jax.models.sharding`.
      data_parallel: replicas of the model, each on devices of its own and with its own share of
        the requests; `max_num_seqs`, `kv_cache_bytes` and `max_waiting` are those of one.
      memory_fraction: share of the device's memory that weights, programs and caches may take
        together.
      kv_dtype: `int8` or `fp8` keep keys and values in 8 bits with a scale for each token and head;
        `auto` keeps them in `dtype`.
    """

    dtype: str = "auto"
    weights: str = "auto"
    per_layer_embeddings: str = "auto"
    page_size: int = 64
    max_model_len: int | None = None
    max_num_seqs: int = 8
    kv_cache_bytes: int | None = None
    prefill_chunk: int = 512
    burst: int = 16
    attention: str | None = None
    step_tokens: int = 1024
    max_waiting: int = 4096
    prefix_cache: bool = True
    prefix_snapshots: int = 2
    tensor_parallel: int = 1
    data_parallel: int = 1
    memory_fraction: float = USABLE_SHARE
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "weights": ("auto", "int8"),
            "per_layer_embeddings": ("auto", "device", "host"),
            "kv_dtype": KV_DTYPES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )
        least = dict.fromkeys(
            ("page_size", "max_num_seqs", "kv_cache_bytes", "prefill_chunk", "burst",
             "step_tokens", "max_waiting", "tensor_parallel", "data_parallel"), 1
        ) | {"prefix_snapshots": 0}  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is None and name == "kv_cache_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
            if value < smallest:
                raise ValueError(f"{name} is {value}; it must be at least {smallest}")
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(
                f"memory_fraction is {fraction!r}; it must be a number above 0, at most 1"
            )
        if self.page_size > MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {self.page_size}; it must be at most {MAX_PAGE_SIZE}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2")
