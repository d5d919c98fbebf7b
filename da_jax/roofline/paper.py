"""The paper's estimate of the decode time of a response (its section 5 and appendix C).

One B200, bfloat16, 40 % of its peak operations and 70 % of its bandwidth. Products with the weights
are charged as operations, attention as bytes, and the three terms are added. There is no batch: the
estimate presumes one so large that the weights' own bytes do not matter.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from da_jax.kernels import chips
from da_jax.models import sizes
from da_jax.models.config import GatedDelta, ModelConfig

MFU, MBU = 0.4, 0.7
_ITEMSIZE = 2

NOMINAL = {"gemma-4-31B": 31.0e9, "Qwen3.6-27B": 27.0e9}
"""Parameters as the paper counts them, by the names of the catalogue."""


class Cell(NamedTuple):
    """A row of the paper's table: a model in an arm, its decode steps and attended tokens."""

    model: str
    arm: str
    steps: int
    attended: float


TABLE = (
    Cell("gemma-4-31B", "vanilla", 332, 13.43e6),
    Cell("gemma-4-31B", "da", 448, 6.45e6),
    Cell("Qwen3.6-27B", "vanilla", 573, 22.54e6),
    Cell("Qwen3.6-27B", "da", 752, 15.52e6),
)
"""Means of a response over the 15 sources, from the paper's table 5."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Milliseconds of one response.

    Attributes:
      matmul_ms: products with the weights.
      global_ms: reads of the KV cache by full attention.
      local_ms: reads of sliding windows and recurrent states.
    """

    matmul_ms: float
    global_ms: float
    local_ms: float

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.matmul_ms + self.global_ms + self.local_ms


def estimate(
    config: ModelConfig,
    chip: chips.Chip,
    *,
    steps: float,
    attended: float,
    parameters: float | None = None,
    mfu: float = MFU,
    mbu: float = MBU,
) -> Estimate:
    """The paper's estimate for any model and chip.

    Args:
      config: the model.
      chip: the device.
      steps: decode steps of the response.
      attended: positions that full attention attends, summed over the steps.
      parameters: that a token is multiplied with; None counts them.
      mfu: share of the peak operations that is reached.
      mbu: share of the peak bandwidth that is reached.

    Raises:
      ValueError: steps or attended tokens that no response has.
    """
    if steps <= 0 or attended < 0:
        raise ValueError(
            f"{steps:g} decode steps that attend {attended:g} tokens; steps must be above 0, "
            "attended tokens at least 0"
        )
    if parameters is None:
        parameters = sizes.parameters_read(config)
    operations, bandwidth = chip.flops * mfu, chip.bandwidth * mbu
    kv = sizes.kv_bytes_per_token(config, "full", itemsize=_ITEMSIZE, read=True)
    return Estimate(
        matmul_ms=1e3 * 2 * parameters * steps / operations,
        global_ms=1e3 * attended * kv / bandwidth,
        local_ms=1e3 * steps * local_bytes(config) / bandwidth,
    )


def local_bytes(config: ModelConfig) -> int:
    """Bytes a step of whole sliding windows, and of recurrent states.

    The paper reads the states once, and counts them in two bytes a number.
    """
    windows = sizes.traffic(
        config, batch=1, context=config.max_positions, itemsize=_ITEMSIZE
    ).sliding
    states = sum(
        (m.conv_width - 1) * m.channels + m.value_heads * m.key_dim * m.value_dim
        for layer in config.layers
        if isinstance(m := layer.mixer, GatedDelta)
    )
    return windows + _ITEMSIZE * states
