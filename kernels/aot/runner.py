"""Runs the checks of each machine in a process of its own.

A compiler that meets a kernel for another chip may abort, and what it made for one GPU it may hand
out again for the next. So every machine has a child process, and where that dies the check at fault
becomes a row and the rest go on in a fresh one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from da_jax.kernels.aot import machines
from da_jax.kernels.aot.check import Checker
from da_jax.kernels.aot.machines import Machine
from da_jax.kernels.aot.matrix import BACKENDS, Check, plan

Row = dict[str, Any]

SECONDS = 300.0
SECONDS_FULL = 3600.0
_MARK = "@aot "  # compilers write to the same stream
_READY = "ready"
_LONGEST_ERROR = 2000


def rows(
    targets: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    full: bool = False,
    *,
    seconds: float | None = None,
    workers: int | None = None,
) -> list[Row]:
    """Compiles attention for machines that are not there.

    Args:
        targets: names of chips, see `MACHINES`; None is all.
        backends: names of backends; None is all, and what is chosen by default.
        full: everything, and not just the part that is quick.
        seconds: most time for one machine.
        workers: processes at a time; as many as there are cores by default.

    Returns:
        Rows `target, backend, case, ok, error, seconds`, and for what was compiled `temp_bytes`,
        `budget_bytes` and where known `shared_bytes`, `registers` and `spills`.

    Raises:
        ValueError: an unknown target or backend, or backends that are made for none of the targets.
    """
    wanted = machines.named(targets)
    unknown = [name for name in backends or () if name not in BACKENDS]
    if unknown:
        raise ValueError(f"unknown backend {unknown[0]!r}: choose from {', '.join(BACKENDS)}")
    if not any(plan(machine, backends, full) for machine in wanted):
        names = ", ".join(machine.chip.name for machine in wanted)
        raise ValueError(f"{', '.join(backends or ())} is not made for {names}: nothing to compile")
    limit = seconds or (SECONDS_FULL if full else SECONDS)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        found = pool.map(lambda machine: _machine(machine, backends, full, limit), wanted)
        return [row for part in found for row in part]


def _machine(
    machine: Machine, backends: Sequence[str] | None, full: bool, seconds: float
) -> list[Row]:
    """The rows of one machine, from as many children as it takes."""
    checks = plan(machine, backends, full)
    if not checks:
        return []
    if not machines.installed(machine):
        return [_row(machine, "compiler", machines.INSTALL)]
    done: list[Row] = []
    deadline = time.monotonic() + seconds
    while len(done) < len(checks):
        arguments = [machine.name, *(f"--backend={name}" for name in backends or ())]
        arguments += [*(["--full"] if full else []), f"--start={len(done)}"]
        ready, fresh, error = _child(machine, arguments, deadline - time.monotonic())
        late = time.monotonic() > deadline
        error = f"not done within {seconds:g} s" if late else error
        if not ready:
            return [*done, _row(machine, "compiler", error)]
        done += fresh
        lost = checks[len(done) :] if late else checks[len(done) : len(done) + 1]
        done += [_row(machine, check, error) for check in lost]
    return done


def _row(machine: Machine, check: Check | str, error: str) -> Row:
    name, backend = (check, "") if isinstance(check, str) else (check.name, check.backend)
    return _head(machine, backend, name) | {"error": error}


def _head(machine: Machine, backend: str, case: str) -> Row:
    where = {"target": machine.name, "backend": backend, "case": case}
    return where | {"ok": False, "error": "", "seconds": None, "temp_bytes": None}


def _command(arguments: Sequence[str]) -> list[str]:
    # -P: the installed package, and not a folder of its name where the command is given.
    return [sys.executable, "-P", "-m", "da_jax.kernels.aot", "--child", *arguments]


def _child(
    machine: Machine, arguments: Sequence[str], seconds: float
) -> tuple[bool, list[Row], str]:
    """Runs one child: whether it could describe the machine, its rows, and why it ended."""
    with tempfile.TemporaryDirectory(prefix="da-jax-aot-") as scratch:
        process = subprocess.Popen(
            _command([*arguments, f"--scratch={scratch}"]),
            env=machines.environment(machine, Path(scratch)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    lines = [line for line in out.splitlines(keepends=True) if line.startswith(_MARK)]
    said = [json.loads(line[len(_MARK) :]) for line in lines if line.endswith("\n")]
    return said[:1] == [_READY], said[1:], _last_words(process.returncode, err)


def _last_words(code: int, err: str) -> str:
    """Why a process ended: its signal or exit code, and the line of its output that tells most."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|fatal|check failed", line, re.I)]
    words = telling[0] if telling else lines[-1] if lines else "it said nothing"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {words}"[:_LONGEST_ERROR]


def child(name: str, backends: Sequence[str] | None, full: bool, start: int, scratch: Path) -> None:
    """Does the checks of a machine from number `start` on; prints a line for each."""
    machine = machines.MACHINES[name]
    checker = Checker(machine, machines.devices(machine), scratch)
    _say(_READY)
    for check in plan(machine, backends, full)[start:]:
        began = time.monotonic()
        row = _head(machine, check.backend, check.name) | checker.run(check)
        row["error"] = row["error"][:_LONGEST_ERROR]
        _say(row | {"seconds": round(time.monotonic() - began, 2)})


def _say(thing: Any) -> None:
    print("\n" + _MARK + json.dumps(thing), flush=True)
