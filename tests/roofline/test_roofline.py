"""The paper's table to its printed digits, and ours by figures computed by hand."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from da_jax.checkpoints import known
from da_jax.cli.main import app
from da_jax.evals.records import Record
from da_jax.kernels import chips
from da_jax.protocol.modes import Mode
from da_jax.roofline import grid, paper
from da_jax.roofline import workload as load
from da_jax.roofline.step import Machine

PRINTED = {  # the paper's table 5: matmul, global, local, total
    ("gemma-4-31B", "vanilla"): ("22.9", "196.5", "49.7", "269.1"),
    ("gemma-4-31B", "da"): ("30.9", "94.4", "67.1", "192.3"),
    ("Qwen3.6-27B", "vanilla"): ("34.4", "263.8", "8.0", "306.2"),
    ("Qwen3.6-27B", "da"): ("45.1", "181.6", "10.5", "237.3"),
}


def config(name):
    return known.find(name).config


def command(*arguments):
    done = CliRunner().invoke(app, ["roofline", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_table_of_the_paper_to_its_printed_digits():
    for row in json.loads(command("--json"))["rows"]:
        parts = ("matmul_ms", "global_ms", "local_ms", "total_ms")
        assert tuple(f"{row[part]:.1f}" for part in parts) == PRINTED[row["model"], row["arm"]]
    assert all(figure in command() for figures in PRINTED.values() for figure in figures)


@pytest.mark.parametrize("cell", paper.TABLE, ids=lambda cell: f"{cell.model}-{cell.arm}")
def test_the_command_reproduces_a_row_from_steps_and_attended_tokens(cell):
    arguments = ["--model", cell.model, "--chip", "B200", "--json"]
    given = ["--steps", str(cell.steps), "--attended", str(cell.attended)]
    row = json.loads(command(*arguments, *given))
    assert f"{row['total_ms']:.1f}" == PRINTED[cell.model, cell.arm][3]


def test_the_ratios_of_the_paper():
    total = {key: float(figures[3]) for key, figures in PRINTED.items()}
    for model, ratio in (("gemma-4-31B", "0.71"), ("Qwen3.6-27B", "0.77")):
        assert f"{total[model, 'da'] / total[model, 'vanilla']:.2f}" == ratio


def test_local_bytes_of_the_paper():
    assert paper.local_bytes(config("gemma-4-31B")) == 50 * 1024 * 2 * 16 * 256 * 2  # 838.9 MB
    assert round(paper.local_bytes(config("Qwen3.6-27B")) / 1e6, 2) == 78.45


def test_a_sliding_model_by_hand():
    """gemma-3-270m: 18 layers, every 6th full; 4 heads and 1 KV head of 256; window 512."""
    machine = Machine(config("gemma-3-270m"), chips.named("A100"), batch=4)
    step = machine.step(context=10_000, read=2_048)
    bandwidth, flops = 2.039e12 * 0.7, 312e12 * 0.4
    layer = 640 * (4 + 2) * 256 + 4 * 256 * 640 + 3 * 640 * 2048  # q, k, v, o and the MLP
    norms = 18 * (4 * 640 + 2 * 256) + 640
    weights = 18 * layer + norms + 262_144 * 640  # the tied head is read too
    assert step.weights == pytest.approx(2 * weights / bandwidth)
    assert 2 * 4 * weights / flops < step.weights  # bytes take longer than operations
    token = 2 * 1 * 256 * 2
    assert step.full == pytest.approx(4 * 3 * 2_048 * token / bandwidth)
    assert step.rest == pytest.approx(4 * 15 * 512 * token / bandwidth)


def test_a_recurrent_model_by_hand():
    """Qwen3.6-27B: 16 full layers with 4 KV heads of 256; 48 states, 48 x 128 x 128, 3 x 10,240."""
    step = Machine(config("Qwen3.6-27B"), chips.named("v5p"), batch=2).step(32_768, 32_768)
    bandwidth = 2.765e12 * 0.7
    assert step.full == pytest.approx(2 * 32_768 * 16 * 2 * 4 * 256 * 2 / bandwidth)
    state = 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)
    assert step.rest == pytest.approx(2 * 2 * state / bandwidth)  # read and written


def test_experts_are_read_once_for_all_that_chose_them():
    """Qwen3-30B-A3B: 128 experts of 768, 8 a token, in 48 layers of width 2,048."""
    experts = 48 * 3 * 768 * 2_048
    one, many = (
        Machine(config("Qwen3-30B-A3B"), chips.named("H200"), batch=batch).step(64, 64).weights
        for batch in (1, 16)
    )
    chosen = 128 * (1 - (1 - 8 / 128) ** 16)
    more = 2 * experts * (chosen - 8) / (4.8e12 * 0.7)
    assert many - one == pytest.approx(more)


def test_a_large_batch_is_bound_by_operations():
    machine = Machine(config("Qwen3-8B"), chips.named("L4"), batch=4_096)
    parameters = 8_190_735_360 - 151_936 * 4_096  # the embedding is looked up
    expected = 2 * parameters * 4_096 / (121e12 * 0.4)
    assert machine.step(64, 64).weights == pytest.approx(expected, rel=1e-3)


def test_devices_share_weights_and_heads_and_repeat_heads_that_are_too_few():
    """Qwen3-8B has 8 KV heads: 8 devices have one each, and 16 too, two of them the same one."""
    times = {
        devices: Machine(config("Qwen3-8B"), chips.named("v5e"), devices=devices).step(8192, 8192)
        for devices in (1, 8, 16)
    }
    assert times[8].full == pytest.approx(times[1].full / 8)
    assert times[16].full == pytest.approx(times[8].full)
    assert times[8].weights == pytest.approx(times[1].weights / 8, rel=1e-3)


def test_eight_bits_halve_what_they_hold():
    plain = Machine(config("Qwen3-8B"), chips.named("H100"))
    small = dataclasses.replace(plain, int8=True, kv_dtype="int8")
    before, after = plain.step(8192, 8192), small.step(8192, 8192)
    assert 0.50 < after.weights / before.weights < 0.51  # and scales
    assert after.full / before.full == pytest.approx((128 + 4) / 256)


def test_nothing_is_gained_where_the_weights_are_nearly_all():
    machine = Machine(config("gemma-4-31B"), chips.named("B200"))
    (row,) = grid.rows(machine, [32_768], [1], lambda n: load.from_mix(448, n, 64), 448 / 332)
    assert f"{row.most:.0%}" == "4%" and row.bound == "weights"
    assert row.response_ratio > 1  # more steps cost more than is saved
    assert "gain nothing" in grid.findings([row])[0]


def test_more_context_and_more_sequences_gain_more():
    machine = Machine(config("gemma-4-31B"), chips.named("B200"))
    contexts, batches = (8_192, 65_536, 262_144), (1, 8, 64)
    rows = grid.rows(machine, contexts, batches, lambda n: load.from_mix(448, n, 64), 1.35)
    ratio = {(row.context, row.batch): row.step_ratio for row in rows}
    assert all(ratio[c, 1] > ratio[c, 8] > ratio[c, 64] for c in contexts)
    assert all(ratio[8_192, b] > ratio[65_536, b] > ratio[262_144, b] for b in batches)
    fit = {(row.context, row.batch): row.fits for row in rows}
    assert fit[8_192, 1] and not fit[262_144, 64]
    assert any("Does not fit" in line for line in grid.findings(rows))


def test_it_says_from_which_context_on_something_is_gained():
    machine = Machine(config("gemma-4-31B"), chips.named("B200"))
    mix = lambda context: load.from_mix(448, context, 64)
    # Of a step at 65,536 tokens 7.9 % are full attention, of which the mix leaves a third.
    assert grid.gains_from(machine, mix, 448 / 332).startswith(
        "At batch 1 a step gains from 65,536 tokens on and a response gains nowhere"
    )
    many = grid.gains_from(dataclasses.replace(machine, batch=32), mix, 448 / 332)
    assert "a step gains from 4,096 tokens on and a response gains from 32,768" in many


def test_a_mix_reads_whole_pages():
    parts = load.from_mix(100, 10_000, 64)
    assert sum(part.steps for part in parts) == pytest.approx(100)
    by_share = dict(zip(load.SHARES, parts))
    assert by_share[Mode.GLOBAL].read == 10_048  # 157 pages
    assert by_share[Mode.LOCAL].read == 600 + 1.5 * 64


def test_the_steps_of_a_trace(tmp_path):
    """Two steps, one of which reads a fifth: by hand, on a model and chip where bytes decide."""
    steps = [
        {"mode": "global", "attended": 6_400, "read": 6_400, "vanilla": 6_400},
        {"mode": "local", "attended": 1_200, "read": 1_280, "vanilla": 6_401},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"summary": {}, "steps": steps}))
    machine = Machine(config("Qwen3-8B"), chips.named("H100"))
    row = grid.row(machine, load.from_trace(path, 64))
    one = machine.step(6_400, 6_400)
    fixed = one.weights + one.rest
    page = one.full / 100
    expected = (2 * fixed + 120 * page) / (2 * fixed + 201 * page)
    assert row.step_ratio == pytest.approx(expected)
    out = command("--convention", "measured", "--model", "Qwen3-8B", "--trace", str(path), "--json")
    assert [r["batch"] for r in json.loads(out)["rows"]] == [1, 8, 32]
    # Older traces do not say how long their pages are; 1,200 of 1,280 are no pages of 512.
    arguments = ["--convention", "measured", "--model", "Qwen3-8B", "--trace", str(path), "--json"]
    with pytest.raises(ValueError, match=r"no whole pages of 512 tokens; give the --page-size"):
        command(*arguments, "--page-size", "512")
    path.write_text(json.dumps({"page_size": 16, "summary": {}, "steps": steps}))
    assert json.loads(command(*arguments))["page_size"] == 16
    with pytest.raises(ValueError, match=r"--page-size is 64, but the pages of .* have 16 tokens"):
        command(*arguments, "--page-size", "64")
    path.write_text(json.dumps({"page_size": 0, "summary": {}, "steps": steps}))
    with pytest.raises(ValueError, match="page_size is 0"):
        command(*arguments)


def record(arm, trace, index=0):
    return Record(
        task="t", group="single", length=100, seed=0, index=index, arm=arm,
        prompt_sha256="", chunks=2, prompt_tokens=1_000, completion_tokens=5, finish_reason="stop",
        text="", answer="",
        token_ids=(), expected=(), score=1.0, score_details={}, summary={}, trace=trace,
    )  # fmt: skip


def test_the_mean_response_of_records():
    two = [
        record("da", (("global", 2, 2_003, 2_048), ("local", 2, 300, 512))),
        record("da", (("global", 6, 6_000, 6_144),)),
    ]
    assert load.from_records(two, 512) == [
        load.Part(1.0, 1_001.5, 1_024, 1_024), load.Part(1.0, 1_003.5, 256, 1_024),
        load.Part(3.0, 1_003.5, 1_024, 1_024),
    ]  # fmt: skip
    # Of 991 to 994 positions, two fit 62 pages of 16 tokens and two need one more.
    over = [dataclasses.replace(record("da", (("local", 4, 40, 64),)), prompt_tokens=990)]
    (part,) = load.from_records(over, 16)
    assert part.visible == (2 * 992 + 2 * 1_008) / 4


def folder_of(path, records, page_size=16, **settings):
    known = {"settings": {"engine": {"page_size": page_size}} | settings, "about": {}}
    (path / "settings.json").write_text(json.dumps(known))
    (path / "records.jsonl").write_text("".join(f"{row.to_json()}\n" for row in records))
    arguments = ["--convention", "measured", "--model", "Qwen3-8B", "--batch", "1"]
    return [*arguments, "--records", str(path)]


def pages(first, steps, page):
    """Positions of the pages that steps read which see everything: by counting."""
    return sum(-(-(first + step) // page) * page for step in range(1, steps + 1))


@pytest.mark.parametrize("page", [16, 128])
def test_a_folder_of_records_gives_a_row_for_each_arm_in_its_own_pages(tmp_path, page):
    local = 2 * page
    rows = [
        record("da", (("global", 20, 0, pages(1_000, 20, page)), ("local", 20, 300, local * 20))),
        record("unmasked", (("global", 30, 0, pages(1_000, 30, page)),)),
        record("vanilla", (("global", 25, 0, pages(1_000, 25, page)),)),
    ]
    arguments = folder_of(tmp_path, rows, page)
    found = json.loads(command(*arguments, "--json"))
    assert found["page_size"] == page and [r["arm"] for r in found["rows"]] == [r.arm for r in rows]
    da, unmasked, vanilla = found["rows"]
    assert da["step_ratio"] < 1
    assert vanilla["step_ratio"] == pytest.approx(1, abs=1e-12) == unmasked["step_ratio"]
    assert vanilla["response_ratio"] == 1
    machine = Machine(config("Qwen3-8B"), chips.named("B200"), page_size=page)
    one = lambda context, read: machine.step(context, read).total
    expected = 25 * one(1_013, pages(1_000, 25, page) / 25)
    ours = 20 * one(1_010.5, pages(1_000, 20, page) / 20) + 20 * one(1_030.5, local)
    assert da["response_ratio"] == pytest.approx(ours / expected)
    assert da["visible_ms"] == pytest.approx(1e3 * expected)
    assert found["total_ms"] == da["declared_ms"] == pytest.approx(1e3 * ours)
    assert unmasked["response_ratio"] == pytest.approx(30 / 25, rel=1e-3)
    shown = command(*arguments)
    assert all(f" {arm} " in shown for arm in ("da", "unmasked", "vanilla")) and "…" not in shown
    with pytest.raises(ValueError, match=f"--page-size is 64, but the pages of .* have {page}"):
        command(*arguments, "--page-size", "64")


def test_arms_of_records_are_compared_over_the_examples_that_both_have(tmp_path):
    short, long = (("global", 4, 4_010, 4_096),), (("global", 400, 480_000, 500_000),)
    rows = [record("da", short), record("da", long, 1), record("vanilla", short)]
    found = json.loads(command(*folder_of(tmp_path, rows), "--json"))
    assert [row["response_ratio"] for row in found["rows"]] == [1, 1]
    assert "Of da 1 of 2 responses, those vanilla has too." in found["notes"]
    with pytest.raises(ValueError, match="the arms da and vanilla have no example in common"):
        command(*folder_of(tmp_path, rows[1:]))
    # Without the arm there is only the same with everything visible.
    found = json.loads(command(*folder_of(tmp_path, rows[:2]), "--json"))
    (row,) = found["rows"]
    assert row["response_ratio"] == row["step_ratio"] and "visible" in found["notes"][0]


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no settings\.json; name a folder that `da-jax eval"):
        command("--convention", "measured", "--records", str(tmp_path))
    with pytest.raises(ValueError, match="holds no records"):
        command(*folder_of(tmp_path, []))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    command("--convention", "measured", "--plot", str(path))
    head = {".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--convention", "ours"], "--convention is 'ours'"),
        (["--chip", "B100"], "unknown chip 'B100'"),
        (["--model", "gemma-9"], "gemma-9"),
        (["--steps", "5"], "--steps and --attended belong together"),
        (["--model", "Qwen3-8B"], "give --steps and --attended"),
        (["--steps", "0", "--attended", "5"], "--steps is 0"),
        (["--steps", "nan", "--attended", "5"], "--steps is nan"),
        (["--steps", "5", "--attended", "inf"], "--attended is inf"),
        (["--convention", "measured", "--context", "0"], "--context is 0"),
        (["--convention", "measured", "--more-steps", "-1"], "--more-steps is -1"),
        (["--batch", "2"], "--convention measured"),
        (["--convention", "measured", "--batch", "0"], "batch is 0"),
        (["--convention", "measured", "--mix", "global=2"], "from 0 to 1"),
        (["--convention", "measured", "--mix", "global=0.9"], "add up to"),
        (["--convention", "measured", "--mix", "glob=1"], "glob=1"),
        (["--convention", "measured", "--mbu", "1.5"], "mbu is 1.5"),
        (["--convention", "measured", "--plot", "a.bmp"], "must end in"),
        (["--convention", "measured", "--attended", "5"], "--attended needs"),
        (["--convention", "measured", "--kv-dtype", "int4"], "kv_dtype is 'int4'"),
        (["--convention", "measured", "--tensor-parallel", "11"], "11"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        command(*arguments)
