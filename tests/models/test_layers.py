"""Norms, rotary embeddings, activations and int8 layers against NumPy, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from da_jax.models import layers, rope
from da_jax.models.config import Attention, RopeConfig

EPS = 1e-6


def make(dtype=jnp.float32, quantized=False):
    return layers.Make(dtype, nnx.Rngs(params=0), quantized)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unit(x):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_norms_multiply_by_w_or_by_one_more(offset):
    x, weight = 50 * numbers(3, 16), numbers(16, seed=1)
    kind = layers.RMSNorm if offset is None else layers.WideRMSNorm
    norm = kind(16, eps=EPS, make=make(), **({} if offset is None else {"offset": offset}))
    np.testing.assert_allclose(norm(x), unit(x), rtol=1e-5)  # untrained: no change of length
    norm.scale.set_value(jnp.asarray(weight))
    np.testing.assert_allclose(norm(x), unit(x) * ((offset or 0) + weight), rtol=1e-5, atol=1e-6)


def test_norms_round_where_the_authors_round():
    """In bfloat16: before the weight (Qwen 3), or once after it."""
    x, weight = jnp.asarray(numbers(64, 32), jnp.bfloat16), jnp.asarray(numbers(32, seed=1))
    narrow = layers.RMSNorm(32, eps=EPS, make=make(jnp.bfloat16))
    wide = layers.WideRMSNorm(32, eps=EPS, make=make(jnp.bfloat16))
    for norm in (narrow, wide):
        norm.scale.set_value(weight.astype(jnp.bfloat16))
    exact, factor = unit(np.asarray(x, np.float32)), weight.astype(jnp.bfloat16)
    early = jnp.asarray(exact, jnp.bfloat16) * factor
    late = jnp.asarray(exact * np.asarray(factor, np.float64), jnp.bfloat16)
    assert np.mean(np.asarray(narrow(x)) == np.asarray(early)) > 0.99
    assert np.mean(np.asarray(wide(x)) == np.asarray(late)) > 0.99
    assert np.mean(np.asarray(early) == np.asarray(late)) < 0.9


def turned(x, angles):
    """Rotates x [T, D] in the pairs (j, j + D/2) as complex numbers, by angles [T, D/2]."""
    half = x.shape[-1] // 2
    z = (x[:, :half] + 1j * x[:, half:].astype(np.float64)) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("length", [5])
def test_each_kind_of_rotary_embedding_turns_the_pairs_it_should(length):
    x, positions = numbers(1, length, 1, 16), np.array([[0, 1, 5, 100, 511]], np.int32)

    def ours(config):
        mixer = Attention(1, 1, 16, config, 1.0)
        return np.asarray(layers.Angles(jnp.asarray(positions)).rotate(x, mixer))[0, :, 0]

    flat, at, theta = x[0, :, 0], positions[0][:, None].astype(np.float64), 1e4
    every = theta ** (-np.arange(8) / 8)
    np.testing.assert_allclose(ours(RopeConfig(theta)), turned(flat, at * every), atol=2e-5)
    linear = ours(RopeConfig(theta, "linear", factor=8.0))
    np.testing.assert_allclose(linear, turned(flat, at * every / 8), atol=2e-5)
    first = np.concatenate([turned(flat[:, :4], at * theta ** (-np.arange(2) / 2)), flat[:, 4:]], 1)
    np.testing.assert_allclose(ours(RopeConfig(theta, partial=0.25)), first, atol=2e-5)
    some = np.where(np.arange(8) < 2, every, 0.0)  # pairs of the whole head, angles of the whole
    np.testing.assert_allclose(
        ours(RopeConfig(theta, "proportional", partial=0.25)), turned(flat, at * some), atol=2e-5
    )


def test_yarn_of_a_partial_embedding_knows_only_the_dimensions_that_turn():
    extended = {"factor": 4.0, "original_max_positions": 32}
    part = rope.inverse_frequencies(RopeConfig(1e4, "yarn", 0.25, **extended), 64)
    whole = rope.inverse_frequencies(RopeConfig(1e4, "yarn", **extended), 16)
    np.testing.assert_array_equal(part[0], whole[0])
    assert part[1] == whole[1] == pytest.approx(0.1 * np.log(4) + 1)


def test_angles_are_computed_once_for_each_rope(monkeypatch):
    calls = []
    monkeypatch.setattr(
        layers, "cos_sin", lambda *args: calls.append(args[:2]) or rope.cos_sin(*args)
    )
    angles = layers.Angles(jnp.zeros((1, 2), jnp.int32))
    mixers = [Attention(1, 1, 8, RopeConfig(theta), 1.0) for theta in (1e4, 1e6, 1e4)]
    for mixer in mixers:
        angles.rotate(jnp.ones((1, 2, 1, 8)), mixer)
    assert len(calls) == 2


def test_gelu_is_the_approximation_with_tanh():
    x = np.linspace(-6, 6, 101)
    expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(layers.gelu(x.astype(np.float32)), expected, atol=1e-6)


def test_the_gated_mlp_activates_the_gate_alone():
    mlp, x = layers.GatedMLP(8, 12, make(), act=layers.gelu), numbers(3, 8)
    gate, up, down = (np.asarray(part.kernel[...]) for part in (mlp.gate, mlp.up, mlp.down))
    expected = (np.asarray(layers.gelu(x @ gate)) * (x @ up)) @ down
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-5, atol=1e-6)


def test_int8_keeps_every_weight_within_half_a_step_of_its_column():
    weights = numbers(32, 6) * np.array([1, 10, 1e-3, 0, 5, 1], np.float32)
    values, scale = (np.asarray(x) for x in layers.quantize(jnp.asarray(weights)))
    assert values.dtype == np.int8 and scale.shape == (6,) and scale.dtype == np.float32
    assert np.abs(values[:, :3]).max(0).tolist() == [127] * 3 and not values[:, 3].any()
    assert (np.abs(values * scale - weights) <= scale / 2 + 1e-7).all()
    rows, row_scale = layers.quantize(jnp.asarray(weights.T), axis=-1)
    np.testing.assert_array_equal(rows, values.T)
    np.testing.assert_array_equal(row_scale, scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_int8_layer_multiplies_with_what_its_numbers_stand_for(dtype):
    layer, x = layers.Linear(32, 6, make(dtype, quantized=True)), numbers(4, 32)
    assert layer.kernel[...].dtype == jnp.int8 and layer.kernel_scale[...].dtype == jnp.float32
    weights = np.asarray(layer.kernel[...], np.float64) * np.asarray(layer.kernel_scale[...])
    out = layer(jnp.asarray(x, dtype))
    assert out.dtype == dtype
    atol = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(out, np.float32), x @ weights, atol=atol)


def test_an_int8_layer_stays_inside_the_range_of_float16():
    """The product with the integers alone would be 3000 * 127 * 64."""
    layer = layers.Linear(64, 8, make(jnp.float16, quantized=True))
    values, scale = layers.quantize(jnp.full((64, 8), 0.01))
    layer.kernel.set_value(values)
    layer.kernel_scale.set_value(scale)
    out = layer(jnp.full((1, 64), 3000, jnp.float16))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, 3000 * 0.01 * 64, rtol=0.01)
