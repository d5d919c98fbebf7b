"""The device script in small, on this machine."""

import json

import pytest

from da_jax.bench import device
from da_jax.models import sizes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(rows, file) of a run with one context, so that it is quick."""
    plan = device.Plan(contexts=(256,), batches=(2,), new_tokens=60, tiny=True)
    out = tmp_path_factory.mktemp("device") / "results" / "device.json"
    told: list[str] = []
    return device.measure(plan, out, told.append), out, told


def test_each_case_has_both_arms_and_all_is_written(written):
    rows, out, told = written
    assert [(row["model"], row["system"]) for row in rows] == [
        (model, arm) for model in device.MODELS for arm in ("vanilla", "da")
    ]
    assert json.loads(out.read_text())["rows"] == rows == [json.loads(line) for line in told]


def test_ratios_are_consistent(written):
    for vanilla, da in zip(written[0][::2], written[0][1::2]):
        assert da["ratio"] == pytest.approx(da["ms_per_token"] / vanilla["ms_per_token"], abs=0.01)
        assert vanilla["ratio"] == vanilla["predicted_ratio"] == 1
        assert 0 < da["attended_share"] < da["predicted_ratio"] < 1
        assert da["ms_per_token"] == pytest.approx(
            da["ms_per_step"] * da["steps_per_token"], rel=0.01
        )
        assert da["predicted_ms"] is None  # the bandwidth of a CPU is not known


def test_shapes_are_those_of_the_published_models():
    plan = device.Plan()
    for name, billions in zip(device.MODELS, (4.0, 7.9)):
        assert sizes.parameters(plan.config(name)) / 1e9 == pytest.approx(billions, rel=0.1)
        assert max(plan.contexts) <= plan.config(name).max_positions


def test_what_does_not_fit_says_so(monkeypatch):
    chip = type("Target", (), {"chip": type("Chip", (), {"memory": 16 * 2**30})})
    monkeypatch.setattr(device, "current_target", lambda: chip)
    plan = device.Plan()
    reason = device._too_large(plan.config("Qwen3-4B-2507"), 8, 32_768, plan)
    assert reason.startswith("needs 4") and "of 14.4 that are usable" in reason
    rows = list(device.rows(device.Plan(batches=(8,))))
    assert len(rows) == 4 and all(row["skipped"] for row in rows)


def test_no_case_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(device, "_too_large", lambda *_: "")
    rows = list(device.rows(device.Plan(minutes=0.5)))
    assert [row["skipped"] for row in rows] == ["0.5 minutes are over"] * 4
    with pytest.raises(ValueError, match="minutes is 0"):
        device.Plan(minutes=0)


def test_a_case_that_fails_is_told_and_the_next_one_runs(monkeypatch):
    def case(engine, model, context, plan, about):
        if context == 256:
            raise ValueError("8 sequences do not fit at once")
        return [about]

    monkeypatch.setattr(device, "_case", case)
    monkeypatch.setattr(device.drive, "build", lambda *args, **options: object())
    plan = device.Plan(contexts=(256, 512), batches=(8,), tiny=True)
    first, second, *_ = device.rows(plan)
    assert first["skipped"] == "ValueError: 8 sequences do not fit at once"
    assert second["context"] == 512 and "skipped" not in second
