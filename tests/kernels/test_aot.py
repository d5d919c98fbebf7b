"""The compile check, and what it finds: the kernels compiled for chips that are not here."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from da_jax.cli import aot as command
from da_jax.kernels import aot
from da_jax.kernels.aot import check, machines, matrix, runner
from da_jax.kernels.aot.machines import MACHINES
from da_jax.kernels.aot.matrix import BACKENDS, Case, Check
from da_jax.kernels.paged_attention.support import KERNELS

CORE = ("TPU v5e", "TPU7x", "H200", "A100")
MIB = 1 << 20


def needs(name):
    if not aot.installed(MACHINES[name]):
        pytest.skip(f"ATTENTION WAS NOT COMPILED FOR {name}: {machines.INSTALL}")


def check_rows(rows):
    bad = [f"{r['target']} {r['backend']} {r['case']}: {r['error']}" for r in rows if not r["ok"]]
    if bad:
        pytest.fail("\n".join([f"{len(bad)} of {len(rows)} rows", *bad]), pytrace=False)


@pytest.fixture(scope="module")
def core_rows():
    """The rows of all targets at once, which run side by side."""
    return aot.rows([name for name in CORE if aot.installed(MACHINES[name])])


@pytest.mark.parametrize("name", CORE)
def test_attention_compiles(name, request):
    needs(name)
    rows = [row for row in request.getfixturevalue("core_rows") if row["target"] == name]
    assert {row["backend"] for row in rows} >= {MACHINES[name].defaults[0], "xla"}
    check_rows(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_attention_compiles_over_the_matrix(name):
    needs(name)
    check_rows(aot.rows([name], full=True))


# What the plan covers.


def test_the_matrix_compiles_all_that_the_table_of_dtypes_promises():
    promised = {
        (backend, family, dtype)
        for backend, kernel in KERNELS.items()
        for family, dtypes in kernel.pages.items()
        for dtype in dtypes
    }
    compiled = {
        (item.backend, machine.chip.family, item.case.dtype)
        for machine in MACHINES.values()
        for item in matrix.plan(machine, None, full=True)
        if item.kind == "compile"
    }
    assert promised <= compiled


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_each_check_has_its_own_name(name, full):
    names = [(item.backend, item.name) for item in matrix.plan(MACHINES[name], None, full)]
    assert len(set(names)) == len(names)


def test_the_full_plan_has_all_of_the_core():
    for machine in MACHINES.values():
        core, full = (matrix.plan(machine, None, full) for full in (False, True))
        assert set(core) < set(full) or machine.name == "T4"


def test_what_a_chip_cannot_take_must_be_refused():
    of = lambda name: {
        (item.backend, item.name)
        for item in matrix.plan(MACHINES[name], None, full=False)
        if item.kind == "refused"
    }
    assert ("triton", "refused: fp8 pages") in of("A100")
    assert {("mosaic_gpu", "refused: this chip"), ("triton", "refused: this chip")} <= of("T4")
    assert not any(backend == "mosaic_tpu" for backend, _ in of("A100"))


def test_pools_are_large_enough_for_a_copy_to_show():
    for backend in BACKENDS:
        for case in matrix._core(backend) + matrix._full(backend):
            form = check.form_of(case)
            pool = form.page_bytes * form.num_pages / case.devices
            assert pool > 0.99 * check.CACHE_BYTES >= 128 * MIB
            assert check.budget(backend, case) <= pool / 7


@pytest.mark.parametrize("name", ["v5e", "tpu V5E", "TPU v5e"])
def test_targets_are_named_as_people_write_them(name):
    assert [machine.name for machine in machines.named([name])] == ["TPU v5e"]


@pytest.mark.parametrize(
    "asked, words",
    [({"targets": ["v9"]}, "unknown target 'v9'"), ({"backends": ["cuda"]}, "unknown backend")],
)
def test_an_unknown_name_is_an_error_that_lists_the_known(asked, words):
    with pytest.raises(ValueError, match=f"{words}.*choose from"):
        aot.rows(**asked)


# What a program must keep to.


def memory(temp=0, alias=0):
    return SimpleNamespace(temp_size_in_bytes=temp, alias_size_in_bytes=alias)


def test_temporaries_that_hold_part_of_the_pool_are_a_fault():
    case = Case()
    limit = check.budget("triton", case)
    assert check.faults(memory(limit), "", "triton", case) == []
    (fault,) = check.faults(memory(limit + 1), "", "triton", case)
    assert f"{limit + 1} bytes exceed {limit}" in fault


def test_a_donated_pool_must_be_reused_whole():
    case = Case(writes=True)
    pool = check.form_of(case).page_bytes * check.form_of(case).num_pages
    assert check.faults(memory(alias=pool), "", "xla", case) == []
    (fault,) = check.faults(memory(alias=pool // 2), "", "xla", case)
    assert "written anew" in fault
    assert check.faults(memory(), "", "xla", replace(case, writes=False)) == []


@pytest.mark.parametrize(
    "line",
    [
        "%copy.1 = bf16[4096,2,8,64,128]{4,3,2,1,0:T(8,128)} copy(%refs), sharding={}",
        "%copy.2 = (bf16[4096,2,8,64,128]{4,3,2,1,0:S(1)}, u32[]) copy-start(%refs)",
    ],
)
def test_a_copy_of_the_pool_is_a_fault_wherever_it_goes(line):
    (fault,) = check.faults(memory(), line, "xla", Case())
    assert "copies the whole array [4096,2,8,64,128]" in fault
    assert check.faults(memory(), line.replace("4096", "4095"), "xla", Case()) == []
    assert check.faults(memory(), line.replace("copy", "fusion"), "xla", Case()) == []


def test_collectives_are_a_fault():
    text = "%a = f32[8] all-gather-start(%x), dims={0}\n %b = f32[8] reduce-scatter(%y)"
    (fault,) = check.faults(memory(), text, "xla", Case())
    assert "all-gather, reduce-scatter" in fault
    harmless = '%c = f32[8] add(%x, %y), metadata={op_name="all-gather"}'
    assert check.faults(memory(), harmless, "xla", Case()) == []


PTXAS = """ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers, 1 bytes smem
"""


def test_resources_are_read_from_what_the_compilers_wrote(tmp_path):
    assert check.resources(tmp_path) == {}
    (tmp_path / "body_0.ptxas").write_text(PTXAS.format(spills=0))
    (tmp_path / "body_0.resources.txt").write_text("Resources(smem_scratch_bytes=90112, tmem=0)")
    (tmp_path / "module.thunk_sequence.txt").write_text(
        "001: kCustomKernel a threads: [128, 1, 1]  shared_memory: 16 bytes\n"
        "002: kCustomKernel b threads: [128, 1, 1]  shared_memory: 39168 bytes\n"
    )
    found = check.resources(tmp_path)
    assert found == {"registers": 255, "spills": 0, "shared_bytes": 90112}


def test_spilled_registers_are_a_fault(tmp_path):
    checker = check.Checker(MACHINES["H200"], [], tmp_path)
    assert checker._spill_faults({}) == ["ptxas did not report on registers and spills"]
    assert checker._spill_faults({"spills": 88}) == ["spills 88 bytes of registers"]
    assert checker._spill_faults({"spills": 0}) == []
    assert checker._spill_faults({}) == []  # a kernel that was compiled and judged before


# Children that misbehave.


@pytest.fixture
def children(monkeypatch):
    """Runs another program in place of the children; it finds their arguments in `sys.argv`."""

    def use(program: str) -> None:
        preamble = "import json, os, sys, time\nstart = int(sys.argv[-2].split('=')[1])\n"
        preamble += "say = lambda x: print('@aot ' + json.dumps(x), flush=True)\n"
        monkeypatch.setattr(
            runner, "_command", lambda a: [sys.executable, "-c", preamble + program, *a]
        )
        monkeypatch.setattr(machines, "installed", lambda machine: True)

    return use


def test_a_child_that_aborts_costs_one_row(children):
    checks = matrix.plan(MACHINES["TPU v5e"], ["mosaic_tpu"], False)
    children(
        "say('ready')\n"
        f"for i in range(start, {len(checks)}):\n"
        "    if i == 2:\n"
        "        print('LLVM ERROR: Cannot select: elect.sync\\n@ 0x5 frame', file=sys.stderr)\n"
        "        sys.stderr.flush(); os.abort()\n"
        "    print('a compiler says something'); say({'ok': True, 'error': '', 'case': i})\n"
    )
    rows = aot.rows(["v5e"], ["mosaic_tpu"])
    lost = checks[2]
    assert [row["case"] for row in rows] == [0, 1, lost.name, *range(3, len(checks))]
    assert [row["case"] for row in rows if not row["ok"]] == [lost.name]
    assert rows[2]["error"] == "killed by SIGABRT: LLVM ERROR: Cannot select: elect.sync"
    assert rows[2]["target"] == "TPU v5e" and rows[2]["backend"] == "mosaic_tpu"


def test_a_child_that_hangs_is_ended(children):
    children("say('ready'); say({'ok': True, 'error': '', 'case': 0}); time.sleep(600)")
    rows = aot.rows(["v5e"], ["xla"], seconds=6)
    assert [row["ok"] for row in rows] == [True, False, False]
    assert {row["error"] for row in rows[1:]} == {"not done within 6 s"}


def test_backends_that_are_made_for_none_of_the_targets_are_refused():
    with pytest.raises(ValueError, match="mosaic_tpu is not made for H100: nothing to compile"):
        aot.rows(["H100"], ["mosaic_tpu"])


def test_a_machine_that_cannot_be_described_is_one_row(children):
    children("raise SystemExit('RuntimeError: Unknown topology')")
    (row,) = aot.rows(["v5e"])
    assert (row["case"], row["ok"]) == ("compiler", False)
    assert row["error"] == "exit code 1: RuntimeError: Unknown topology"


def test_a_compiler_that_is_missing_is_one_row(monkeypatch):
    monkeypatch.setattr(machines, "installed", lambda machine: False)
    rows = aot.rows()
    assert [row["target"] for row in rows] == list(MACHINES)
    assert not any(row["ok"] for row in rows)
    assert {row["error"] for row in rows} == {"not installed: pip install 'da-jax[aot]'"}


PLANTED = """
import os
import jax
import jax.numpy as jnp
from da_jax.kernels.aot import __main__, check

attention, write_kv = check.paged_attention, check.write_kv
sharded = lambda: bool(jax.sharding.get_abstract_mesh().axis_names)

def planted_attention(q, kv_pages, *arguments, **options):
    if q.shape[1] > 1:
        os.abort()
    if kv_pages.shape[3] == 16:
        kv_pages = jax.lax.optimization_barrier(kv_pages + 1)
    out = attention(q, kv_pages, *arguments, **options)
    return jax.lax.psum(out, "heads") if sharded() else out

def planted_write(kv_pages, *new):
    written = write_kv(kv_pages, *new)
    return jnp.concatenate([written, written[:1]])

check.paged_attention, check.write_kv = planted_attention, planted_write
__main__.main()
"""


def test_planted_faults_are_found(monkeypatch, tmp_path):
    needs("TPU v5e")
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    run = lambda arguments: [sys.executable, str(planted), "--child", *arguments]
    monkeypatch.setattr(runner, "_command", run)
    rows = {row["case"]: row for row in aot.rows(["v5e"], ["xla"])}
    small, shared = Case(head_dim=64, page_size=16, writes=True), Case(writes=True, devices=4)
    expected = {
        small: ["of the pool of 1073741824 bytes copied"],
        matrix._prefill(Case()): ["killed by SIGABRT"],
        shared: ["written anew", "communicates: all-reduce"],
    }
    for case, faults in expected.items():
        assert not rows[case.name]["ok"]
        assert all(fault in rows[case.name]["error"] for fault in faults)


# The command.


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_fails_if_a_row_does(monkeypatch, capsys, as_json):
    good = {"target": "H200", "backend": "xla", "case": "decode", "ok": True, "error": "",
            "seconds": 1.5, "temp_bytes": 3 * MIB, "shared_bytes": 2048}  # fmt: skip
    failed = good | {"target": "L4", "ok": False, "error": "spills 8 bytes of registers"}
    monkeypatch.setattr(aot, "rows", lambda *asked: [good])
    command.run(None, None, False, as_json)
    monkeypatch.setattr(aot, "rows", lambda *asked: [good, failed])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        command.run(["H200", "L4"], ["xla"], True, as_json)
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == [good, failed]
    else:
        assert "1 ok, 1 not" in out and "spills 8 bytes of registers" in out and "3.0" in out


def test_a_check_that_raises_is_a_row(tmp_path):
    checker = check.Checker(MACHINES["H200"], [], tmp_path)
    (tmp_path / "of_the_check_before.ptxas").touch()
    row = checker.run(Check("compile", "xla", Case()))
    assert not row["ok"] and row["error"] and not list(tmp_path.iterdir())
