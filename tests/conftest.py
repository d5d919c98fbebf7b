import functools
import os
import sys

import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from support import tiny

from da_jax import LLM, EngineConfig, Style

os.environ["DA_JAX_TUNING"] = "off"  # results must not depend on what was measured here
os.environ["DA_JAX_PROGRAMS"] = "off"  # nor on what was compiled
os.environ.setdefault("NPROC", "4")  # interpreting a GPU takes a thread for each warpgroup
# The pool holds two sequences of the greatest length, or four short ones.
PAGE_BYTES = 16 * 3 * 2 * 128 * 4
ENGINE = EngineConfig(
    page_size=16, max_model_len=512, max_num_seqs=4, prefill_chunk=64, burst=8,
    kv_cache_bytes=64 * PAGE_BYTES,
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of a random Qwen 3 with a byte-level tokenizer."""
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def random_llm(tiny_folder):
    """An engine around the random model. Say what it writes with `forced`."""
    return LLM.from_pretrained(tiny_folder, style=Style(**tiny.STYLE), config=ENGINE)


@pytest.fixture
def no_gcsfs(monkeypatch):
    """As installed without the extra `gcs`, wherever the tests run."""
    monkeypatch.delitem(_registry, "gcs", raising=False)
    monkeypatch.setitem(sys.modules, "gcsfs", None)


@pytest.fixture
def bucket(monkeypatch):
    """`gs://bucket` in memory, for all that goes through epath."""
    files = type("Bucket", (MemoryFileSystem,), {"store": {}, "pseudo_dirs": [""]})
    monkeypatch.setitem(_registry, "gcs", files)
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    yield "gs://bucket"
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()


@pytest.fixture(scope="session")
def family_llm(tmp_path_factory):
    """(engine, folder) of a random model by the name of its reference case."""

    @functools.cache
    def llm_and_folder(name):
        folder = tiny.write_folder(tmp_path_factory.mktemp(name) / "model", name)
        return LLM.from_pretrained(folder, style=Style(**tiny.STYLE), config=tiny.ENGINE), folder

    return llm_and_folder
