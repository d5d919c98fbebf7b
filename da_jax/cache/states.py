"""Recurrent states: out of their slots into the rows of a program, and back.

A program that runs many steps carries the few rows of its batch and touches the slots twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from da_jax.cache.pools import Caches


def take(caches: Caches, slot: jax.Array, position: jax.Array) -> Caches:
    """The caches with the states of the sequences in `slot` [B] as rows [B].

    Rows at `position` 0 start from zeros, so a slot needs no clearing for its next sequence; rows
    of no slot (beyond the last one) are zeros too.
    """

    def rows(kept: jax.Array) -> jax.Array:
        held = kept.at[slot].get(mode="fill", fill_value=0)
        fresh = jnp.reshape(position == 0, (-1, *[1] * (kept.ndim - 1)))
        return jnp.where(fresh, 0, held)

    return caches._replace(states=jax.tree.map(rows, caches.states))


def put(caches: Caches, held: Caches, slot: jax.Array) -> Caches:
    """`held` with its rows of states back in their slots; a row of no slot is dropped."""
    states = jax.tree.map(
        lambda kept, rows: kept.at[slot].set(rows, mode="drop"), caches.states, held.states
    )
    return held._replace(states=states)


def copy(caches: Caches, source: jax.Array, target: jax.Array, num_slots: int) -> Caches:
    """The caches with rings and states of slot `source` also in slot `target` (scalars)."""

    def copied(kept: jax.Array) -> jax.Array:
        size = kept.shape[0] // num_slots  # pages of a ring, or one state
        held = jax.lax.dynamic_slice_in_dim(kept, source * size, size)
        return jax.lax.dynamic_update_slice_in_dim(kept, held, target * size, axis=0)

    return caches._replace(
        rings=jax.tree.map(copied, caches.rings), states=jax.tree.map(copied, caches.states)
    )
