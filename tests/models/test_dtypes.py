"""The dtype a model computes in, by device and family."""

import pytest

from da_jax.kernels.chips import describe
from da_jax.models.dtypes import resolve

CPU = describe("cpu", "cpu")
V5E = describe("tpu", "TPU v5 lite")
T4 = describe("cuda", "Tesla T4", "7.5")
V100 = describe("cuda", "Tesla V100-SXM2-16GB", "7.0")
P100 = describe("cuda", "Tesla P100-PCIE-16GB", "6.0")
L4 = describe("cuda", "NVIDIA L4", "8.9")
ORIN = describe("cuda", "Orin", "8.7")
MI300 = describe("rocm", "AMD Instinct MI300X", "gfx942")
OLD = (T4, V100, P100)
NEW = (V5E, L4, ORIN, MI300)

HALF = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
GEMMA = ("gemma3", "gemma4")

kind = lambda target: target.kind if hasattr(target, "kind") else None


@pytest.mark.parametrize("family", HALF + GEMMA)
def test_auto_is_float32_on_a_cpu(family):
    assert resolve("auto", family, CPU) == "float32"


@pytest.mark.parametrize("family", HALF + GEMMA)
@pytest.mark.parametrize("target", NEW, ids=kind)
def test_auto_is_bfloat16_where_the_device_has_it(target, family):
    assert resolve("auto", family, target) == "bfloat16"


@pytest.mark.parametrize("target", OLD, ids=kind)
def test_auto_on_an_old_gpu_follows_the_range_of_the_model(target):
    assert {resolve("auto", family, target) for family in HALF} == {"float16"}
    assert {resolve("auto", family, target) for family in GEMMA} == {"float32"}


@pytest.mark.parametrize("family", HALF + GEMMA)
@pytest.mark.parametrize("target", [CPU, *NEW, *OLD], ids=kind)
def test_float32_can_be_had_everywhere(target, family):
    assert resolve("float32", family, target) == "float32"


@pytest.mark.parametrize("target", [CPU, *NEW], ids=kind)
def test_bfloat16_on_demand(target):
    assert resolve("bfloat16", "gemma4", target) == "bfloat16"


@pytest.mark.parametrize("target", [CPU, L4, MI300, *OLD], ids=kind)
def test_float16_on_demand(target):
    assert resolve("float16", "qwen3_5", target) == "float16"


@pytest.mark.parametrize("target", OLD, ids=kind)
def test_bfloat16_is_refused_on_an_old_gpu(target):
    for family, remedy in (("qwen3", "float16"), ("gemma3", "float32")):
        with pytest.raises(
            ValueError, match=rf"bfloat16: {target.kind} has no bfloat16.*use {remedy}"
        ):
            resolve("bfloat16", family, target)


@pytest.mark.parametrize("family", GEMMA)
@pytest.mark.parametrize("target, remedy", [(CPU, "float32"), (L4, "bfloat16"), (T4, "float32")])
def test_gemma_in_float16_is_refused_anywhere(target, remedy, family):
    with pytest.raises(ValueError, match=rf"float16: activations of {family}.*use {remedy}"):
        resolve("float16", family, target)


def test_float16_is_refused_on_a_tpu():
    with pytest.raises(ValueError, match=r"float16: TPU v5 lite does not compute.*use bfloat16"):
        resolve("float16", "qwen3", V5E)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"'int8'; it must be one of auto, float32"):
        resolve("int8", "qwen3", CPU)
