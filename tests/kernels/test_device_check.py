"""The device check in its dry run: everything but the device."""

import json
import sys
import time

import pytest

from da_jax.kernels import device_cases, device_check
from da_jax.kernels.device_cases import CASES, check_case


def run(arguments: list[str], capsys) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as stop:
        device_check.main(arguments)
    return stop.value.code, capsys.readouterr().out


def test_a_dry_run_reports_every_kind_of_row(capsys):
    code, out = run(["--suite", "dry", "--json"], capsys)
    found = json.loads(out)
    assert code == 0 and found["failed"] == found["skipped"] == 0
    assert found["machine"]["platform"] == "cpu" and found["date"]
    results = {row["case"]: row["result"] for row in found["rows"] if "case" in row}
    assert results == {"decode": "ok", "int8": "ok", "head dim 48": "refused"}
    timed = {(row["what"], row["visible"]) for row in found["rows"] if "share" in row}
    assert timed >= {(name, x) for name in ("triton:interpret", "xla") for x in (1.0, 0.5)}
    reasons = {row["what"]: row["detail"] for row in found["rows"] if row.get("result") == "error"}
    assert "cuDNN" in reasons["jax.nn cudnn"]
    assert all(device_check.render(row) for row in found["rows"])


def test_it_refuses_a_machine_without_a_gpu(capsys):
    code, _ = run([], capsys)
    assert code == "needs a CUDA GPU, this is cpu"


def test_what_no_longer_fits_is_listed_as_skipped(monkeypatch):
    rows = list(device_check.follow("dry", "check triton:interpret", time.time() - 1))[1:]
    assert [row["case"] for row in rows] == ["decode", "int8", "head dim 48"]
    assert {row["result"] for row in rows} == {"skipped"}
    assert "no time left" in device_check.render(rows[0])


def dying(suite_name: str, part: str, start: int, deadline: float) -> list[str]:
    """A child that dies at its second job, the first time it comes to it."""
    lines = [
        "import json, os, sys",
        f"for i in range({start}, 3):",
        "    if i == 1: sys.stderr.write('no such instruction\\n'); sys.stderr.flush(); os.abort()",
        "    print(json.dumps({'done': i, 'rows': [{'case': i, 'result': 'ok'}]}), flush=True)",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def test_a_crash_costs_one_line(monkeypatch):
    monkeypatch.setattr(device_check, "_command", dying)
    rows = list(device_check.follow("dry", "check triton:interpret", time.time() + 60))
    assert [row["result"] for row in rows] == ["ok", "crash", "ok"]
    assert rows[1]["case"] == "int8" and rows[1]["detail"].endswith("-6: no such instruction")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_its_answers_are_right(case):
    [row] = check_case(case, "xla")
    assert row["result"] == "ok", row


def test_a_wrong_output_fails(monkeypatch):
    attend = device_cases.paged_attention
    monkeypatch.setattr(
        device_cases, "paged_attention", lambda *a, **k: [x * 1.1 for x in attend(*a, **k)]
    )
    [row] = check_case(CASES[0], "xla")
    assert row["result"] == "FAIL" and row["error"] > 0.02


def test_suites_cover_what_the_report_promises():
    parts = device_check.jobs(device_check.SUITES["full"])
    assert list(parts) == ["check mosaic_gpu", "check triton", "speed"]
    assert len(parts["check triton"]) == len(CASES)
    assert len(parts["speed"]) == 1 + 3 * 4 * 6
    assert 0 < len(device_check.jobs(device_check.SUITES["quick"])["speed"]) < 20
