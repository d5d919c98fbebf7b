"""The report: its figures against sums over the records, and what it shows of them."""

import dataclasses
import html.parser
import json
import math
import re
import sys

import numpy as np
import pytest

from da_jax.evals import report
from da_jax.evals.records import Record
from da_jax.evals.report import document, figures, plots, rows

ARMS = ("vanilla", "unmasked", "da")
TASKS = {"key": "single", "walk": "multi", "list": "control", "talk": "multi"}
EVIL = "<script>alert('x')</script> | `a` [b](javascript:c) $x_"
NAN = float("nan")


def record(rng, task, length, index, arm) -> Record:
    """A record with any figures that can be."""
    modes = ("global", "focus", "local") if arm != "vanilla" else ("global",)
    trace = tuple(
        (modes[i % len(modes)], int(rng.integers(1, 9)), int(rng.integers(50, 99)) * length // 9,
         int(rng.integers(100, 200)) * length // 9)
        for i in range(int(rng.integers(1, 7)))
    )  # fmt: skip
    by_mode = lambda place: {
        mode: sum(run[place] for run in trace if run[0] == mode)
        for mode in ("global", "focus", "local")
    }
    attempts = 0 if arm == "vanilla" else int(rng.integers(0, 4))
    successes = int(rng.integers(0, attempts + 1))
    declines = {} if attempts == successes else {"unknown_id": attempts - successes}
    tokens, attended, read = by_mode(1), by_mode(2), by_mode(3)
    tokens["global"] += 1
    return Record(
        task=task, group=TASKS[task], length=length, seed=0, index=index, arm=arm,
        prompt_sha256=f"{task} {length} {index} {arm}", chunks=9,
        prompt_tokens=length + int(rng.integers(9)),
        completion_tokens=sum(tokens.values()),
        finish_reason="length" if rng.random() < 0.15 else "stop",
        text=f"{arm} {EVIL}", answer=EVIL, token_ids=(1,), expected=("yes",),
        score=float(rng.choice([0.0, 0.5, 1.0])), score_details={},
        summary={
            "tokens": {"total": sum(tokens.values())} | tokens,
            "attended": {"total": sum(attended.values())} | attended,
            "read": {"total": sum(read.values())} | read,
            "attended_vanilla": int(rng.integers(900, 999)) * length,
            "focus": {"attempts": attempts, "successes": successes, "declines": 0},
            "declines": declines, "format_correct": bool(rng.random() < 0.9),
        },
        trace=trace,
        evidence_chunks=() if task == "list" or arm == "vanilla" else (2, 5),
        focused_chunks=tuple(sorted(rng.choice([2, 3, 5], int(rng.integers(0, 4)), replace=False))),
    )  # fmt: skip


def write_run(folder, records, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {"tasks": dict.fromkeys(TASKS, 64)}
    known = {"settings": tasks | settings, "about": {"model": f"m{EVIL}"}}
    (folder / "settings.json").write_text(json.dumps(known))
    lines = [json.dumps(dataclasses.asdict(one), default=int) for one in records]
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(5)
    made = [
        record(rng, task, length, index, arm)
        for task in TASKS for length in (100, 400) for index in range(7) for arm in ARMS
    ]  # fmt: skip
    rng.shuffle(made)
    # The run is not finished.
    return [one for one in made if rng.random() < 0.9]


@pytest.fixture(scope="module")
def folder(records, tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("report") / "run", records)
    report.write([folder], folder)
    return folder


@pytest.fixture(scope="module")
def written(folder):
    return json.loads((folder / "report.json").read_text())["models"][0]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def brute(records, tasks, arm, of):
    """The mean over tasks of the means of something over their records in an arm."""
    return mean(mean(of(r) for r in records if (r.task, r.arm) == (task, arm)) for task in tasks)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    ("tasks", "where"),
    [
        (("key", "walk", "talk"), lambda figures: figures["macro"]),
        (("walk", "talk"), lambda figures: figures["groups"]["multi"]),
        (("list",), lambda figures: figures["groups"]["control"]),
        (("walk",), lambda figures: figures["sources"][1]),
    ],
)
def test_figures_of_an_arm_are_means_of_means(records, written, arm, tasks, where):
    found = where(written["all"])["arms"][arm]
    of = lambda of: brute(records, tasks, arm, of)
    assert found["n"] == sum(r.task in tasks and r.arm == arm for r in records)
    assert found["accuracy"]["value"] == pytest.approx(of(lambda r: r.score))
    attended = of(lambda r: sum(run[2] for run in r.trace))
    assert found["attended"] == pytest.approx(attended)
    assert found["read"] == pytest.approx(of(lambda r: sum(run[3] for run in r.trace)))
    assert found["steps"] == pytest.approx(of(lambda r: r.completion_tokens - 1))
    assert found["attended_of_own_vanilla"] == pytest.approx(
        attended / of(lambda r: r.summary["attended_vanilla"])
    )
    for mode in ("global", "focus", "local"):
        shown = found["modes"][mode]
        tokens = of(lambda r, mode=mode: r.summary["tokens"][mode])
        assert shown["token_share"] == pytest.approx(tokens / of(lambda r: r.completion_tokens))
        assert shown["attended_share"] == pytest.approx(
            of(lambda r, mode=mode: sum(run[2] for run in r.trace if run[0] == mode)) / attended
        )
    assert found["non_terminating"] == pytest.approx(of(lambda r: r.finish_reason == "length"))
    assert found["format_correct"] == pytest.approx(of(lambda r: r.summary["format_correct"]))
    attempts = of(lambda r: r.summary["focus"]["attempts"])
    assert found["focus"]["attempts"] == pytest.approx(attempts)
    if arm == "vanilla":
        assert found["focus"]["success_rate"] is None and found["evidence_hit"]["value"] is None
        return
    successes = of(lambda r: r.summary["focus"]["successes"])
    assert found["focus"]["success_rate"] == pytest.approx(successes / attempts)
    mine = [r for r in records if r.task in tasks and r.arm == arm]
    declined = sum(sum(r.summary["declines"].values()) for r in mine)
    assert found["declines"] == {"unknown_id": declined}
    if tasks == ("list",):
        assert found["evidence_hit"] == {"value": None, "n": 0}
    else:
        hit = of(lambda r: {2, 5} <= set(r.focused_chunks))
        assert found["evidence_hit"] == {"value": pytest.approx(hit), "n": len(mine)}


def attended(one):
    return one.summary["attended"]["total"]


def paired(records, task, one, other):
    arms = [
        {(r.length, r.index): r for r in records if (r.task, r.arm) == (task, arm)}
        for arm in (one, other)
    ]
    return [(arms[0][key], arms[1][key]) for key in arms[0] if key in arms[1]]


@pytest.mark.parametrize("pair", ["da/vanilla", "unmasked/vanilla", "da/unmasked"])
def test_arms_are_compared_over_the_examples_that_both_have(records, written, pair):
    tasks = ("key", "walk", "talk")
    pairs = {task: paired(records, task, *pair.split("/")) for task in tasks}
    found = written["all"]["macro"]["compared"][pair]
    assert found["pairs"] == sum(map(len, pairs.values())) < 3 * 14
    gain = mean(mean(a.score - b.score for a, b in p) for p in pairs.values())
    assert found["accuracy"]["value"] == pytest.approx(gain)
    assert found["accuracy"]["low"] < gain < found["accuracy"]["high"]
    ones = mean(mean(attended(a) for a, _ in p) for p in pairs.values())
    others = mean(mean(attended(b) for _, b in p) for p in pairs.values())
    assert found["attended"] == pytest.approx(ones / others)
    ratios = [
        sum(attended(a) for a, _ in p) / sum(attended(b) for _, b in p) for p in pairs.values()
    ]
    assert found["mean_of_sources"] == pytest.approx(mean(ratios))


def test_savings_are_told_with_who_carries_them(records, written):
    tasks = ("key", "walk", "talk")
    spent, saved = {}, {}
    for task in tasks:
        pairs = paired(records, task, "da", "vanilla")
        spent[task] = mean(attended(b) for _, b in pairs)
        saved[task] = mean(attended(b) - attended(a) for a, b in pairs)
    found = written["all"]["saving"]
    assert found["reduction"] == pytest.approx(sum(saved.values()) / sum(spent.values()))
    order = sorted(tasks, key=saved.get)
    assert found["top"] == order[:0:-1]
    assert found["reduction_without_top"] == pytest.approx(saved[order[0]] / spent[order[0]])
    if (total := sum(saved.values())) > 0:
        assert found["top_share"] == pytest.approx((saved[order[1]] + saved[order[2]]) / total)
    else:
        assert found["top_share"] is None
    costs = {one["task"]: one["ratio"] for one in written["all"]["costs_more"]}
    for task in tasks:
        assert (task in costs) == (saved[task] < 0)


def test_controls_that_cost_more_are_told_apart():
    more = lambda task, group: {"task": task, "group": group, "ratio": 1.25}
    text = "da attends more tokens than vanilla in "
    assert document._costs([]) == f"{text}no source."
    assert document._costs([more("a", "multi"), more("c", "control")]) == (
        f"{text}1 source: a (1.25 times); and in 1 control: c (1.25 times)."
    )
    assert document._costs([more("a", "multi"), more("b", "single")]) == (
        f"{text}2 sources: a (1.25 times), b (1.25 times)."
    )


@pytest.mark.parametrize(("n", "most"), [(1, 0.95), (2, 0.776), (14, 0.193), (300, 0.00994)])
def test_pairs_that_score_the_same_say_how_many_may_not(n, most):
    scipy_stats = pytest.importorskip("scipy.stats")
    exact = scipy_stats.binomtest(0, n, alternative="less").proportion_ci(0.95, "exact").high
    assert most == pytest.approx(exact, rel=2e-3)
    arms = {"da": {"accuracy": {"value": 1.0}}}
    versus = {"da/vanilla": {"differing": 0, "pairs": n}}
    model = {"da_only": False, "all": {"macro": {"arms": arms, "compared": versus}}}
    (said,) = document._no_difference(model, 0.95)
    assert f"up to {exact:.1%} of such pairs may differ (95% confidence)" in said
    assert ("in the one pair that there is" in said and "with 1 pair of" in said) == (n == 1)
    assert (f"in all of {n} pairs." in said and f"with {n} pairs of" in said) == (n > 1)


def test_what_did_not_end_is_left_out_with_its_whole_example(records, written):
    endless = {r.key[:3] for r in records if r.finish_reason == "length"}
    kept = [r for r in records if r.key[:3] not in endless]
    found = written["terminating"]
    assert found["responses"] == len(kept) < len(records) == written["all"]["responses"]
    for arm in ARMS:
        shown = found["macro"]["arms"][arm]
        assert shown["non_terminating"] == 0
        assert shown["attended"] == pytest.approx(
            brute(kept, ("key", "walk", "talk"), arm, attended)
        )


def test_a_break_even_length_lies_between_measured_ones(tmp_path):
    rng = np.random.default_rng(6)

    def rows_with(ratios, task="key"):
        """Rows of a task in which da attends that many times what vanilla does, by length."""
        made = []
        for length, ratio in ratios.items():
            for arm in ("vanilla", "da"):
                one = rows.row(record(rng, task, length, 0, arm))
                tokens = length * (ratio if arm == "da" else 1)
                numbers = {**one.numbers, "attended": tokens}
                made.append(dataclasses.replace(one, numbers=numbers))
        return rows.by_source(made)

    # 1,000 - 0.2 x 1,000 more at 1,000 and 0.4 x 2,000 fewer at 2,000: a fifth of the way.
    assert figures.break_even(rows_with({1000: 1.2, 2000: 0.6})) == {
        "tokens": pytest.approx(1200), "status": "measured", "sources": 1,
    }  # fmt: skip
    assert figures.break_even(rows_with({1000: 0.9, 2000: 0.6}))["status"] == "below"
    none = {"tokens": None, "status": "none"}
    assert figures.break_even(rows_with({1000: 0.9, 2000: 1.6})) == none | {"sources": 1}
    assert figures.break_even({}) == none | {"sources": 0}
    # What was measured at one length alone says nothing of the others.
    whole = rows_with({1000: 1.2, 2000: 0.6})
    parts = rows_with({1000: 9.0}, "walk") | rows_with({2000: 0.1}, "talk")
    assert figures.break_even(whole | parts) == figures.break_even(whole)
    assert figures.break_even(parts) == none | {"sources": 0}
    unit = {"arms": {"da": {"sources": 3}}}
    text = document._break_even({"macro": figures.break_even(whole | parts)}, unit)
    assert "1 of 3 sources, those measured at every length, 1,200." in text
    # Here the arms were not asked at the same lengths.
    apart = [r for r in [*whole["key"], *rows_with({4000: 9.0})["key"]] if r.arm == "da"]
    apart += [r for r in whole["key"] if r.arm == "vanilla"]
    assert figures.break_even({"key": apart}) == figures.break_even(whole)


def numbers_in(value):
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize(
    "kept",
    [
        lambda r: True,
        lambda r: r.arm == "da",
        lambda r: r.task == "list",
        lambda r: r.arm == "vanilla" and r.index == 0,
        lambda r: r.finish_reason == "length",
    ],
)
def test_every_figure_is_finite_or_null(records, tmp_path, kept):
    chosen = [one for one in records if kept(one)]
    report.write([write_run(tmp_path / "run", chosen)], tmp_path)
    text = (tmp_path / "report.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert all(map(math.isfinite, numbers_in(found)))
    for name in ("report.md", "report.html"):
        assert not re.search(r"\b(nan|inf|None\])", (tmp_path / name).read_text())


def test_responses_without_decode_steps_have_a_report(records, tmp_path):
    zero = {"total": 0, "global": 0, "focus": 0, "local": 0}
    empty = {"attended": zero, "read": zero, "attended_vanilla": 0}
    short = [
        dataclasses.replace(one, trace=(), summary={**one.summary, **empty}) for one in records
    ]
    report.write([write_run(tmp_path / "run", short)], tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())["models"][0]["all"]["macro"]
    assert found["arms"]["da"]["attended_of_own_vanilla"] is None
    assert found["compared"]["da/vanilla"]["attended"] is None
    text = (tmp_path / "report.md").read_text()
    assert "vanilla attends nothing in the examples that da has too" in text
    assert "have no example in common" not in text


def test_what_is_missing_from_the_folder_is_said(records, tmp_path):
    run = write_run(tmp_path / "run", [one for one in records if one.arm == "da"])
    report.write([run], tmp_path, page=False)
    text = (tmp_path / "report.md").read_text()
    assert "da and vanilla have no example in common" in text
    assert "count as independent" not in text and "where the examples come from" not in text


def test_an_example_that_was_asked_twice_is_told(records, tmp_path):
    same = [dataclasses.replace(r, prompt_sha256="1" * 64) for r in records if r.index < 1]
    twice = len(same) - len({(r.task, r.arm) for r in same})
    others = [one for one in records if one.index >= 1]
    report.write([write_run(tmp_path / "run", [*others, *same])], tmp_path, page=False)
    assert f"{twice} responses answer a prompt that another" in (tmp_path / "report.md").read_text()


def test_sources_are_shown_with_their_licence_and_their_pages(records, written, tmp_path):
    run = write_run(tmp_path / "run", records)
    known = json.loads((run / "settings.json").read_text())
    known["about"]["sources"] = {
        "key": {"description": "finds a key", "origin": "https://x/y", "licence": "cc-by-sa-4.0"}
    }
    (run / "settings.json").write_text(json.dumps(known))
    sections = document.sections(report.build([run]))
    (origins,) = [s for s in sections if s.title.endswith("where the examples come from")]
    assert origins.table.rows == (("key", "finds a key", "https://x/y", "cc-by-sa-4.0"),)
    (table,) = [s.table for s in sections if s.title.endswith(": sources")]
    places = {name: place for place, name in enumerate(table.columns)}
    for row in table.rows:
        for arm in ARMS:
            read = brute(records, (row[0],), arm, lambda r: r.summary["read"]["total"])
            assert row[places[f"read {arm}"]] == f"{read:,.0f}"
        pairs = paired(records, row[0], "da", "vanilla")
        ours, theirs = (mean(p[i].summary["read"]["total"] for p in pairs) for i in (0, 1))
        assert row[places["read da/vanilla"]] == f"{ours / theirs:.1%}"


class Tags(html.parser.HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page):
        super().__init__()
        self.seen, self.sources, self.text = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not any(name.startswith("on") or name == "href" for name, _ in attrs)
        self.sources += [value for name, value in attrs if name == "src"]

    def handle_data(self, data):
        self.text.append(data)


def test_what_a_model_writes_stays_text(folder):
    page = (folder / "report.html").read_text()
    tags = Tags(page)
    assert {"script", "a", "iframe", "object"}.isdisjoint(tags.seen)
    assert EVIL in tags.text and f"da {EVIL}" in tags.text
    assert len(tags.sources) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in tags.sources)
    assert "http://" not in page and "https://" not in page and "@import" not in page
    markdown = (folder / "report.md").read_text()
    assert "<script" not in re.sub(r"\\.", "", markdown)
    lines = [line for line in markdown.splitlines() if "alert" in line and line.startswith("|")]
    assert lines and all("](" not in re.sub(r"\\.", "", line) for line in lines)
    tables = [block for block in markdown.split("\n\n") if block.startswith("|")]
    for table in tables:
        widths = {len(re.sub(r"\\.", "", line).split("|")) for line in table.splitlines()}
        assert len(widths) == 1


def test_two_runs_stand_side_by_side(records, folder, tmp_path):
    other = write_run(tmp_path / "other", records[::2], style={"da_only": True})
    found = report.write([folder, other], tmp_path / "both")
    names = [model["name"] for model in found["models"]]
    assert len(set(names)) == 2 and names[1].endswith("(other)")
    table = document.overview(found)
    assert len(table.rows) == 6 and table.columns[0] == "model"
    text = (tmp_path / "both" / "report.md").read_text()
    assert "knows only the DA prompt, so that its arm vanilla is the unmasked" in text
    assert "the arms do not have the same examples" in text
    with pytest.raises(ValueError, match="named twice"):
        report.build([folder, folder])


def test_a_folder_without_responses_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no settings\.json; name a folder that"):
        report.build([tmp_path])
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match="has no response yet"):
        report.build([tmp_path])


def test_without_matplotlib_there_is_all_but_the_page(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'da-jax\[eval\]', or .* --no-html"):
        report.write([folder], tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "report.html").write_text("old")
    report.write([folder], tmp_path, page=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_a_report_loads_no_jax():
    import subprocess

    code = "import sys, da_jax.evals.report, da_jax.evals.suites; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_right_values_outside_of_the_scored_answer_are_told(records, tmp_path):
    late = [
        dataclasses.replace(one, text="<local>Read.</local>\nAnswer: yes", answer="Read.")
        if one.arm == "da" and i % 2 else one
        for i, one in enumerate(records)
    ]  # fmt: skip
    number = sum(one.answer == "Read." for one in late)
    for found, expected in ((records, {}), (late, {"da": number})):
        built = report.build([write_run(tmp_path / str(len(expected)), found)])
        assert built["models"][0]["outside"] == expected
        notes = "\n".join(document.sections(built)[2].points)
        assert (f'{number} of da: the right value follows "Answer:"' in notes) == bool(expected)
