"""Nothing compiles twice: not in a process, and not in the next one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from da_jax.engine import compilations
from da_jax.engine.rows import Shapes

pytestmark = pytest.mark.long

START = """
import sys
from da_jax import LLM, Style
from support import tiny
from da_jax.engine import compilations
llm = LLM.from_pretrained(sys.argv[1], style=Style(**tiny.STYLE), max_model_len=256)
llm.generate(["a b c"], "what?", forced="<local>", max_tokens=9, logprobs=3)
print(compilations.count(), llm.compilations_after_warmup)
"""


@pytest.mark.parametrize("options", [{}, {"JAX_COMPILATION_CACHE_DIR": "theirs"}])
def test_a_second_start_compiles_nothing(tiny_folder, tmp_path, options):
    environment = os.environ | {
        "DA_JAX_PROGRAMS": str(tmp_path / "ours"), "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **{name: str(tmp_path / folder) for name, folder in options.items()},
    }  # fmt: skip

    def start():
        command = [sys.executable, "-c", START, str(tiny_folder)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        return [int(word) for word in done.stdout.split()]

    compiled, later = start()
    assert compiled > 5 and later == 0
    assert start() == [0, 0]
    assert (tmp_path / "theirs").exists() == bool(options)
    assert (tmp_path / "ours").exists() != bool(options)


def test_the_cache_on_disk_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("DA_JAX_PROGRAMS", "OFF")
    assert compilations.keep() is None and not jax.config.jax_compilation_cache_dir


def test_every_batch_and_chunk_has_a_program(random_llm):
    shapes, runner = random_llm.engine.shapes, random_llm.engine.runner
    for kind, sizes in (("decode", shapes.batches), ("prefill", shapes.chunks)):
        for count in range(1, max(sizes) + 1):
            assert (kind, Shapes.bucket(sizes, count)) in runner._compiled
