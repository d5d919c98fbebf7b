"""The time of one decode step of a batch, by what it moves and what it computes."""

from __future__ import annotations

import dataclasses

from da_jax.kernels import chips
from da_jax.models import dtypes, sharding, sizes
from da_jax.models.config import ModelConfig
from da_jax.roofline import paper

_ITEMSIZE = 2


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one decode step.

    Attributes:
      weights: products with parameters.
      full: full attention: what declarations save is in here.
      rest: sliding windows and recurrent states.
    """

    weights: float
    full: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.full + self.rest


@dataclasses.dataclass(frozen=True)
class Machine:
    """A model on a chip, or on several that share it.

    Each phase of a step takes what its bytes or its operations take, whichever is longer; phases
    follow each other in every layer, so their times add up. Left out: activations, the host, and
    what passes between devices.

    Attributes:
      config: the model, in bfloat16.
      chip: the device.
      devices: how many share the model.
      batch: sequences that decode at once. Weights are read once for all of them.
      page_size: tokens of a KV page; pages are read whole.
      int8: weights in 8 bits.
      kv_dtype: of keys and values, see `dtypes.KV_DTYPES`.
      mfu: share of the peak operations that is reached: an assumption.
      mbu: share of the peak bandwidth that is reached: an assumption.

    Raises:
      ValueError: a number out of range, or devices that cannot share the model.
    """

    config: ModelConfig
    chip: chips.Chip
    devices: int = 1
    batch: int = 1
    page_size: int = 64
    int8: bool = False
    kv_dtype: str = "auto"
    mfu: float = paper.MFU
    mbu: float = paper.MBU

    def __post_init__(self) -> None:
        for name in ("mfu", "mbu"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, at most 1")
        self.use(1)
        sharding.check(self.config, self.devices)

    def use(self, context: int) -> sizes.Use:
        """How the model is run with so many tokens a sequence."""
        return sizes.Use(
            batch=self.batch, context=context, int8=self.int8, kv_dtype=self.kv_dtype,
            page_size=self.page_size, devices=self.devices,
        )  # fmt: skip

    def fits(self, context: int) -> bool:
        """Whether weights and caches have room on the chip."""
        use = self.use(context)
        if sizes.per_layer_on_host(self.config, use, self.chip.memory):
            use = dataclasses.replace(use, per_layer_on_host=True)
        return sizes.memory(self.config, use).total <= sizes.USABLE_SHARE * self.chip.memory

    def step(self, context: float, read: float) -> Times:
        """One decode step of the whole batch.

        Args:
          context: tokens of each sequence.
          read: positions of the pages that full attention reads, of each sequence.
        """
        moved = sizes.traffic(
            self.config, batch=self.batch, context=round(context), itemsize=_ITEMSIZE,
            int8=self.int8, kv_quantized=dtypes.KV_DTYPES[self.kv_dtype] is not None,
            devices=self.devices,
        )  # fmt: skip
        done = sizes.operations(self.config, context=round(context), devices=self.devices)
        share = read / round(context)
        return Times(
            weights=self._longer(moved.weights, self.batch * done.weights),
            full=self._longer(moved.full * share, self.batch * done.full * read),
            rest=self._longer(moved.sliding + moved.states, self.batch * done.sliding),
        )

    def _longer(self, moved: float, operations: float) -> float:
        """Seconds that bytes or operations take, whichever is longer."""
        return max(
            moved / (self.chip.bandwidth * self.mbu), operations / (self.chip.flops * self.mfu)
        )
