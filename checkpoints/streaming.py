"""Arrays in an Orbax checkpoint, written and read a block at a time.

Orbax writes an array from one buffer, and while it encodes holds most of it a second time. Here it
is given leaves that fill themselves block by block instead, so that memory does not grow with the
largest array. What is on disk is an ordinary Orbax checkpoint, which `ocp.load` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1 as ocp

from da_jax.checkpoints import sources
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.sources import Index, Source, blocks

Progress = Callable[[int], None]  # called with the bytes done since the last call
STATE = "state"  # the name under which Orbax files a tree of arrays
CHUNK = 2**21  # numbers; the unit of compression, and the least that is read
_TOGETHER_BYTES = 16 * 2**20  # of small arrays that are written at the same time
_DATABASE_BYTES = 2**30  # each commit rewrites the index of its database, so this must not grow
_STOP_SECONDS = 60  # a block is written in less
_STOPPED = "the conversion was stopped"
_TIMEOUT = 30 * 24 * 3600  # seconds; Orbax gives up after 20 minutes by default


def write(path: epath.Path, arrays: Mapping[str, Source], progress: Progress) -> None:
    """Writes a checkpoint of the flat dictionary {name: array}; it appears at once, when complete.

    Args:
      path: absolute or remote (`gs://`); must not exist.
      arrays: in the dtypes in which they are stored.
      progress: called from another thread.

    Raises:
      ValueError, OSError: what storage says, such as that the disk is full.
    """
    job = _Job(progress)
    sizes = [nbytes(source) for source in arrays.values()]
    before = itertools.accumulate(sizes, initial=0)
    leaves = {
        name: _Leaf(source, start // _DATABASE_BYTES, job)
        for (name, source), start in zip(arrays.items(), before)
    }
    context = ocp.Context()
    context.asynchronous.timeout_secs = _TIMEOUT
    try:
        with context, _quiet():
            ocp.save_checkpointables(path, {STATE: _Tree(leaves)})
    except BaseException:
        job.stop()  # the thread that writes would go on after an interrupt
        raise


class Store:
    """The arrays of a checkpoint, for one operation, such as a load.

    The index of a checkpoint is read once and kept with the context, so that one that outlives the
    operation would look for the arrays of a folder that has been replaced.

    Args:
      path: the Orbax checkpoint.
    """

    def __init__(self, path: epath.Path):
        self._path, self._context = path, ts.Context(_CACHE)

    def open(self, name: str) -> Stored:
        """An array, read in parts.

        Raises:
          CheckpointError: when it cannot be opened.
        """
        spec = {"driver": "zarr3", "kvstore": _database(self._path / STATE, name), "open": True}
        try:
            return Stored(ts.open(spec, context=self._context).result())
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}") from error


class Stored:
    """An array of a checkpoint, as a `Source`.

    Attributes:
      chunk: the shape in which it is stored; blocks that start at its multiples are read fastest.
    """

    def __init__(self, store: ts.TensorStore):
        self._store = store
        self.shape = tuple(self._store.shape)
        self.dtype = self._store.dtype.numpy_dtype
        self.order = tuple(range(len(self.shape)))
        self.chunk: tuple[int, ...] = tuple(self._store.chunk_layout.read_chunk.shape or ())  # type: ignore[arg-type]

    def read(self, index: Index) -> np.ndarray:
        return self._store[index].read().result()


def checksum(stored: Stored, source: Source | None, progress: Progress) -> tuple[str, bool]:
    """Reads an array back.

    Args:
      stored: the array.
      source: what it was written from, None when that is not at hand.
      progress: called with the bytes done.

    Returns:
      (sha256 of the sha256 of each chunk's bytes in C order, chunks in the order of their grid;
      whether all bytes are those of `source`).
    """
    digests: dict[tuple[int, ...], bytes] = {}
    same = True
    for block in blocks(source or stored, units=stored.chunk, limit=sources.BLOCK // 4):
        value = stored.read(block)
        for cell in _cells(block, stored.chunk):
            inner = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(cell, block))
            part = np.ascontiguousarray(value[inner]).view(np.uint8)
            digests[tuple(c.start for c in cell)] = hashlib.sha256(part.data).digest()
        if source is not None:
            same = same and _bits_equal(value, source.read(block))
        progress(value.nbytes)
    whole = hashlib.sha256(b"".join(digests[key] for key in sorted(digests)))
    return whole.hexdigest(), same


def nbytes(source: Source) -> int:
    """Bytes of the whole array."""
    return math.prod(source.shape) * source.dtype.itemsize


def chunk_shape(shape: tuple[int, ...]) -> list[int]:
    """Halves the number of matrices, then the longer side, until a chunk is small enough.

    Matrices that are split evenly over 2, 4 or 8 devices then end at the borders of chunks, or
    share one with few others.
    """
    chunk = list(shape)
    while math.prod(chunk) > CHUNK:
        axis = 0 if len(chunk) == 3 and chunk[0] > 1 else int(np.argmax(chunk))
        chunk[axis] = -(-chunk[axis] // 2)
    return chunk


class _Job:
    """What the arrays of a checkpoint share while they are written, in another thread."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.stopped = False
        self._writers = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def writer(self) -> Iterator[None]:
        """To be entered while something is written."""
        with self._changed:
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends the writing, and waits until nothing is written any more."""
        self.stopped = True
        with self._changed:
            self._changed.wait_for(lambda: self._writers == 0, timeout=_STOP_SECONDS)


@dataclasses.dataclass
class _Leaf:
    """An array that is still to be written."""

    source: Source
    database: int
    job: _Job

    async def write(self, directory: epath.Path, name: str, context: ts.Context) -> None:
        source = self.source
        chunk = chunk_shape(source.shape)
        spec = {
            "driver": "zarr3",
            "kvstore": _database(directory / f"ocdbt.process_{self.database}", name),
            "metadata": {
                "shape": source.shape,
                "data_type": source.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "zstd", "configuration": {"level": 1}},
                    {"name": "crc32c"},  # a chunk that was damaged cannot be read
                ],
            },
            "store_data_equal_to_fill_value": True,  # else Orbax takes zeros for missing data
            "create": True,
        }
        if self.job.stopped:
            raise InterruptedError(_STOPPED)
        store = await ts.open(spec, context=context)
        pending = None
        try:
            for block in blocks(source, units=chunk):
                if self.job.stopped:
                    raise InterruptedError(_STOPPED)
                value = source.read(block)  # while the block before it is being written
                if pending is not None:
                    await pending
                pending = store[block].write(value, can_reference_source_data_indefinitely=True)
                self.job.progress(value.nbytes)
        finally:
            if pending is not None:
                await pending  # after an error too: it would go on in a folder that is removed


class _LeafHandler:
    """How Orbax writes a `_Leaf`; its name in the checkpoint is that of NumPy arrays."""

    def __init__(self, *, context: ocp.Context | None = None):
        del context

    async def serialize(self, params: Sequence[Any], serialization_context: Any) -> Any:
        async def work() -> None:
            directory = await serialization_context.parent_dir.await_creation()
            for group in _groups(params):
                await _together(group, directory, serialization_context.ts_context)

        return work()


async def _together(group: Sequence[Any], directory: epath.Path, context: ts.Context) -> None:
    """Writes some arrays at once: each waits for the disk, and small ones do little else.

    Returns or raises when none of them is being written any more.
    """
    job: _Job = group[0].value.job

    async def write(param: Any) -> None:
        try:
            await param.value.write(directory, param.name, context)
        except BaseException:
            job.stopped = True
            raise

    with job.writer():
        done = await asyncio.gather(*map(write, group), return_exceptions=True)
    faults = [fault for fault in done if isinstance(fault, BaseException)]
    for fault in sorted(faults, key=lambda fault: isinstance(fault, InterruptedError)):
        raise fault  # those that were stopped because of another come last


def _groups(params: Sequence[Any]) -> Iterator[list[Any]]:
    """Consecutive arrays that are written at the same time: small ones, or one large one."""
    group: list[Any] = []
    size = 0
    for param in params:
        if group and size + nbytes(param.value.source) > _TOGETHER_BYTES:
            yield group
            group, size = [], 0
        group.append(param)
        size += nbytes(param.value.source)
    if group:
        yield group


class _Leaves:
    """The registry of leaf handlers that an Orbax `PyTreeHandler` asks."""

    def get(self, leaf_type: type) -> type:
        return _LeafHandler

    def get_all(self) -> list[tuple[type, type, type]]:
        # Orbax asks for the handler of jax.Array, and warns when there is none.
        return [(jax.Array, jax.Array, _LeafHandler), (_Leaf, _Leaf, _LeafHandler)]

    def get_secondary_typestrs(self, handler_type: type) -> list[str]:
        return ["np.ndarray"]

    def is_handleable(self, leaf_type: type) -> bool:
        return leaf_type is _Leaf


class _Tree(ocp.handlers.StatefulCheckpointable):
    """A tree of `_Leaf`."""

    def __init__(self, leaves: Mapping[str, _Leaf]):
        self._leaves = leaves

    async def save(self, directory: Any) -> Any:
        handler = ocp.handlers.PyTreeHandler(leaf_handler_registry=_Leaves())
        return await handler.save(directory, dict(self._leaves))

    async def load(self, directory: Any) -> Any:
        raise NotImplementedError("read it with ocp.load")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from printing the traceback of an error that it raises all the same."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except KeyboardInterrupt:  # the error in the other thread is still to come
        raise
    except BaseException:
        logger.setLevel(level)
        raise
    logger.setLevel(level)


_CACHE = {"cache_pool#ocdbt": {"total_bytes_limit": 10**8}}


def _database(directory: epath.Path, name: str) -> dict[str, Any]:
    """TensorStore's description of an array in a database of chunks, as Orbax lays it out."""
    text = str(directory)
    remote = "://" in text
    return {
        "driver": "ocdbt",
        "base": f"{text}/" if remote else {"driver": "file", "path": f"{text}/"},
        "path": f"{name}/",
        "cache_pool": "cache_pool#ocdbt",
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8},
    }


def _cells(block: Index, chunk: Sequence[int]) -> Iterator[Index]:
    """The chunks in a block that starts at chunk borders."""
    axes = [
        [
            slice(start, min(start + size, part.stop))
            for start in range(part.start, part.stop, max(size, 1))
        ]
        for part, size in zip(block, chunk)
    ]
    yield from itertools.product(*axes)


def _bits_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether all bytes are equal; unlike `==`, NaN equals itself."""
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    return left.dtype == right.dtype and bool(
        np.array_equal(
            np.ascontiguousarray(left).view(unsigned), np.ascontiguousarray(right).view(unsigned)
        )
    )
