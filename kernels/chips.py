"""What is known of the chips that JAX runs on: names, memory sizes and peak rates.

Rates are the vendors' peaks (NVIDIA's data sheets, without sparsity; Google Cloud's pages on TPU
versions) for what JAX calls one device: a whole chip where its cores act as one
(TPU v4 and v5p), one of the two cores of a TPU7x.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
        name: what people call it.
        family: devices of one family run the same programs: a TPU generation or a GPU architecture.
        kinds: the words `device_kind` begins with on such a device, as JAX reports it.
        bandwidth: peak bytes a second between the device and its own memory.
        fast_memory: bytes a program can use on chip: VMEM of a TPU core, shared memory of a CUDA
            block.
        cores: TensorCores of a TPU that one program can use, multiprocessors of a GPU.
        memory: bytes of the device's own memory, as it reports them.
        flops: peak operations a second of matrix products in bfloat16 (float16 on a T4), dense; a
            multiplication and an addition are two.
    """

    name: str
    family: str
    kinds: tuple[str, ...]
    bandwidth: float
    fast_memory: int
    cores: int
    memory: int
    flops: float


_MIB = 1 << 20
CHIPS = (
    Chip("TPU v2", "tpu-v2", ("TPU v2",), 0.35e12, 16 * _MIB, 1, 8_192 * _MIB, 22.5e12),
    Chip("TPU v3", "tpu-v3", ("TPU v3",), 0.45e12, 16 * _MIB, 1, 16_384 * _MIB, 61.5e12),
    Chip("TPU v4", "tpu-v4", ("TPU v4",), 1.228e12, 16 * _MIB, 2, 32_768 * _MIB, 275e12),
    Chip(
        "TPU v5e",
        "tpu-v5e",
        ("TPU v5 lite", "TPU v5e"),
        0.819e12,
        128 * _MIB,
        1,
        16_384 * _MIB,
        197e12,
    ),
    Chip(
        "TPU v5p", "tpu-v5p", ("TPU v5", "TPU v5p"), 2.765e12, 64 * _MIB, 2, 97_280 * _MIB, 459e12
    ),
    Chip(
        "TPU v6e",
        "tpu-v6e",
        ("TPU v6 lite", "TPU v6e"),
        1.64e12,
        128 * _MIB,
        1,
        32_768 * _MIB,
        918e12,
    ),
    Chip("TPU7x", "tpu-7x", ("TPU7", "TPU7x"), 3.69e12, 64 * _MIB, 1, 98_304 * _MIB, 1153.5e12),
    Chip("H200", "hopper", ("NVIDIA H200",), 4.8e12, 232448, 132, 143_771 * _MIB, 989e12),
    Chip("H100", "hopper", ("NVIDIA H100",), 3.35e12, 232448, 132, 81_559 * _MIB, 989e12),
    Chip("A100", "ampere", ("NVIDIA A100",), 2.039e12, 166912, 108, 81_920 * _MIB, 312e12),
    Chip(
        "A100 40GB",
        "ampere",
        ("NVIDIA A100-SXM4-40GB",),
        1.555e12,
        166912,
        108,
        40_960 * _MIB,
        312e12,
    ),
    Chip("L4", "ada", ("NVIDIA L4",), 0.3e12, 101376, 58, 23_034 * _MIB, 121e12),
    Chip("T4", "turing", ("Tesla T4", "NVIDIA T4"), 0.32e12, 65536, 40, 15_360 * _MIB, 65e12),
    Chip(
        "B200",
        "blackwell",
        ("NVIDIA B200", "NVIDIA GB200"),
        8e12,
        232448,
        148,
        183_359 * _MIB,
        2250e12,
    ),
)

_FAMILY_OF_CAPABILITY = {
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (12, 0): "blackwell",
}
_SMALL_SHARED_MEMORY = 101376  # of compute capability 8.6, 8.9 and 12.0
_USUAL_CORES = 64


@dataclass(frozen=True)
class Target:
    """The device a program is made for.

    Attributes:
        platform: "cpu", "tpu", "gpu", or another that JAX knows.
        kind: the device's name as JAX reports it.
        family: as in `Chip`; the platform where nothing better is known.
        chip: what is known of the chip, or None.
        fast_memory: as in `Chip`, 0 where unknown.
        cores: as in `Chip`; a guess for an unknown GPU, 1 for other unknown devices.
    """

    platform: str
    kind: str
    family: str
    chip: Chip | None
    fast_memory: int
    cores: int


def chip_of(kind: str) -> Chip | None:
    """Returns the chip whose kind the given one begins with; the longest match counts."""
    found = [
        (len(k), chip)
        for chip in CHIPS
        for k in chip.kinds
        if kind.startswith(k) and not kind[len(k) : len(k) + 1].isalnum()
    ]
    return max(found, key=lambda match: match[0])[1] if found else None


def named(name: str) -> Chip:
    """Returns the chip that people call so, such as "H200", "v5e" or "TPU v5e".

    Raises:
        ValueError: no chip has this name.
    """
    plain = lambda text: text.lower().removeprefix("tpu").strip()
    for chip in CHIPS:
        if plain(chip.name) == plain(name):
            return chip
    known = ", ".join(chip.name for chip in CHIPS)
    raise ValueError(f"unknown chip {name!r}; choose from {known}")


def current_target() -> Target:
    """The device of the abstract mesh in use, where programs are made for another machine, or the
    first local device of this one."""
    import jax  # here, for what only reads the table starts no JAX

    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.local_devices()[0]
    if abstract is not None and abstract.platform is not None:
        if (abstract.platform, abstract.device_kind) != (device.platform, device.device_kind):
            return describe(abstract.platform, abstract.device_kind)
    return describe(device.platform, device.device_kind, getattr(device, "compute_capability", ""))


def describe(platform: str, kind: str, capability: str = "") -> Target:
    """Describes a device by its platform, kind and, on CUDA, compute capability such as "9.0"."""
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    chip = chip_of(kind)
    if chip is not None:
        return Target(platform, kind, chip.family, chip, chip.fast_memory, chip.cores)
    parts = capability.split(".")
    if platform == "gpu" and len(parts) == 2 and all(part.isdigit() for part in parts):
        number = (int(parts[0]), int(parts[1]))
        family = _FAMILY_OF_CAPABILITY.get(number, f"compute capability {capability}")
        large = number in ((8, 0), (9, 0), (10, 0), (10, 3))
        model = {"ampere": "A100", "hopper": "H100", "blackwell": "B200"}.get(family)
        memory = next((c.fast_memory for c in CHIPS if large and c.name == model), 0)
        cores = 132 if family == "hopper" else _USUAL_CORES
        return Target(platform, kind, family, None, memory or _SMALL_SHARED_MEMORY, cores)
    return Target(platform, kind, platform, None, 0, 1)
