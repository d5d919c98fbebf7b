"""Arrays that are read in parts: what a parameter is made of, without holding it in memory.

int8 weights are made here and not with qwix, which (0.1.8) quantises nothing in a product that is
written as `x @ kernel`; where it is written with `dot_general` it takes linear layers only, no
embeddings and no experts, and needs each tensor whole.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import ml_dtypes  # also teaches NumPy bfloat16, which safetensors needs
import numpy as np
from safetensors import SafetensorError

from da_jax.checkpoints.errors import CheckpointError

Index = tuple[slice, ...]  # one slice for each axis, with start and stop, of step 1
BLOCK = 2**24  # numbers that are read at once; two or three blocks are in memory


class Source(Protocol):
    """An array that can be read in parts.

    Attributes:
      shape: its shape, known without reading.
      dtype: dtype of what `read` returns.
      order: the axes as its file nests them, the outermost first; blocks follow it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    order: tuple[int, ...]

    def read(self, index: Index) -> np.ndarray:
        """The part at `index`; no more than that is read from the file."""
        ...


class Tensor:
    """A tensor of a file, or some of its rows, transposed on the way if need be.

    Args:
      view: a `get_slice` of safetensors, or anything else with `shape` that takes slices.
      shape: shape of the tensor in the file.
      dtype: dtype of the tensor in the file.
      rows: int [R], which entries of one axis, and in what order; None for all.
      axis: which axis that is in the file; negative.
      transpose: whether the last two axes change places (after `rows` is applied).
    """

    def __init__(
        self,
        view: Any,
        shape: tuple[int, ...],
        dtype: np.dtype,
        *,
        rows: np.ndarray | None = None,
        axis: int = -2,
        transpose: bool = False,
    ):
        self._view, self._rows, self._transpose = view, rows, transpose
        self._axis = len(shape) + axis
        self.dtype = dtype
        if rows is not None:
            shape = (*shape[: self._axis], len(rows), *shape[self._axis + 1 :])
        self.order = tuple(range(len(shape)))
        if transpose:
            shape = (*shape[:-2], shape[-1], shape[-2])
            self.order = (*self.order[:-2], self.order[-1], self.order[-2])
        self.shape = shape

    def read(self, index: Index) -> np.ndarray:
        if self._transpose:
            index = (*index[:-2], index[-1], index[-2])
        if self._rows is None:
            value = self._view[index]
        else:
            before, chosen, after = index[: self._axis], index[self._axis], index[self._axis + 1 :]
            rows = self._rows[chosen]
            runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
            parts = [
                self._view[(*before, slice(int(run[0]), int(run[-1]) + 1), *after)] for run in runs
            ]
            value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self._axis)
        return value.swapaxes(-1, -2) if self._transpose else value


class Stack:
    """Sources of one shape along a new first axis."""

    def __init__(self, parts: Sequence[Source]):
        self._parts = parts
        self.shape = (len(parts), *parts[0].shape)
        self.dtype = parts[0].dtype
        self.order = (0, *(axis + 1 for axis in parts[0].order))

    def read(self, index: Index) -> np.ndarray:
        return np.stack([part.read(index[1:]) for part in self._parts[index[0]]])


class Reported:
    """A source whose file is named when it cannot be read, in a CheckpointError.

    Args:
      source: the array.
      name: its name.
      folder: where it is stored.
    """

    def __init__(self, source: Source, name: str, folder: os.PathLike[str]):
        self._source, self._what = source, f"{name} of {os.fspath(folder)}"
        self.shape, self.order, self.dtype = source.shape, source.order, source.dtype

    def read(self, index: Index) -> np.ndarray:
        try:
            return self._source.read(index)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self._what}: {error}") from error


class Cast:
    """A source in another dtype.

    Reading raises a CheckpointError where a finite number is beyond the range of that dtype.

    Args:
      source: floating point numbers.
      dtype: the other dtype, floating point too.
      name: what the error calls the source.
    """

    def __init__(self, source: Source, dtype: np.dtype, name: str = "a tensor"):
        self._source, self._name = source, name
        self.shape, self.order, self.dtype = source.shape, source.order, np.dtype(dtype)
        self._narrower = narrower(self.dtype, source.dtype)

    def read(self, index: Index) -> np.ndarray:
        value = self._source.read(index)
        with np.errstate(over="ignore"):  # it is checked below
            cast = value.astype(self.dtype, copy=False)
        if (
            self._narrower
            and not np.isfinite(cast).all()
            and np.any(np.isfinite(value) & ~np.isfinite(cast))
        ):
            raise CheckpointError(
                f"{self._name} has numbers beyond the range of {self.dtype} "
                f"({_largest(self.dtype):g}); use bfloat16 or float32"
            )
        return cast


def narrower(dtype: np.dtype, than: np.dtype) -> bool:
    """Whether some finite numbers of one floating point dtype are beyond the range of another."""
    return _largest(np.dtype(dtype)) < _largest(np.dtype(than))


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


class Scales:
    """float32 scales of the int8 form of a source: the largest magnitude along an axis / 127.

    They are small, and kept once they have been computed, a block at a time. Reading raises a
    CheckpointError for weights that are not finite.

    Args:
      source: the weights.
      axis: negative; the axis that a product sums over.
      name: what an error calls the weights.
    """

    def __init__(self, source: Source, axis: int, name: str = "a tensor"):
        self.source, self.axis, self._name = source, axis, name
        shape = list(source.shape)
        del shape[axis]
        self.shape, self.dtype = tuple(shape), np.dtype(np.float32)
        self.order = tuple(range(len(shape)))
        self._values: np.ndarray | None = None

    def read(self, index: Index) -> np.ndarray:
        if self._values is None:
            largest = np.zeros(self.shape, np.float32)
            for block in blocks(self.source):
                part = np.abs(self.source.read(block).astype(np.float32)).max(axis=self.axis)
                where = list(block)
                del where[self.axis]
                largest[tuple(where)] = np.maximum(largest[tuple(where)], part)
            if not np.isfinite(largest).all():
                raise CheckpointError(
                    f"{self._name} has infinite or undefined numbers (NaN), which int8 cannot "
                    "hold; use bfloat16 or float32, or get the checkpoint again"
                )
            self._values = np.where(largest > 0, largest / np.float32(127), np.float32(1))
        return self._values[index]


class Int8:
    """The int8 form of a source: itself divided by its `scales`, rounded to the nearest."""

    def __init__(self, scales: Scales):
        self._scales = scales
        self.shape, self.order = scales.source.shape, scales.source.order
        self.dtype = np.dtype(np.int8)

    def read(self, index: Index) -> np.ndarray:
        where = list(index)
        del where[self._scales.axis]
        scale = np.expand_dims(self._scales.read(tuple(where)), self._scales.axis)
        value = self._scales.source.read(index).astype(np.float32)
        value /= scale
        return np.rint(value, out=value).astype(np.int8)


def blocks(
    source: Source,
    index: Index | None = None,
    *,
    units: Sequence[int] | None = None,
    limit: int | None = None,
) -> Iterator[Index]:
    """Cuts an array, or a part of it, into blocks.

    Args:
      source: the array.
      index: the part; None for all of it.
      units: the borders of blocks are multiples of these, one for each axis; a block may then be
        larger, up to one unit.
      limit: most numbers of a block, `BLOCK` by default.
    """
    limit = limit or BLOCK
    index = index or tuple(slice(0, size) for size in source.shape)
    extents = [part.stop - part.start for part in index]
    units = units or [1] * len(extents)
    steps = list(extents)
    for axis in source.order:
        others = max(1, int(np.prod(steps, dtype=np.int64)) // max(steps[axis], 1))
        if others * steps[axis] <= limit:
            break
        steps[axis] = min(extents[axis], max(1, limit // (others * units[axis])) * units[axis])
    ranges = [
        [
            slice(start, min(start + steps[axis], index[axis].stop))
            for start in range(index[axis].start, index[axis].stop, max(steps[axis], 1))
        ]
        for axis in source.order
    ]
    for chosen in itertools.product(*ranges):
        block = [slice(0)] * len(extents)
        for axis, part in zip(source.order, chosen):
            block[axis] = part
        yield tuple(block)


def fetch(source: Source, index: Sequence[slice] | None = None) -> np.ndarray:
    """Reads a part of a source, or all of it, into one contiguous array, a block at a time."""
    bounds = tuple(
        slice(*part.indices(size)[:2])
        for part, size in zip(index or (slice(None),) * len(source.shape), source.shape)
    )
    out = np.empty([part.stop - part.start for part in bounds], source.dtype)
    for block in blocks(source, bounds):
        where = tuple(
            slice(part.start - b.start, part.stop - b.start) for part, b in zip(block, bounds)
        )
        out[where] = source.read(block)
    return out


def to_jax(source: Source, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on its devices; each device's part is read on its own."""
    return jax.make_array_from_callback(
        source.shape, sharding, lambda index: fetch(source, index), dtype=source.dtype
    )
