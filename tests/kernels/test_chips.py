"""Which chip a device is, by the names that JAX reports."""

import jax
import pytest

from da_jax.kernels import chips


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU7x"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
    ],
)
def test_chips_are_known_by_what_jax_calls_them(kind, name):
    assert chips.chip_of(kind).name == name


@pytest.mark.parametrize("kind", ["NVIDIA L40S", "TPU v50", "cpu", ""])
def test_a_name_that_only_begins_alike_is_another_chip(kind):
    assert chips.chip_of(kind) is None


@pytest.mark.parametrize(
    ("capability", "family", "memory"),
    [
        ("7.5", "turing", 101376),
        ("8.0", "ampere", 166912),
        ("8.6", "ampere", 101376),
        ("8.9", "ada", 101376),
        ("9.0", "hopper", 232448),
        ("12.0", "blackwell", 101376),
        ("13.0", "compute capability 13.0", 101376),
    ],
)
def test_an_unknown_gpu_is_placed_by_its_compute_capability(capability, family, memory):
    target = chips.describe("gpu", "NVIDIA Something", capability)
    assert (target.family, target.fast_memory, target.chip) == (family, memory, None)
    assert target.cores == (132 if family == "hopper" else 64)


def test_programs_for_another_device_are_made_for_that_device():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert chips.current_target().family == "tpu-v5e"
    assert chips.current_target().platform == jax.default_backend()
