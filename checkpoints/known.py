"""What is known of a model by its name alone, without its weights or JAX.

The network is needed for a folder on `gs://` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from etils import epath

from da_jax.checkpoints import hub, paths, record
from da_jax.models import catalog, hf_config
from da_jax.models.config import ModelConfig


class Known(NamedTuple):
    """A model that was found.

    Attributes:
      source: where its configuration comes from, in words.
      config: the configuration.
      int8: whether its weights are stored in 8 bits.
    """

    source: str
    config: ModelConfig
    int8: bool = False


def find(name: str) -> Known:
    """Finds a model.

    Args:
      name: `tiny`, `tiny-2`, a folder with a `config.json` (also on `gs://`), a hub id that is in
        the hub's cache, or a size of the catalogue.

    Raises:
      ValueError: for any other name.
      ConfigError: for a configuration that is not computed here.
      CheckpointError: for a conversion that did not finish.
    """
    if name in hub.SHIPPED:
        return Known("ships with the package", hf_config.read(hub.SHIPPED[name]))
    if paths.is_remote(name):
        return _read(paths.absolute(name))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _cached(name) or folder
    if folder.is_dir():
        return _read(folder)
    if size := catalog.find(name):
        return Known(f"catalogue: {size}", hf_config.parse(catalog.hf_config(size)))
    raise ValueError(
        f"{catalog.unknown(name)}. A folder with a config.json or the id of a cached hub "
        "repository does as well"
    )


def _read(folder: Path | epath.Path) -> Known:
    int8 = record.completed(folder).quantize is not None
    return Known(str(folder), hf_config.read(folder), int8)


def _cached(name: str) -> Path | None:
    """The folder of a hub id in the hub's cache."""
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None
