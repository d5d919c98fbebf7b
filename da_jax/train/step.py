"""The loss of given responses, and training steps on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from da_jax.models.decoder import Decoder
from da_jax.train.cache import hidden_states
from da_jax.train.data import Batch


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
      steps: optimizer steps.
      rate: highest learning rate of AdamW; it rises over the first steps, then falls as a cosine.
      warmup: share of the steps over which it rises.
      least: share of it that is left at the end.
      weight_decay: of matrices; norms and other vectors have none.
      clip: largest norm of the gradient.
      recompute: keep only the input of each layer for the backward pass.

    Raises:
      ValueError: a value out of range.
    """

    steps: int
    rate: float = 1e-5
    warmup: float = 0.05
    least: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
        for name in ("warmup", "least"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with a warm-up, a cosine and a clipped gradient."""
        rising = min(int(self.warmup * self.steps), self.steps - 1)
        rate = optax.warmup_cosine_decay_schedule(
            self.rate / (rising + 1), self.rate, rising, self.steps, self.rate * self.least
        )
        matrices = lambda weights: jax.tree.map(lambda x: x.ndim > 1, weights)
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(rate, weight_decay=self.weight_decay, mask=matrices),
        )


class Measured(NamedTuple):
    """What one step measured.

    Attributes:
      loss: mean negative log-probability of the response tokens, natural logarithm.
      tokens: how many there were.
      norm: norm of the gradient before it was clipped.
    """

    loss: float
    tokens: int
    norm: float


def logprobs(model: Decoder, batch: Batch, *, recompute: bool = False) -> jax.Array:
    """float32 [B, R] log-probabilities of the response tokens; anything on padding."""
    hidden = hidden_states(model, batch, recompute=recompute)
    query, target = jnp.asarray(batch.query)[..., None], jnp.asarray(batch.target)[..., None]
    chosen = jnp.take_along_axis(hidden, query, axis=1)  # [B, R, E]
    scores = jax.nn.log_softmax(model.logits(chosen), axis=-1)
    return jnp.take_along_axis(scores, target, axis=-1)[..., 0]


class Trainer:
    """A model in training.

    The weights that are optimized are float32; each step computes with the dtype that the model was
    loaded in. Batches are divided over the devices, which all have the whole model.

    Args:
      model: the model, not in 8 bits; its arrays are taken over.
      settings: how it is trained.
      devices: devices that share a batch; by default all.

    Raises:
      ValueError: the model is in 8 bits.
    """

    def __init__(self, model: Decoder, settings: Settings, devices: list[jax.Device] | None = None):
        if model.quantized:
            raise ValueError("the model is in 8 bits; train the checkpoint that it was made from")
        self._mesh = Mesh(np.array(devices or jax.devices()), ("data",))
        parts: Any = nnx.split(model, nnx.Param, ...)
        self._graph, weights, self._rest = parts
        self._dtypes = jax.tree.map(lambda x: x.dtype, weights)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
        self.weights = jax.device_put(wide, everywhere)
        self._optimizer = settings.optimizer()
        self._state = self._optimizer.init(self.weights)
        self._step = jax.jit(self._updated, donate_argnums=(0, 1))
        self._recompute = settings.recompute

    @property
    def state(self) -> tuple[Any, Any]:
        """Weights in float32 and the state of the optimizer, which decide all that follows."""
        return self.weights, self._state

    def replace(self, load: Callable[[Any], Any]) -> None:
        """Sets the state to another one.

        Args:
          load: gives it, for shapes, dtypes and shardings like its own. That one is let go first.
        """
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )
        del self.weights, self._state
        self.weights, self._state = load(like)

    def step(self, batch: Batch) -> Measured:
        """One optimizer step.

        Raises:
          ValueError: the devices cannot share the batch.
          FloatingPointError: the loss or its gradient is not finite; the weights are of no use now.
        """
        if len(batch.tokens) % self._mesh.size:
            raise ValueError(
                f"{len(batch.tokens)} examples a batch cannot be divided over {self._mesh.size} "
                "devices; choose a multiple"
            )
        shared = jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec("data")))
        self.weights, self._state, measured = self._step(self.weights, self._state, shared)
        loss, tokens, norm = jax.device_get(measured)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"the loss is {loss} and the norm of its gradient {norm}")
        return Measured(float(loss), int(tokens), float(norm))

    def model(self) -> Decoder:
        """A copy of the model as it is now, in the dtype that it was loaded in."""
        copies = jax.tree.map(jnp.array, self._narrow(self.weights))
        return nnx.merge(self._graph, copies, self._rest)

    def _narrow(self, weights: Any) -> Any:
        return jax.tree.map(lambda x, dtype: x.astype(dtype), weights, self._dtypes)

    def _loss(self, weights: Any, batch: Batch) -> jax.Array:
        model = nnx.merge(self._graph, self._narrow(weights), self._rest)
        chosen = logprobs(model, batch, recompute=self._recompute)
        return -(chosen * batch.weight).sum() / jnp.maximum(batch.weight.sum(), 1)

    def _updated(self, weights: Any, state: Any, batch: Batch) -> tuple[Any, Any, tuple]:
        loss, gradient = jax.value_and_grad(self._loss)(weights, batch)
        updates, state = self._optimizer.update(gradient, state, weights)
        measured = loss, batch.weight.sum(), optax.tree.norm(gradient)
        return optax.apply_updates(weights, updates), state, measured
