"""The folder of a run: its settings, its records, and a lock, safe against interruptions."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from da_jax.evals.records import Record

SETTINGS, RECORDS, UNSCORED, LOCK = "settings.json", "records.jsonl", "unscored.jsonl", "lock"
_BLOCK = 2**20  # bytes that are read at a time from the end of a file
Key = tuple[str, int, int, str]


class RunFolder:
    """What a run has so far, and where the rest goes. See `open_folder`.

    Attributes:
      path: the folder.
      prompts: {key: prompt_sha256} of the records that are there.
      scores: {arm: [sum of scores, records]}.
      unscored: responses whose scoring failed, by key.
      reason: why the last of them failed in this run; empty if none did.
      notes: what was found and mended.
    """

    def __init__(self, path: Path):
        self.path = path
        self.notes: list[str] = []
        self.reason = ""
        self.prompts: dict[Key, str] = {}
        self.scores: dict[str, list[float]] = {}
        for name in (RECORDS, UNSCORED):
            if dropped := _drop_torn_line(path / name):
                self.notes.append(
                    f"{path / name}: the last line, of {dropped} bytes, was cut off by an "
                    "interruption and is dropped; its response is made again"
                )
        for record in read_records(path):
            self._count(record)
        self.unscored = {
            record.key: record for record in _unscored(path) if record.key not in self.prompts
        }
        self._records: IO[bytes] = (path / RECORDS).open("ab")

    def add(self, record: Record) -> None:
        """Appends a record; when this returns it is on disk."""
        _append(self._records, record.to_json())
        self._count(record)
        self.unscored.pop(record.key, None)

    def keep_unscored(self, record: Record, reason: str) -> None:
        """Keeps a response that could not be scored (its score is void) for the next resumption."""
        self.unscored[record.key] = record
        self.reason = reason
        line = json.dumps({"reason": reason, "record": json.loads(record.to_json())})
        with (self.path / UNSCORED).open("ab") as file:
            _append(file, line)

    def close(self) -> None:
        """Closes the files, and removes that of unscored responses if there are none."""
        self._records.close()
        if not self.unscored:
            (self.path / UNSCORED).unlink(missing_ok=True)

    def _count(self, record: Record) -> None:
        if record.key in self.prompts:
            raise ValueError(
                f"{self.path / RECORDS} has two records of {record.key}; it was put together by "
                "hand. Remove one of them"
            )
        self.prompts[record.key] = record.prompt_sha256
        sums = self.scores.setdefault(record.arm, [0.0, 0])
        sums[0] += record.score
        sums[1] += 1


@contextlib.contextmanager
def open_folder(
    path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[RunFolder]:
    """Opens a folder for one writer: a new one, or one with the same settings to go on with.

    Args:
      path: the folder; created.
      settings: what responses depend on, also device and versions, in values that JSON can hold.
      about: what else reports should know; of a folder that exists the old one stays.

    Raises:
      ValueError: another process writes there, the settings are not those that are there, or a file
        is damaged.
    """
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        _agree(path, json.loads(json.dumps(settings)), about)
        folder = RunFolder(path)
        try:
            yield folder
        finally:
            folder.close()


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, about) of a folder.

    Raises:
      ValueError: it has none, or they are damaged.
    """
    try:
        value = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
        return value["settings"], value["about"]
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} has no {SETTINGS}; name a folder that `da-jax eval --out` wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / SETTINGS} is damaged: {error!r}") from error


def read_records(path: Path) -> Iterator[Record]:
    """The records of a folder, in the order in which they came; a torn last line is left out.

    Raises:
      ValueError: a line is damaged.
    """
    for number, line in _lines(path / RECORDS):
        try:
            yield Record.from_json(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path / RECORDS}, line {number} is damaged: {error!r}; remove the line, and "
                "its response is made again"
            ) from error


def count_unscored(path: Path) -> int:
    """Responses of a folder that wait for a score."""
    if not (path / UNSCORED).exists():
        return 0
    scored = {record.key for record in read_records(path)}
    return len({record.key for record in _unscored(path)} - scored)


def _unscored(path: Path) -> Iterator[Record]:
    for number, line in _lines(path / UNSCORED):
        try:
            yield Record.from_json(json.dumps(json.loads(line)["record"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / UNSCORED}, line {number} is damaged: {error!r}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Complete lines with their numbers from 1; of a file that is not there, none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line.decode("utf-8")


def _drop_torn_line(path: Path) -> int:
    """Cuts off what stands after the last newline; returns how many bytes that were."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _BLOCK, 0)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n") + 1) > 0:
                end = start + found
                break
            end = start
        file.truncate(end)
    return size - end


def _append(file: IO[bytes], line: str) -> None:
    file.write(line.encode("utf-8") + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _agree(path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Writes the settings of a folder without responses, else compares them with its own."""
    files = [path / name for name in (RECORDS, UNSCORED)]
    if not any(file.exists() and file.stat().st_size for file in files):
        new = path / f"{SETTINGS}.new"
        new.write_text(json.dumps({"settings": settings, "about": about}, indent=1) + "\n")
        new.replace(path / SETTINGS)
        return
    if not (path / SETTINGS).exists():
        raise ValueError(f"{path} has responses but no {SETTINGS}; name another folder")
    there, here = _flat(read_settings(path)[0]), _flat(settings)
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if different:
        lines = [
            f"  {key}: {_shown(there, key)} there, {_shown(here, key)} now" for key in different
        ]
        raise ValueError(
            f"{path} holds responses that other settings made, which are not mixed; name another "
            "folder, or go on with the settings, device and versions that are there:\n"
            + "\n".join(lines)
        )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dots between the names."""
    flat: dict[str, Any] = {}
    for name, part in value.items():
        if isinstance(part, Mapping):
            flat |= _flat(part, f"{prefix}{name}.")
        else:
            flat[prefix + name] = part
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    text = json.dumps(flat[key], ensure_ascii=False) if key in flat else "nothing"
    return text if len(text) <= 120 else f"{text[:117]}..."


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process, however that ends."""
    import fcntl

    with (path / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"process {file.read().strip() or 'of another user'} writes to {path}; wait for "
                "it, or name another folder"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
