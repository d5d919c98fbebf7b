"""Checks and times the attention kernels on the GPU at hand.

    python -P -m da_jax.kernels.device_check [--quick] [--json]

It compares the compiled kernels with a float64 answer, measures how fast the device copies its own
memory, times decode at several visibilities against that, and times the alternatives over a dense
cache. Everything runs in child processes, so that a crash costs one line of the report, and ends
within a time budget: what no longer fits is listed as skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any

import jax

from da_jax.kernels.bench import machine
from da_jax.kernels.device_cases import CASES, Case, check_case
from da_jax.kernels.device_speed import ALTERNATIVES, Decode, measure_copy, time_backend, time_dense

Row = dict[str, Any]

BUDGET_SECONDS = 290.0
_NAMES = {"gpu": "CUDA GPU", "cpu": "CPU"}


@dataclass(frozen=True)
class Suite:
    """What is run.

    Attributes:
        platform: of the device it is for.
        checked: backends that are compared with the answer.
        timed: backends that are timed.
        cases: what is compared.
        decodes: what is timed.
        copied: bytes that are copied to measure the bandwidth.
    """

    platform: str
    checked: tuple[str, ...]
    timed: tuple[str, ...]
    cases: tuple[Case, ...]
    decodes: tuple[Decode, ...]
    copied: int


def _decodes(*heads: tuple[int, int]) -> tuple[Decode, ...]:
    """Decode of layers `(head_dim, kv_heads)` at 32K and 128K, in pools of one size."""
    return tuple(
        Decode(head_dim, kv_heads, context, batch, pool_tokens=8 << 17)
        for head_dim, kv_heads in heads
        for context in (1 << 15, 1 << 17)
        for batch in (1, 8)
    )


_GPU = Suite(
    platform="gpu",
    checked=("mosaic_gpu", "triton"),
    timed=("mosaic_gpu", "triton", "xla"),
    cases=CASES,
    decodes=_decodes((128, 8), (512, 4), (256, 4)),
    copied=1 << 30,
)
SUITES = {
    "full": _GPU,
    "quick": replace(_GPU, decodes=_decodes((128, 8))[:2]),
    "dry": Suite(
        platform="cpu",
        checked=("triton:interpret",),
        timed=("triton:interpret", "xla"),
        cases=(
            Case("decode", head_dim=32, kv_heads=1, group=2, page_size=16),
            Case("int8", head_dim=32, kv_heads=1, kv_dtype="int8", page_size=16),
            Case("head dim 48", head_dim=48),
        ),
        decodes=(Decode(64, 1, 64, 2, 256, (1.0, 0.5), calls=2, q_heads=2, page_size=16),),
        copied=1 << 12,
    ),
}


@dataclass(frozen=True)
class Job:
    """One line of work; `about` is what the report says of it where it fails."""

    about: Row
    run: Callable[[], list[Row]] = field(compare=False)


def jobs(suite: Suite) -> dict[str, list[Job]]:
    """The jobs of each part of the report; a part runs in a process of its own."""
    parts = {
        f"check {backend}": [
            Job({"backend": backend, "case": case.name}, partial(check_case, case, backend))
            for case in suite.cases
        ]
        for backend in suite.checked
    }
    parts["speed"] = speed = [Job({"what": "copy"}, partial(measure_copy, suite.copied))]
    # One layer after the other, and what is slow last: time may run out.
    for head_dim in dict.fromkeys(decode.head_dim for decode in suite.decodes):
        decodes = [decode for decode in suite.decodes if decode.head_dim == head_dim]
        for what in (*(name for name in suite.timed if name != "xla"), *ALTERNATIVES, "xla"):
            timer = time_dense if what in ALTERNATIVES else time_backend
            speed += [
                Job({"what": what, **decode.about}, partial(timer, decode, what))
                for decode in decodes
            ]
    return parts


def child(suite: Suite, part: str, start: int, deadline: float) -> None:
    """Runs the jobs of a part from `start` on and prints a line of JSON before and after each."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Triton's, whenever a kernel is compiled
    say = lambda **line: print(json.dumps(line), flush=True)
    here = machine()
    if here["platform"] != suite.platform:
        say(unfit=f"needs a {_NAMES[suite.platform]}, this is {here['platform']}")
        return
    say(machine=here | {"runtime": jax.devices()[0].client.platform_version.splitlines()[-1]})
    if part == "speed" and start > 0:
        measure_copy(suite.copied)  # for the shares
    for i, job in list(enumerate(jobs(suite)[part]))[start:]:
        if time.time() > deadline:
            say(done=i, rows=[job.about | {"result": "skipped", "detail": "no time left"}])
            continue
        say(begin=i)
        try:
            rows = job.run()
        except Exception as error:  # noqa: BLE001  # whatever a job dies of belongs in the report
            detail = f"{type(error).__name__}: {error}"
            print(traceback.format_exc(), file=sys.stderr)
            rows = [job.about | {"result": "error", "detail": detail}]
        say(done=i, rows=rows)


# The parent.


class Unfit(RuntimeError):
    """This machine is not what the check is for."""


def follow(suite_name: str, part: str, deadline: float) -> Iterator[Row]:
    """Runs a part in a child, yields its rows, and starts another where one dies."""
    todo, at = jobs(SUITES[suite_name])[part], 0
    while at < len(todo):
        command = _command(suite_name, part, at, deadline)
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            assert process.stdout is not None
            # A job that is at work when time is up may finish, unless it hangs.
            timer = threading.Timer(max(5.0, deadline + 20 - time.time()), process.kill)
            timer.start()
            try:
                for text in process.stdout:
                    line = json.loads(text) if text.startswith("{") else {}
                    if "unfit" in line:
                        raise Unfit(line["unfit"])
                    if "machine" in line:
                        yield {"machine": line["machine"]}
                    if "done" in line:
                        at = line["done"] + 1
                        yield from line["rows"]
                code = process.wait()
            finally:
                timer.cancel()
            log.seek(0)
            last = (log.read().strip().splitlines() or [""])[-1]
        if at < len(todo):
            detail = f"the process ended with {code}: {last}"
            yield todo[at].about | {"result": "crash", "detail": detail}
            at += 1


def _command(suite_name: str, part: str, start: int, deadline: float) -> list[str]:
    command = [sys.executable, "-P", "-m", "da_jax.kernels.device_check", "--suite", suite_name]
    return [*command, "--part", part, "--start", str(start), "--deadline", str(deadline)]


def render(row: Row) -> str:
    """One line of the report."""
    if "copy_gb_per_s" in row:
        return f"copy, read and written: {row['copy_gb_per_s']} GB/s"
    if "gb_per_s" in row:
        share = "" if row["share"] is None else f"{100 * row['share']:6.1f} % of copy"
        return (
            f"{row['what']:27}{row['head_dim']:5}{row['context']:8}{row['batch']:3}"
            f"{100 * row['visible']:6.0f} %{row['us']:11.2f} us{row['mb']:9.1f} MB"
            f"{row['gb_per_s']:9.1f} GB/s{share}"
        )
    if "error" in row:
        return (
            f"{row['backend']:17}{row['case']:18}{row['result']:8} "
            f"error {row['error']:.1e}, lse {row['lse_error']:.1e}"
        )
    about = " ".join(str(x) for key, x in row.items() if key not in ("result", "detail"))
    return f"{about:36}{row['result']}: {' '.join(row['detail'].split())[:300]}"


def report(suite_name: str, budget: float, say: Callable[[str], None]) -> Row:
    """Runs everything and returns the report; `say` gets its lines as they come.

    Raises:
        Unfit: the device is not one the suite is for.
    """
    deadline = time.time() + budget
    found: Row = {
        "date": date.today().isoformat(),
        "machine": None,
        "driver": _driver(),
        "rows": [],
    }
    for part in jobs(SUITES[suite_name]):
        for row in follow(suite_name, part, deadline):
            if "machine" not in row:
                found["rows"].append(row)
                say(render(row))
            elif found["machine"] is None:
                found["machine"] = row["machine"]
                about = {"date": found["date"], "driver": found["driver"], **row["machine"]}
                say("\n".join(f"{key}: {value}" for key, value in about.items()))
    failed = [row for row in found["rows"] if row.get("result") in ("FAIL", "error", "crash")]
    # An alternative that does not run here is no failure of ours.
    found["failed"] = sum(row.get("what") not in ALTERNATIVES for row in failed)
    found["skipped"] = sum(row.get("result") == "skipped" for row in found["rows"])
    say(f"{found['failed']} FAILED, {found['skipped']} SKIPPED for lack of time")
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no nvidia-smi"


def main(arguments: list[str] | None = None) -> None:
    """Command line; `--suite dry` runs everything on a CPU with tiny shapes."""
    parser = argparse.ArgumentParser(prog="python -P -m da_jax.kernels.device_check")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--quick", action="store_true", help="one layer and context")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, help="seconds (%(default)s)"
    )
    parser.add_argument("--suite", choices=SUITES, default="full", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        child(SUITES[given.suite], given.part, given.start, given.deadline)
        return
    say = (lambda line: None) if given.json else partial(print, flush=True)
    try:
        found = report("quick" if given.quick else given.suite, given.budget, say)
    except Unfit as reason:
        sys.exit(str(reason))
    if given.json:
        print(json.dumps(found, indent=1))
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
