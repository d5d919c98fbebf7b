"""Settings of the engine: the one source for the Python API and the command line."""

from __future__ import annotations

import dataclasses

MAX_PAGE_SIZE = 32_767  # the block mask packs two slot numbers in an int32
MAX_STOP_IDS = 8  # of a request, besides the checkpoint's own: the width of a device array
MAX_LOGPROBS = 20  # as in the OpenAI API
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model.

    Attributes:
      dtype: dtype of weights, activations and KV cache; `auto` is bfloat16 on an accelerator and
        float32 on a CPU, where bfloat16 products are several times slower.
      page_size: tokens of a KV page.
      max_model_len: longest sequence in tokens, prompt and response; None is what the checkpoint
        declares, 32,768 at most.
      max_num_seqs: most sequences that decode at once.
      kv_cache_bytes: upper limit of the KV pool in bytes.
      prefill_chunk: tokens of a prefill step.
      burst: most decode steps between two looks of the host. A sequence whose mode may change
        pauses earlier, so the value never changes a result.
      attention: attention backend; None chooses by platform, see `da-jax env`.
    """

    dtype: str = "auto"
    page_size: int = 64
    max_model_len: int | None = None
    max_num_seqs: int = 8
    kv_cache_bytes: int = 4 * 2**30
    prefill_chunk: int = 512
    burst: int = 16
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        for name in ("page_size", "max_num_seqs", "kv_cache_bytes", "prefill_chunk", "burst"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.page_size > MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {self.page_size}; it must be at most {MAX_PAGE_SIZE}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2")
