import functools

import pytest
from support import tiny

from da_jax import LLM, EngineConfig, Style

ENGINE = EngineConfig(
    page_size=16, max_model_len=512, max_num_seqs=2, prefill_chunk=48, burst=8,
    kv_cache_bytes=2**30,
)  # fmt: skip


@pytest.fixture(scope="session")
def family_llm(tmp_path_factory):
    """(engine, folder) of a random model by the name of its reference case."""

    @functools.cache
    def llm_and_folder(name):
        folder = tiny.write_folder(tmp_path_factory.mktemp(name) / "model", name)
        return LLM.from_pretrained(folder, style=Style(**tiny.STYLE), config=ENGINE), folder

    return llm_and_folder


@pytest.fixture
def bursts(random_llm, monkeypatch):
    """Tokens chosen in each burst, row 0."""
    made, decode = [], random_llm.engine.runner.decode

    def spy(rows, what):
        choice = decode(rows, what)
        made.append(int((choice.token[:, 0] >= 0).sum()))
        return choice

    monkeypatch.setattr(random_llm.engine.runner, "decode", spy)
    return made
