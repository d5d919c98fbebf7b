"""Where the public data comes from, under which licence, and how its files are read."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from da_jax.evals.judge import Judge

NONE_STATED = "none stated"


class SourceError(ValueError):
    """A source that cannot be used: what is missing, and what to do."""


@dataclasses.dataclass(frozen=True)
class PublicOptions:
    """How public tasks are read and judged.

    Attributes:
      folder: data folder, with one folder for each source (see `Source.files`).
      allow_download: fetch what is missing from the hub, after its licence was compared.
      accepted: names of sources whose licence you accept although its owner states none, or states
        another one on the hub than the table below.
      judge: scores free-form answers; tasks that need one are an error without it.
      show: told each source with its licence before any of its examples is read.
    """

    folder: Path | str = "data"
    allow_download: bool = False
    accepted: frozenset[str] = frozenset()
    judge: Judge | None = None
    show: Any = print


@dataclasses.dataclass(frozen=True)
class Source:
    """A public data set.

    Attributes:
      name: of its folder in the data folder.
      licence: as its owner states it; SPDX in lower case where the hub's card has one.
      terms: what else is to know of it.
      home: where people get it.
      hub: its id on the hub; empty where it is generated.
    """

    name: str
    licence: str
    terms: str
    home: str
    hub: str = ""


SOURCES = {
    source.name: source
    for source in (
        Source(
            "ruler",
            "apache-2.0",
            "the code that generates it; the essays and SQuAD that it can put in have terms of "
            "their own",
            "https://github.com/NVIDIA/RULER (scripts/data/prepare.py)",
        ),
        Source(
            "longbench",
            NONE_STATED,
            "the code is MIT; the data sets that it is made of have terms of their own",
            "https://huggingface.co/datasets/THUDM/LongBench",
            "THUDM/LongBench",
        ),
        Source(
            "longbench-v2",
            "apache-2.0",
            "",
            "https://huggingface.co/datasets/THUDM/LongBench-v2",
            "THUDM/LongBench-v2",
        ),
        Source(
            "loogle",
            "cc-by-sa-4.0",
            "name the authors, and share what you derive under the same licence",
            "https://huggingface.co/datasets/bigai-nlco/LooGLE",
            "bigai-nlco/LooGLE",
        ),
        Source(
            "zero_scrolls",
            NONE_STATED,
            "the data sets that it is made of have terms of their own",
            "https://huggingface.co/datasets/tau/zero_scrolls",
            "tau/zero_scrolls",
        ),
    )
}


def rows(
    source: Source, local: tuple[str, ...], remote: str, options: PublicOptions
) -> Iterator[dict[str, Any]]:
    """The rows of a file of a source, after its licence was checked and shown.

    Args:
      source: the source.
      local: names that the file may have below the source's folder; the first is the published one.
      remote: its path on the hub.
      options: where to look.

    Raises:
      SourceError: the licence is not accepted, or the file is missing or damaged.
    """
    if source.licence == NONE_STATED and source.name not in options.accepted:
        raise SourceError(
            f"{source.name} states no licence ({source.terms}); read its terms at {source.home}, "
            f"and pass --accept {source.name} (accepted={{{source.name!r}}}) if you may use it"
        )
    folder = Path(options.folder) / source.name
    path = next((folder / name for name in local if (folder / name).is_file()), None)
    if path is None and not (options.allow_download and source.hub):
        hint = ", or pass --allow-download (allow_download=True)" if source.hub else ""
        raise SourceError(
            f"{folder / local[0]} is missing; get it from {source.home} and put it there{hint}"
        )
    if path is None:
        path = _download(source, remote, options)
    options.show(f"{source.name}: {source.licence}. {source.terms or source.home}")
    yield from _read(path, local[0])


def _download(source: Source, remote: str, options: PublicOptions) -> Path:
    """Fetches one file from the hub, if its card states the licence that we list."""
    from huggingface_hub import HfApi, hf_hub_download

    card = HfApi().dataset_info(source.hub).card_data
    stated = str((card.get("license") if card else None) or NONE_STATED).lower()
    if stated != source.licence and source.name not in options.accepted:
        raise SourceError(
            f"{source.hub} states the licence {stated!r}, not {source.licence!r}; read its terms "
            f"at {source.home}, and pass --accept {source.name} (accepted={{{source.name!r}}}) "
            "if you may use it"
        )
    return Path(hf_hub_download(source.hub, remote, repo_type="dataset"))


def _read(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSON list, of JSON lines, or of JSON lines in a zip."""
    try:
        if zipfile.is_zipfile(path):
            wanted = Path(name).name
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.namelist() if Path(m).name == wanted]
                if not members:
                    raise SourceError(f"{path} holds no {wanted}, but {archive.namelist()[:9]}")
                with archive.open(members[0]) as file:
                    yield from _lines(io.TextIOWrapper(file, "utf-8"), path)
            return
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[":
                file.seek(0)
                yield from json.load(file)
                return
            file.seek(0)
            yield from _lines(file, path)
    except (UnicodeDecodeError, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} is damaged ({error}); get it again") from error


def _lines(file: Any, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise SourceError(f"{path}, line {number}: no JSON object; get the file again")
        yield row
