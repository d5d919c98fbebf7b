"""Names of suites and tasks."""

import types

import pytest
from support import eval_tasks

from da_jax.evals import suites
from da_jax.evals.task import Group


@pytest.fixture
def tables(monkeypatch):
    """The suites, with tasks of ours in two of them."""
    one, two = eval_tasks.TASKS.values()
    private = eval_tasks.Facts("private", "spell", Group.SINGLE)
    made = {
        "da_jax.evals.offline": types.SimpleNamespace(
            TASKS={"one": one, "two": two}, CONTROLS={"control": private}
        ),
        "da_jax.evals.public": types.SimpleNamespace(TASKS={"asked": lambda options: options.task}),
        "da_jax.evals.compact": types.SimpleNamespace(TASKS={}, SHORT={}),
    }
    monkeypatch.setattr(suites.importlib, "import_module", made.__getitem__)
    return one, two, private


def test_suites_and_tasks_are_named_once_each_in_order(tables):
    one, two, private = tables
    public = types.SimpleNamespace(task=private)
    assert suites.load(["offline15"]) == [one, two]
    assert suites.load(["two, offline15", "controls"]) == [two, one, private]
    assert suites.load(["paper15"], public) == [private]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["ofline15"], "unknown suite or task 'ofline15'; did you mean 'offline15'"),
        (["one,twoo"], "unknown suite or task 'twoo'; did you mean 'two'"),
        (
            ["%%%"],
            "use offline15, controls, .*, compact_short, one, two, control, asked",
        ),
        ([" , "], "no suite is named"),
        (["one", "lm_eval:ruler"], "name it alone"),
    ],
)
def test_names_that_mean_nothing_are_refused(tables, names, words):
    with pytest.raises(ValueError, match=words):
        suites.load(names)


def test_the_offline_suite_has_fifteen_tasks_and_controls_of_their_own():
    tasks = suites.load(["offline15"])
    assert len(tasks) == len({task.name for task in tasks}) == 15
    controls = suites.load(["controls"])
    assert controls and all(task.group is Group.CONTROL for task in controls)
    assert len(suites.load(["offline15,controls"])) == 15 + len(controls)
    for task in tasks:
        assert suites.load([task.name]) == [task]
