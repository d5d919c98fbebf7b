"""Finding a checkpoint: a folder, the shipped one, `gs://`, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from etils import epath

from da_jax.checkpoints import paths

TINY = Path(__file__).parent / "tiny" / "checkpoint"
SHIPPED = {"tiny": TINY, "tiny-2": TINY.parent / "checkpoint-2"}
"""The checkpoints of the package by name: that of the first and of the second training step."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = (*paths.METADATA, "*.safetensors", "params/**")
_IGNORED = ("original/*", "consolidated*", "onnx/*")  # the same weights in other formats
_LOGIN = "log in with `hf auth login`, or put a token of your account in HF_TOKEN"


def resolve(
    path_or_id: str | os.PathLike[str], *, revision: str | None = None, weights: bool = True
) -> Path | epath.Path:
    """The folder of a checkpoint.

    Args:
      path_or_id: a folder, also `gs://bucket/folder`; `tiny` or `tiny-2`, which ship with the
        package; or a Hugging Face hub id such as `Qwen/Qwen3-0.6B`, which is downloaded into the
        hub's cache. HF_TOKEN is honoured.
      revision: branch, tag or commit on the hub; only for hub ids.
      weights: whether they are downloaded too; without them there are configuration and tokenizer.

    Raises:
      FileNotFoundError: for a name that is none of these, or a hub id that cannot be had; it says
        what to do, such as which licence to accept.
      ValueError: for a revision of what is no hub id, or a remote folder that cannot be read here.
      OSError: when the download cannot be stored.
    """
    name = os.fspath(path_or_id)
    folder = SHIPPED.get(name) or Path(name).expanduser()
    if paths.is_remote(name) or folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for hub ids, and {name!r} is a folder")
        return paths.absolute(name) if paths.is_remote(name) else folder
    if not _ID.fullmatch(name):
        raise FileNotFoundError(
            f"{name!r} is no folder, nor a hub id of the form owner/name, nor 'tiny' or 'tiny-2'"
        )
    return _download(name, revision, _FILES if weights else paths.METADATA)


def _download(name: str, revision: str | None, files: Iterable[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(_IGNORED),
            )
        )
    except errors.GatedRepoError as error:
        reason = (
            f"its authors ask you to accept a licence first. Open https://huggingface.co/{name}, "
            f"accept it there, and {_LOGIN} (a fine-grained token must allow gated repositories)"
        )
        raise _unavailable(name, reason) from error
    except errors.RepositoryNotFoundError as error:
        reason = (
            "there is no such model, or it is private and your account may not read it. Check "
            f"the spelling; for a private model {_LOGIN}"
        )
        raise _unavailable(name, reason) from error
    except errors.RevisionNotFoundError as error:
        reason = (
            f"it has no revision {revision!r}; its branches and tags are on "
            f"https://huggingface.co/{name}/tree/main"
        )
        raise _unavailable(name, reason) from error
    except errors.HfHubHTTPError as error:
        reason = f"the hub answered: {error}"
        if error.response.status_code in (401, 403):
            reason = f"the hub refused your token ({error.response.status_code}); {_LOGIN}"
        raise _unavailable(name, reason) from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = (
            "the hub cannot be reached, and it is not in the cache. Check the network, and that "
            f"HF_HUB_OFFLINE is not set ({error})"
        )
        raise _unavailable(name, reason) from error
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot store the download of {name!r}: {error}. Free space, or put the hub's cache "
            "elsewhere with HF_HOME",
        ) from error


def _unavailable(name: str, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"there is no folder {name!r}, so it was taken for a hub id: cannot get {name!r} from the "
        f"Hugging Face hub: {reason}"
    )
