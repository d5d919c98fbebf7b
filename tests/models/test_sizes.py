"""Sizes: the published tables, the models' own shapes, and the pools.

The tables were computed from the published configurations by another program; the numbers are
compared as printed.
"""

import dataclasses
import math

import pytest

from da_jax.models import catalog, dtypes, hf_config, sizes
from da_jax.models.tensors import tensors

# full/sliding/recurrent/shared layers, parameters and those read by a step (10^9), window,
# vocabulary, positions, KV bytes a token: stored full, stored sliding, read full, read sliding;
# state MB a sequence
LAYOUT = """
gemma-4-31B          10/50/0/0   30.70 30.70 1024 262144 262144  81920 819200  81920 819200   0.0
gemma-4-26B-A4B      5/25/0/0    25.23  3.82 1024 262144 262144  20480 204800  20480 204800   0.0
gemma-4-12B          8/40/0/0    11.91 11.91 1024 262144 262144  16384 327680  16384 327680   0.0
gemma-4-E4B          7/35/0/18    7.46  4.64  512 262144 131072  16384  40960  28672  71680   0.0
gemma-4-E2B          7/28/0/20    4.63  2.28  512 262144 131072   6144  12288  14336  28672   0.0
gemma-3-27b          10/52/0/0   27.01 27.01 1024 262208 131072  81920 425984  81920 425984   0.0
gemma-3-12b          8/40/0/0    11.77 11.77 1024 262208 131072  65536 327680  65536 327680   0.0
gemma-3-4b           5/29/0/0     3.88  3.88 1024 262208 131072  20480 118784  20480 118784   0.0
gemma-3-1b           4/22/0/0     1.00  1.00  512 262144  32768   4096  22528   4096  22528   0.0
Qwen3-0.6B           28/0/0/0     0.60  0.60    - 151936  40960 114688      0 114688      0   0.0
Qwen3-4B             36/0/0/0     4.02  4.02    - 151936  40960 147456      0 147456      0   0.0
Qwen3-8B             36/0/0/0     8.19  7.57    - 151936  40960 147456      0 147456      0   0.0
Qwen3-14B            40/0/0/0    14.77 13.99    - 151936  40960 163840      0 163840      0   0.0
Qwen3-32B            64/0/0/0    32.76 31.98    - 151936  40960 262144      0 262144      0   0.0
Qwen3.5-4B           8/0/24/0     4.21  4.21    - 248320 262144  32768      0  32768      0  51.5
Qwen3.5-9B           8/0/24/0     8.95  7.94    - 248320 262144  32768      0  32768      0  51.5
Qwen3.6-27B          16/0/48/0   26.90 25.62    - 248320 262144  65536      0  65536      0 153.9
Qwen3.6-35B-A3B      10/0/30/0   34.66  2.95    - 248320 262144  20480      0  20480      0  64.4
Qwen3.5-397B-A17B    15/0/45/0  396.35 16.33    - 248320 262144  30720      0  30720      0 192.1
Qwen3-Next-80B-A3B   12/0/36/0   79.67  3.56    - 151936 262144  24576      0  24576      0  77.3
"""
CONTEXTS = [32 * 1024, 128 * 1024, 256 * 1024, 1024 * 1024]
# savable share in percent: of KV and states | of all bytes, batch 1 | of all bytes, batch 8
SHARES = """
gemma-4-31B           76.2  92.8  96.2  99.0 |   4.1  14.7  25.7  58.0 |  24.0  55.8  71.6  91.0
gemma-4-26B-A4B       76.2  92.8  96.2  99.0 |   7.9  25.5  40.6  73.2 |  17.7  46.3  63.3  87.3
gemma-4-12B           61.5  86.5  92.8  98.1 |   2.2   8.2  15.1  41.6 |  13.9  39.3  56.5  83.8
gemma-4-E4B           96.2  99.0  99.5  99.9 |   9.2  28.7  44.6  76.3 |  44.0  75.8  86.3  96.2
gemma-4-E2B           97.0  99.2  99.6  99.9 |   9.3  29.1  45.1  76.7 |  44.6  76.3  86.5  96.3
gemma-3-27b           86.0  96.1  98.0  99.5 |   4.7  16.5  28.3  61.2 |  27.2  59.9  74.9  92.3
gemma-3-12b           86.5  96.2  98.1  99.5 |   8.3  26.5  41.9  74.2 |  39.6  72.4  84.0  95.4
gemma-3-4b            84.7  95.7  97.8  99.4 |   7.8  25.4  40.5  73.2 |  38.1  71.1  83.1  95.2
gemma-3-1b            92.1  97.9  98.9  99.7 |   6.3  21.1  34.8  68.1 |  33.9  67.2  80.4  94.3
Qwen3-0.6B           100.0 100.0 100.0 100.0 |  75.9  92.7  96.2  99.0 |  96.2  99.0  99.5  99.9
Qwen3-4B             100.0 100.0 100.0 100.0 |  37.5  70.6  82.8  95.1 |  82.8  95.1  97.5  99.4
Qwen3-8B             100.0 100.0 100.0 100.0 |  24.2  56.1  71.9  91.1 |  71.9  91.1  95.3  98.8
Qwen3-14B            100.0 100.0 100.0 100.0 |  16.1  43.4  60.6  86.0 |  60.6  86.0  92.5  98.0
Qwen3-32B            100.0 100.0 100.0 100.0 |  11.8  34.9  51.8  81.1 |  51.8  81.1  89.6  97.2
Qwen3.5-4B            91.2  97.7  98.8  99.7 |  11.2  33.5  50.2  80.1 |  48.2  78.8  88.2  96.7
Qwen3.5-9B            91.2  97.7  98.8  99.7 |   6.3  21.2  35.0  68.3 |  34.0  67.3  80.5  94.3
Qwen3.6-27B           87.5  96.5  98.2  99.6 |   4.0  14.3  25.0  57.1 |  24.2  56.1  71.9  91.1
Qwen3.6-35B-A3B       83.9  95.4  97.7  99.4 |  10.0  30.8  47.1  78.1 |  21.7  52.6  68.9  89.9
Qwen3.5-397B-A17B     72.4  91.3  95.4  98.8 |   3.0  10.9  19.6  49.4 |   5.7  19.4  32.6  65.9
Qwen3-Next-80B-A3B    83.9  95.4  97.7  99.4 |  10.0  30.7  46.9  78.0 |  18.8  48.0  64.9  88.1
"""
# speed-up of a step that is bound by memory when a tenth is visible: batch 1 | batch 8
SPEED = """
gemma-4-31B          1.04 1.15 1.30 2.09 | 1.28 2.01 2.81 5.52
gemma-4-26B-A4B      1.08 1.30 1.58 2.93 | 1.19 1.71 2.32 4.68
gemma-4-12B          1.02 1.08 1.16 1.60 | 1.14 1.55 2.03 4.07
gemma-4-E4B          1.09 1.35 1.67 3.19 | 1.65 3.15 4.47 7.44
gemma-4-E2B          1.09 1.36 1.68 3.23 | 1.67 3.19 4.52 7.48
gemma-3-27b          1.04 1.17 1.34 2.23 | 1.32 2.17 3.07 5.90
gemma-3-12b          1.08 1.31 1.60 3.01 | 1.55 2.87 4.10 7.09
gemma-3-4b           1.08 1.30 1.57 2.93 | 1.52 2.78 3.97 6.97
gemma-3-1b           1.06 1.23 1.46 2.58 | 1.44 2.53 3.62 6.59
Qwen3-0.6B           3.16 6.02 7.44 9.19 | 7.44 9.19 9.57 9.89
Qwen3-4B             1.51 2.74 3.92 6.92 | 3.92 6.92 8.14 9.45
Qwen3-8B             1.28 2.02 2.83 5.55 | 2.83 5.55 7.04 9.02
Qwen3-14B            1.17 1.64 2.20 4.42 | 2.20 4.42 5.96 8.48
Qwen3-32B            1.12 1.46 1.87 3.71 | 1.87 3.71 5.16 7.97
Qwen3.5-4B           1.11 1.43 1.82 3.59 | 1.77 3.44 4.84 7.74
Qwen3.5-9B           1.06 1.24 1.46 2.59 | 1.44 2.54 3.62 6.60
Qwen3.6-27B          1.04 1.15 1.29 2.06 | 1.28 2.02 2.83 5.55
Qwen3.6-35B-A3B      1.10 1.38 1.74 3.37 | 1.24 1.90 2.63 5.23
Qwen3.5-397B-A17B    1.03 1.11 1.21 1.80 | 1.05 1.21 1.41 2.46
Qwen3-Next-80B-A3B   1.10 1.38 1.73 3.35 | 1.20 1.76 2.40 4.82
"""
# GB at each context: read in full layers, read elsewhere, stored
GB = """
gemma-4-31B          2.68 0.84 3.52 | 10.74 0.84 11.58 | 21.47 0.84 22.31 | 85.90 0.84 86.74
gemma-4-26B-A4B      0.67 0.21 0.88 | 2.68 0.21 2.89 | 5.37 0.21 5.58 | 21.47 0.21 21.68
gemma-4-12B          0.54 0.34 0.87 | 2.15 0.34 2.48 | 4.29 0.34 4.63 | 17.18 0.34 17.52
gemma-4-E4B          0.94 0.04 0.56 | 3.76 0.04 2.17 | 7.52 0.04 4.32 | 30.06 0.04 17.20
gemma-4-E2B          0.47 0.01 0.21 | 1.88 0.01 0.81 | 3.76 0.01 1.62 | 15.03 0.01 6.45
gemma-3-27b          2.68 0.44 3.12 | 10.74 0.44 11.17 | 21.47 0.44 21.91 | 85.90 0.44 86.34
gemma-3-12b          2.15 0.34 2.48 | 8.59 0.34 8.93 | 17.18 0.34 17.52 | 68.72 0.34 69.06
gemma-3-4b           0.67 0.12 0.79 | 2.68 0.12 2.81 | 5.37 0.12 5.49 | 21.47 0.12 21.60
gemma-3-1b           0.13 0.01 0.15 | 0.54 0.01 0.55 | 1.07 0.01 1.09 | 4.29 0.01 4.31
Qwen3-0.6B           3.76 0.00 3.76 | 15.03 0.00 15.03 | 30.06 0.00 30.06 | 120.26 0.00 120.26
Qwen3-4B             4.83 0.00 4.83 | 19.33 0.00 19.33 | 38.65 0.00 38.65 | 154.62 0.00 154.62
Qwen3-8B             4.83 0.00 4.83 | 19.33 0.00 19.33 | 38.65 0.00 38.65 | 154.62 0.00 154.62
Qwen3-14B            5.37 0.00 5.37 | 21.47 0.00 21.47 | 42.95 0.00 42.95 | 171.80 0.00 171.80
Qwen3-32B            8.59 0.00 8.59 | 34.36 0.00 34.36 | 68.72 0.00 68.72 | 274.88 0.00 274.88
Qwen3.5-4B           1.07 0.10 1.13 | 4.29 0.10 4.35 | 8.59 0.10 8.64 | 34.36 0.10 34.41
Qwen3.5-9B           1.07 0.10 1.13 | 4.29 0.10 4.35 | 8.59 0.10 8.64 | 34.36 0.10 34.41
Qwen3.6-27B          2.15 0.31 2.30 | 8.59 0.31 8.74 | 17.18 0.31 17.33 | 68.72 0.31 68.87
Qwen3.6-35B-A3B      0.67 0.13 0.74 | 2.68 0.13 2.75 | 5.37 0.13 5.43 | 21.47 0.13 21.54
Qwen3.5-397B-A17B    1.01 0.38 1.20 | 4.03 0.38 4.22 | 8.05 0.38 8.25 | 32.21 0.38 32.40
Qwen3-Next-80B-A3B   0.81 0.15 0.88 | 3.22 0.15 3.30 | 6.44 0.15 6.52 | 25.77 0.15 25.85
"""


def rows(table):
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in table.strip().splitlines()]


def config_of(name, layers=None):
    config = catalog.hf_config(name)
    if layers:  # the first ones; where layers share keys and values the last two of them do
        config["num_hidden_layers"] = layers
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:layers]
        if config.get("num_kv_shared_layers"):
            config["num_kv_shared_layers"] = 2
    return hf_config.parse(config)


def traffic(config, batch, context):
    return sizes.traffic(config, batch=batch, context=context, itemsize=2)


@pytest.mark.parametrize(("name", "row"), rows(LAYOUT))
def test_layouts_parameters_and_bytes_a_token(name, row):
    config = config_of(name)
    mixers = [layer.mixer for layer in config.layers]
    counts = [sum(m.kind == kind for m in mixers) for kind in ("full", "sliding", "recurrent")]
    shared = sum(getattr(m, "donor", None) is not None for m in mixers)
    windows = {getattr(m, "window", None) for m in mixers} - {None}
    kv = [
        sizes.kv_bytes_per_token(config, kind, itemsize=2, read=read)
        for read in (False, True)
        for kind in ("full", "sliding")
    ]
    assert row.split() == [
        "/".join(map(str, [*counts, shared])),
        f"{sizes.parameters(config) / 1e9:.2f}",
        f"{sizes.parameters_read(config) / 1e9:.2f}",
        str(max(windows, default="-")),
        str(config.vocab_size),
        str(config.max_positions),
        *map(str, kv),
        f"{sizes.state_bytes_per_sequence(config, itemsize=2) / 1e6:.1f}",
    ]


@pytest.mark.parametrize(("name", "row"), rows(SHARES))
def test_savable_shares(name, row):
    config = config_of(name)
    kv = [f"{traffic(config, 1, n).savable_share_kv * 100:.1f}" for n in CONTEXTS]
    alone, eight = (
        [f"{traffic(config, batch, n).savable_share_all * 100:.1f}" for n in CONTEXTS]
        for batch in (1, 8)
    )
    assert row.split() == [*kv, "|", *alone, "|", *eight]


@pytest.mark.parametrize(("name", "row"), rows(SPEED))
def test_bounds_on_the_speedup(name, row):
    config = config_of(name)
    alone, eight = (
        [f"{traffic(config, batch, n).speedup(0.1):.2f}" for n in CONTEXTS] for batch in (1, 8)
    )
    assert row.split() == [*alone, "|", *eight]


@pytest.mark.parametrize(("name", "row"), rows(GB))
def test_bytes_of_caches_read_and_stored(name, row):
    config = config_of(name)
    for context, printed in zip(CONTEXTS, row.split("|"), strict=True):
        moved = traffic(config, 1, context)
        window = max(getattr(layer.mixer, "window", None) or 0 for layer in config.layers)
        stored = (
            context * sizes.kv_bytes_per_token(config, "full", itemsize=2)
            + window * sizes.kv_bytes_per_token(config, "sliding", itemsize=2)
            + sizes.state_bytes_per_sequence(config, itemsize=2)
        )
        numbers = [moved.full, moved.sliding + moved.states, stored]
        assert printed.split() == [f"{number / 1e9:.2f}" for number in numbers]


# one of each family and option, with as many layers as it takes to have every kind of them
SHAPES = {
    "gemma-4-26B-A4B": 6, "gemma-4-E2B": 7, "gemma-3-1b": 6, "Qwen3-30B-A3B": 1, "Qwen3-8B": 1,
    "Qwen3.5-4B": 4, "Qwen3.5-35B-A3B": 4, "Qwen3-Next-80B-A3B": 4, "Llama-3.2-1B": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_one_of_the_model(name):
    import jax.numpy as jnp
    from flax import nnx

    from da_jax.models import registry

    config = config_of(name, SHAPES[name])
    listed = {tensor.path: tensor for tensor in tensors(config)}
    for int8 in (False, True):
        model = registry.abstract(config, dtype=jnp.bfloat16, quantized=int8)
        arrays = {
            ".".join(map(str, path)): leaf.get_value()
            for path, leaf in nnx.to_flat_state(nnx.state(model))
        }
        scales = {path: arrays.pop(path) for path in set(arrays) - set(listed)}
        assert {path: array.shape for path, array in arrays.items()} == {
            path: tensor.shape for path, tensor in listed.items()
        }
        assert {path.removesuffix("_scale"): math.prod(s.shape) for path, s in scales.items()} == {
            path: tensor.scales for path, tensor in listed.items() if int8 and tensor.scales
        }
        found = sum(
            math.prod(a.shape) * a.dtype.itemsize for a in [*arrays.values(), *scales.values()]
        )
        # a few vectors of the delta rule and of norms may be float32 whatever the dtype
        assert sizes.weight_bytes(config, itemsize=2, int8=int8) == pytest.approx(found, rel=1e-4)


def test_experts_are_read_by_whom_the_batch_chooses():
    assert sizes.distinct_experts(128, 8, 1) == pytest.approx(8)
    assert sizes.distinct_experts(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert sizes.distinct_experts(128, 8, 10_000) == pytest.approx(128)
    config = config_of("gemma-4-26B-A4B")
    everything = sizes.parameters_read(config, 10_000)
    assert everything == pytest.approx(sizes.parameters(config))  # tied: the head is the embedding
    assert sizes.parameters_read(config, 1) < sizes.parameters_read(config, 8) < everything


def test_int8_takes_about_half_and_leaves_the_caches_alone():
    config = config_of("gemma-4-31B")
    plain = sizes.traffic(config, batch=1, context=32_768, itemsize=2)
    int8 = sizes.traffic(config, batch=1, context=32_768, itemsize=2, int8=True)
    assert 0.5 < int8.weights / plain.weights < 0.502
    assert (int8.full, int8.sliding) == (plain.full, plain.sliding)


@pytest.mark.parametrize(
    "name", ["gemma-4-E2B", "gemma-4-31B", "Qwen3.6-27B", "SmolLM2-135M", "tiny"]
)
@pytest.mark.parametrize(
    ("dtype", "context", "kv_dtype"),
    [("bfloat16", 5000, "auto"), ("float32", 100, "auto"), ("bfloat16", 900, "int8")],
)
def test_caches_cost_what_the_engine_plans(name, dtype, context, kv_dtype):
    from da_jax.cache import pools

    config = config_of("Qwen3-0.6B" if name == "tiny" else name)
    if name == "tiny":  # heads of less than 64 numbers, which the pool pads
        layer = config.layers[0]
        mixer = dataclasses.replace(layer.mixer, head_dim=16)
        config = dataclasses.replace(config, layers=(dataclasses.replace(layer, mixer=mixer),))
    plan = pools.plan(
        config, page_size=16, max_tokens=context, sequences=3, longest_step=256, dtype=dtype,
        kv_dtype=dtypes.KV_DTYPES[kv_dtype], budget_bytes=2**60,
    )  # fmt: skip
    use = sizes.Use(
        batch=3, context=context, dtype=dtype, kv_dtype=kv_dtype, page_size=16, prefill_chunk=256
    )
    need = sizes.memory(config, use)
    assert (need.pages, need.rings, need.states) == (
        plan.page_bytes, plan.ring_bytes, plan.state_bytes,
    )  # fmt: skip


def test_keys_and_values_in_8_bits_take_half_and_a_scale_for_each():
    config = config_of("gemma-3-27b")  # heads of 128
    plain, small = (
        sizes.kv_bytes_per_token(config, "full", itemsize=2, quantized=q) for q in (False, True)
    )
    assert small / plain == (128 + 4) / 256
    wide, narrow = (
        sizes.traffic(config, batch=2, context=9000, itemsize=2, kv_quantized=q)
        for q in (False, True)
    )
    assert narrow.full / wide.full == narrow.sliding / wide.sliding == small / plain
    assert narrow.weights == wide.weights
    config = config_of("Qwen3-14B")
    longer = {fit.chip: fit for fit in sizes.fits(config, sizes.Use(batch=32, kv_dtype="fp8"))}
    shorter = {fit.chip: fit for fit in sizes.fits(config, sizes.Use(batch=32))}
    assert longer["H100"].context > 1.7 * shorter["H100"].context > 0
    assert "A100 has no 8-bit floats" in longer["A100"].note and not longer["H100"].note


def test_tables_on_the_host_take_no_device_memory():
    config, use = config_of("gemma-4-E2B"), sizes.Use()
    on_host = sizes.memory(config, dataclasses.replace(use, per_layer_on_host=True))
    table = 262_144 * 35 * 256 * 2
    assert sizes.memory(config, use).total - on_host.total == table
    assert sizes.per_layer_embedding_bytes(config, 2) == table
    assert sizes.per_layer_embedding_bytes(config_of("gemma-4-31B"), 2) == 0


@pytest.mark.parametrize("name", ["gemma-4-26B-A4B", "Qwen3.6-27B", "Qwen3-8B"])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_longest_context_fits_and_one_page_more_does_not(name, batch):
    config, use = config_of(name), sizes.Use(batch=batch)
    found = {fit.chip: fit for fit in sizes.fits(config, use)}
    for fit in found.values():
        use_there = dataclasses.replace(use, dtype=fit.dtype)
        usable = int(fit.memory * sizes.USABLE_SHARE)
        need = [
            sizes.memory(config, dataclasses.replace(use_there, context=max(1, tokens))).total
            for tokens in (fit.context, fit.context + use.page_size)
        ]
        assert (need[0] <= usable) == (fit.context > 0)
        assert fit.context == config.max_positions or need[1] > usable
        assert bool(fit.note) == (fit.context == 0 or fit.dtype != "bfloat16")
    assert found["T4"].context == 0 and "weights need" in found["T4"].note
    assert found["H200"].context >= found["H100"].context > 0


def test_a_t4_has_no_bfloat16():
    small = {fit.chip: fit for fit in sizes.fits(config_of("Qwen3-0.6B"), sizes.Use())}
    assert small["T4"].dtype == "float16" and "Tesla T4 has no bfloat16" in small["T4"].note
    gemma = {fit.chip: fit for fit in sizes.fits(config_of("gemma-3-1b"), sizes.Use())}
    assert gemma["T4"].dtype == "float32" and "float16's range" in gemma["T4"].note
    assert gemma["L4"].dtype == "bfloat16" and gemma["L4"].note == ""


@pytest.mark.parametrize(
    ("name", "batch", "int8", "needed_megabytes"),
    [
        ("Qwen3-0.6B", 1, False, 627.5),
        ("Qwen3-0.6B", 8, False, 627.2),
        ("SmolLM2-135M", 4, False, 117.7),
        ("Qwen3-8B", 1, True, 2494.6),  # a head of its own
    ],
)
def test_a_float16_head_is_widened_to_multiply_one_row(name, batch, int8, needed_megabytes):
    """What `da-jax bench aot --model NAME --target T4` says that the larger program needs."""
    use = sizes.Use(batch=batch, dtype="float16", int8=int8)
    kept = sizes.workspace_bytes(config_of(name), use) / 1e6
    assert needed_megabytes < kept < needed_megabytes + 500


def test_every_chip_of_the_kernels_has_its_memory():
    from da_jax.kernels.chips import CHIPS

    fits = sizes.fits(config_of("Qwen3-0.6B"), sizes.Use())
    assert {fit.chip for fit in fits} == {chip.name for chip in CHIPS}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"context": -1}, "context is -1"),
        ({"page_size": 0}, "page_size is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'"),
    ],
)
def test_uses_out_of_range_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        sizes.Use(**changes)
