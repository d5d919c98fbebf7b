"""Gated DeltaNet against its definition, a loop over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from da_jax.models.gated_delta import causal_conv, delta_rule, unit_inverse

BATCH, HEADS, DK, DV = 2, 3, 8, 5
STEP = 70  # of padded pieces: longer than one chunk of 64
run = jax.jit(delta_rule)
convolve = jax.jit(causal_conv)


def recurrence(q, k, v, g, beta, memory):
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; out = S^T q, token by token."""
    q, k, v, g, beta, memory = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, memory))
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        memory = memory * np.exp(g[:, t])[..., None, None]
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", memory, k[:, t])
        memory = memory + np.einsum("bhk,bhv->bhkv", k[:, t], error * beta[:, t, :, None])
        out[:, t] = np.einsum("bhkv,bhk->bhv", memory, q[:, t])
    return out, memory


def inputs(length, seed=0):
    """q, k, v, g, beta [BATCH, length, HEADS, ...] as a layer makes them, and a memory."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, BATCH, length, HEADS, DK))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((BATCH, length, HEADS, DV))
    g = -rng.exponential(0.3, (BATCH, length, HEADS))
    beta = rng.uniform(0, 1, (BATCH, length, HEADS))
    memory = rng.standard_normal((BATCH, HEADS, DK, DV))
    return [x.astype(np.float32) for x in (q * DK**-0.5, k, v, g, beta)], memory.astype(np.float32)


def assert_close(ours, expected, tolerance=2e-5):
    for name, left, right in zip(("out", "memory"), ours, expected):
        assert left.dtype == np.float32
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(length):
    tokens, memory = inputs(length)
    assert_close(run(*tokens, memory), recurrence(*tokens, memory))


@pytest.mark.parametrize(
    ("decay", "strength"), [(0.0, 1.0), (-0.001, 1.0), (-8.0, 1.0), (-90.0, 1.0), (-0.5, 0.0)]
)
def test_extreme_gates_stay_exact(decay, strength):
    """Nothing forgotten, all forgotten at once (sums of decays far beyond float32), no writing."""
    (q, k, v, g, beta), memory = inputs(200)
    tokens = q, k, v, np.full_like(g, decay), np.full_like(beta, strength)
    assert_close(run(*tokens, memory), recurrence(*tokens, memory), 1e-4)


@pytest.mark.parametrize("length", [3, 64, 150])
def test_gradients_are_those_of_the_recurrence(length):
    """Of one token after another, which automatic differentiation goes through as it stands."""

    def one_by_one(*tokens, memory):
        def step(memory, token):
            out, memory = delta_rule(*(x[:, None] for x in token), memory)
            return memory, out[:, 0]

        memory, outs = jax.lax.scan(step, memory, [jnp.moveaxis(x, 1, 0) for x in tokens])
        return jnp.moveaxis(outs, 0, 1), memory

    tokens, memory = inputs(length)
    weight = np.random.default_rng(1).standard_normal((BATCH, length, HEADS, DV))

    def loss(rule, *given):
        out, after = rule(*given[:-1], memory=given[-1])
        return (out * weight).sum() + (after**2).sum()

    places = tuple(range(1, 7))
    gradient = jax.jit(jax.grad(loss, places), static_argnums=0)
    for name, ours, expected in zip(
        ("q", "k", "v", "g", "beta", "memory"),
        gradient(delta_rule, *tokens, memory),
        gradient(one_by_one, *tokens, memory),
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("likeness", [0.0, 0.99])
@pytest.mark.parametrize("count", [1, 2, 64])
def test_the_inverse_of_a_unit_triangle_is_exact_also_for_keys_that_are_alike(count, likeness):
    keys = np.random.default_rng(0).standard_normal((3, count, 16))
    keys = (1 - likeness) * keys + likeness * keys[:, :1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(keys @ keys.mT, -1)
    exact = np.linalg.inv(np.eye(count) + lower)
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(unit_inverse)(lower.astype(np.float32))
    np.testing.assert_allclose(ours, exact, atol=2e-6 * np.abs(exact).max(), rtol=0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, STEP), max_size=6), st.integers(0, 2**32 - 1))
def test_a_sequence_may_be_cut_anywhere_into_padded_pieces(sizes, seed):
    """Padding holds anything but g = beta = 0; a piece may be nothing else."""
    tokens, memory = inputs(sum(sizes), seed)
    expected = recurrence(*tokens, memory)
    rng, outs, at = np.random.default_rng(seed), [np.zeros((BATCH, 0, HEADS, DV))], 0
    for size in sizes:
        padded = []
        for index, x in enumerate(tokens):
            filler = rng.standard_normal((BATCH, STEP - size, *x.shape[2:])) * (index < 3)
            padded.append(np.concatenate([x[:, at : at + size], filler], 1).astype(np.float32))
        out, memory = run(*padded, memory)
        outs.append(out[:, :size])
        at += size
    assert_close((np.concatenate(outs, 1, dtype=np.float32), np.asarray(memory)), expected)


def test_single_steps_after_a_prefill_equal_the_recurrence():
    tokens, memory = inputs(STEP + 20)
    expected = recurrence(*tokens, memory)
    out, memory = run(*(x[:, :STEP] for x in tokens), memory)
    outs = [out]
    for at in range(STEP, STEP + 20):
        out, memory = run(*(x[:, at : at + 1] for x in tokens), memory)
        outs.append(out)
    assert_close((np.concatenate(outs, 1), memory), expected)


def test_rows_and_heads_do_not_meet():
    tokens, memory = inputs(STEP)
    out, after = run(*tokens, memory)
    other = [x.copy() for x in tokens]
    for x in other:
        x[1], x[:, :, 2] = 0.5, 0.25
    changed, changed_after = run(*other, memory)
    np.testing.assert_array_equal(out[0, :, :2], changed[0, :, :2])
    np.testing.assert_array_equal(after[0, :2], changed_after[0, :2])


WIDTH, CHANNELS = 4, 3


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_convolution_sees_the_last_inputs_whatever_the_lengths(first, second, seed):
    """Two padded steps of 6, also with fewer valid tokens than the convolution is wide."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((CHANNELS, 1, WIDTH)).astype(np.float32)
    lengths = np.array([[first, second], [second, first]], np.int32)  # [row, step]
    valid = [rng.standard_normal((n, CHANNELS)).astype(np.float32) for n in lengths.sum(1)]
    past = rng.standard_normal((2, WIDTH - 1, CHANNELS)).astype(np.float32)
    history = [np.concatenate([past[row], valid[row]]) for row in range(2)]
    at = np.zeros(2, int)
    for step in range(2):
        x = rng.standard_normal((2, 6, CHANNELS)).astype(np.float32)
        for row, size in enumerate(lengths[:, step]):
            x[row, :size] = valid[row][at[row] : at[row] + size]
        out, past = convolve(x, weight, past, lengths[:, step])
        for row, size in enumerate(lengths[:, step]):
            for t in range(size):
                seen = history[row][at[row] + t : at[row] + t + WIDTH]
                expected = (seen * weight[:, 0].T).sum(0)
                np.testing.assert_allclose(out[row, t], expected, atol=1e-5)
            at[row] += size
            np.testing.assert_array_equal(past[row], history[row][at[row] : at[row] + WIDTH - 1])
