"""Transformers on torch, driven by the same steps as our engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np


class Transformers:
    """A checkpoint in transformers.

    Args:
      folder: the checkpoint.
      dtype: name of the dtype of weights and activations.

    Attributes:
      versions: of transformers and torch.
      threads: that torch computes with.

    Raises:
      ValueError: torch is not installed, or the folder holds no weights that it reads.
    """

    def __init__(self, folder: Path, dtype: str):
        try:
            import torch
        except ImportError:
            raise ValueError("--transformers needs torch; install it in this environment") from None
        import transformers

        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise ValueError(
                f"{folder} has no *.safetensors that transformers could load; --transformers needs "
                "a Hugging Face folder"
            )
        self._torch = torch
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.threads = torch.get_num_threads()
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        )
        self._network: Any = network.eval()
        self._out: Any = None

    def prefill(self, prompts: np.ndarray) -> float:
        """Reads prompts [B, T], with logits of the last tokens alone; returns the seconds."""
        torch, self._out = self._torch, None
        ids = torch.from_numpy(prompts.astype(np.int64))
        with torch.inference_mode():
            self._network(input_ids=ids[:, :8])  # first-call costs
            start = time.perf_counter()
            self._out = self._network(input_ids=ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        """Writes so many greedy tokens; returns the seconds."""
        start = time.perf_counter()
        with self._torch.inference_mode():
            # Newer ones of transformers name it so, and warn about the other name.
            name = "cache" if "cache" in self._out else "past_key_values"
            for _ in range(steps):
                token = self._out.logits[:, -1:].argmax(-1)
                cache = {name: self._out[name]}
                self._out = self._network(input_ids=token, use_cache=True, **cache)
        return time.perf_counter() - start

    def forget(self) -> None:
        """Drops what it keeps of the prompts."""
        self._out = None
