import contextlib

import pytest
from support import eval_tasks

from da_jax import LLM, EngineConfig
from da_jax.evals import planning, run
from da_jax.evals.folder import open_folder
from da_jax.evals.planning import Prompts, Selection
from da_jax.evals.records import Record

ENGINE = EngineConfig(
    page_size=16, max_model_len=352, max_num_seqs=2, prefill_chunk=64, burst=4, max_waiting=4,
    kv_cache_bytes=2**24,
)  # fmt: skip


class Lab:
    """Runs selections of the facts on the shipped checkpoint."""

    def __init__(self) -> None:
        self.llm = LLM.from_pretrained("tiny", config=ENGINE)
        self.prompts = Prompts(self.llm.renderer, self.llm.tokenizer)

    def selection(self, **changes) -> Selection:
        given = {"tasks": tuple(eval_tasks.TASKS.values()), "lengths": (120, 200), "n": 3}
        return Selection(**given | changes)

    @contextlib.contextmanager
    def folder(self, path, selection, **changes):
        settings = planning.settings(selection, self.prompts) | changes
        with open_folder(path, settings, {"model": "tiny"}) as folder:
            yield folder

    def run(self, path, selection=None, **options) -> int:
        selection = selection or self.selection()
        plan = planning.make(selection, self.prompts)
        with self.folder(path, selection) as folder:
            return run.evaluate(self.llm, selection, plan, self.prompts, folder, **options)

    @staticmethod
    def records(path) -> dict:
        lines = (path / "records.jsonl").read_text().splitlines()
        records = [Record.from_json(line) for line in lines]
        assert len({record.key for record in records}) == len(records)
        return {record.key: record for record in records}


@pytest.fixture(scope="session")
def lab():
    return Lab()


@pytest.fixture(scope="session")
def undisturbed(lab, tmp_path_factory):
    """The folder of a whole run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert lab.run(path) == 0
    return path
