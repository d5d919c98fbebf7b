"""Whole models compiled for chips that are not there."""

import importlib.util

import pytest
from support import tiny

from da_jax.engine import aot
from da_jax.kernels.aot import machines


def test_unknown_models_and_targets_are_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match="the nearest are"):
        aot.rows(aot.Plan("gemma-4-32B"), ["v5e"])
    with pytest.raises(ValueError, match="unknown target 'v99'"):
        aot.rows(aot.Plan("gemma-4-31B"), ["v99"])


def test_a_missing_compiler_is_a_row_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(machines, "installed", lambda machine: False)
    (row,) = aot.rows(aot.Plan("gemma-4-31B"), ["v5e"])
    assert not row["ok"] and "pip install 'da-jax[aot]'" in row["error"]


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("case", "devices"), [("gemma4_e2b", 1), ("qwen3_5_moe", 2)])
def test_prefill_and_decode_compile_for_a_tpu_and_update_the_caches_in_place(
    tmp_path, case, devices
):
    folder = tiny.write_folder(tmp_path / "model", case)
    plan = aot.Plan(str(folder), 2, 512, int8=case == "gemma4_e2b", devices=devices)
    rows = aot.rows(plan, ["v5e"])
    assert [(row["program"], row["ok"], row["error"]) for row in rows] == [
        ("prefill, 512 tokens", True, ""),
        ("decode, batch 2", True, ""),
        ("copy of a slot", True, ""),
    ]
    assert all(row["argument_bytes"] > row["cache_bytes"] > 0 for row in rows)
