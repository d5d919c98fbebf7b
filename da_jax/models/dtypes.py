"""What a model computes in: the meaning of `auto`, and what cannot be had on a device."""

from __future__ import annotations

from da_jax.kernels.chips import Target

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}
"""Dtypes of keys and values by their short names; `auto` is that of the activations."""
_OLD_GPUS = ("volta", "turing")
_FIRST_CAPABILITY = 8
_TOO_LARGE_FOR_FLOAT16 = ("gemma3", "gemma4")


def resolve(name: str, family: str, target: Target) -> str:
    """The dtype of activations, and of what else is not in 8 bits, by its name.

    `auto` is float32 on a CPU, where products of narrower numbers are several times slower, and
    bfloat16 on an accelerator. GPUs before compute capability 8.0 have no bfloat16: XLA would make
    float32 copies of the weights at every step. There it is float16, or float32 for a model whose
    activations leave the range of float16.

    Args:
      name: `auto`, `float32`, `bfloat16` or `float16`.
      family: `ModelConfig.family`.
      target: the device, see `da_jax.kernels.chips.current_target`.

    Raises:
      ValueError: an unknown name, or a dtype that the device has not or the model cannot live with.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    chosen = automatic(family, target) if name == "auto" else name
    if reason := problem(chosen, family, target):
        best = automatic(family, target)
        raise ValueError(f"dtype {chosen}: {reason}; use {best}, which `auto` chooses here")
    return chosen


def resolve_kv(name: str, dtype: str, target: Target) -> str:
    """The dtype of the pages of keys and values, by its short name.

    Args:
      name: one of `KV_DTYPES`.
      dtype: of the activations.
      target: the device.

    Raises:
      ValueError: an unknown name, or a dtype that the device has not.
    """
    if name not in KV_DTYPES:
        raise ValueError(f"kv_dtype is {name!r}; it must be one of {', '.join(KV_DTYPES)}")
    if name == "fp8" and target.platform == "gpu" and _before(target, 8, 9, (*_OLD_GPUS, "ampere")):
        raise ValueError(
            f"kv_dtype fp8: {target.kind} has no 8-bit floats (GPUs of compute capability 8.9 or "
            "newer have); use int8"
        )
    return KV_DTYPES[name] or dtype


def automatic(family: str, target: Target) -> str:
    """What `auto` means; see `resolve`."""
    if target.platform == "cpu":
        return "float32"
    if _has_bfloat16(target):
        return "bfloat16"
    # Recurrent models too: their memory, decay and sums are float32 in any case.
    return "float32" if family in _TOO_LARGE_FOR_FLOAT16 else "float16"


def problem(name: str, family: str, target: Target) -> str | None:
    """Why a model cannot be computed in a dtype on a device, None if it can."""
    if name == "bfloat16" and not _has_bfloat16(target):
        return f"{target.kind} has no bfloat16 (GPUs of compute capability 8.0 or newer have)"
    if name == "float16" and family in _TOO_LARGE_FOR_FLOAT16:
        return f"activations of {family} leave float16's range (65,504) and become infinite"
    if name == "float16" and target.platform == "tpu":
        return f"{target.kind} does not compute in it, and no attention kernel of TPUs takes it"
    return None


def _has_bfloat16(target: Target) -> bool:
    """Whether a device computes in bfloat16, as all do but older NVIDIA GPUs."""
    if target.platform != "gpu":
        return True
    return not _before(target, _FIRST_CAPABILITY, 0, _OLD_GPUS)


def _before(target: Target, major: int, minor: int, families: tuple[str, ...]) -> bool:
    """Whether a GPU is of one of the families, or of a lower compute capability."""
    # How `chips.describe` calls an architecture that has no name there.
    numbers = target.family.removeprefix("compute capability ").split(".")
    known = len(numbers) == 2 and all(number.isdigit() for number in numbers)
    old = known and (int(numbers[0]), int(numbers[1])) < (major, minor)
    return old or target.family in families
