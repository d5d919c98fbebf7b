import jax.numpy as jnp
import numpy as np

from da_jax.cache import states
from da_jax.cache.pools import Caches
from da_jax.models.layers import DeltaState

SLOTS = 4


def full(offset):
    """A layer's states in all slots: slot s holds s + offset."""
    rows = jnp.arange(SLOTS, dtype=jnp.float32) + offset
    return DeltaState(jnp.tile(rows[:, None, None], (1, 3, 2)), jnp.tile(rows[:, None], (1, 5)))


def test_rows_come_from_their_slots_and_go_back_and_fresh_rows_start_from_zero():
    caches = Caches({}, {}, {1: full(10.0), 7: full(np.nan)})
    slot = np.array([2, SLOTS, 0], np.int32)  # the middle row is empty
    held = states.take(caches, slot, np.array([5, 9, 0], np.int32))
    conv, memory = held.states[1]
    assert conv[:, 0, 0].tolist() == memory[:, 0].tolist() == [12, 0, 0]
    assert np.isnan(held.states[7].memory[0]).all() and not held.states[7].conv[1:].any()
    held.states[1] = DeltaState(conv + 100, memory + 100)
    after = states.put(caches, held, slot).states[1]
    assert after.conv[:, 2, 1].tolist() == after.memory[:, 4].tolist() == [100, 11, 112, 13]


def test_models_without_states_have_nothing_to_move():
    caches = Caches({0: jnp.ones(3)}, {}, {})
    slot = np.zeros(1, np.int32)
    held = states.take(caches, slot, slot)
    assert held.pages is caches.pages and states.put(caches, held, slot).states == {}
