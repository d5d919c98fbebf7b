"""Intervals against SciPy, and against simulated truth."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from da_jax.evals import stats


@pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 9), (5, 18), (17, 18), (128, 128), (64, 128)])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_wilson_is_that_of_scipy(right, n, level):
    expected = scipy_stats.binomtest(right, n).proportion_ci(level, method="wilson")
    found = stats.wilson(right / n, n, level)
    assert found == pytest.approx((right / n, expected.low, expected.high), abs=1e-12)


def test_the_mean_of_one_estimate_is_that_estimate_and_of_more_is_narrower():
    one = stats.wilson(0.9, 20)
    assert stats.macro([one]) == pytest.approx(one)
    four = stats.macro([one] * 4)
    assert four.value - four.low == pytest.approx((one.value - one.low) / 2)


def test_the_interval_of_a_mean_over_sources_covers_the_truth():
    rng = np.random.default_rng(0)
    truth, sizes = np.array([0.5, 0.9, 0.99, 0.2]), (20, 20, 40, 30)
    covered = 0
    for _ in range(2000):
        means = [rng.binomial(n, p) / n for n, p in zip(sizes, truth)]
        _, low, high = stats.macro([stats.wilson(m, n) for m, n in zip(means, sizes)])
        covered += low <= truth.mean() <= high
    assert 0.93 < covered / 2000 < 0.985


def test_the_paired_bootstrap_is_that_of_scipy():
    rng = np.random.default_rng(1)
    one, other = rng.random(40), rng.random(40) - 0.1
    expected = scipy_stats.bootstrap(
        (one, other), lambda a, b, axis: (a - b).mean(axis), paired=True, vectorized=True,
        n_resamples=20_000, method="percentile", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    found = stats.paired_bootstrap([one - other], draws=20_000)
    assert found.value == pytest.approx((one - other).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=4e-3)


def test_sources_weigh_the_same_in_a_bootstrap():
    rng = np.random.default_rng(3)
    sources = [rng.choice([-1.0, 0.0, 1.0], n, p=p) for n, p in (
        (12, [0.1, 0.8, 0.1]), (200, [0.0, 0.7, 0.3]),
    )]  # fmt: skip
    found = stats.paired_bootstrap(sources, draws=20_000)
    brute = np.mean(
        [source[rng.integers(0, len(source), (20_000, len(source)))].mean(1) for source in sources],
        axis=0,
    )
    assert found.value == pytest.approx(np.mean([source.mean() for source in sources]))
    assert (found.low, found.high) == pytest.approx(np.quantile(brute, [0.025, 0.975]), abs=6e-3)
    assert found == stats.paired_bootstrap(sources, draws=20_000)
    smooth = [rng.random(30)]
    assert stats.paired_bootstrap(smooth) != stats.paired_bootstrap(smooth, seed=1)


def test_large_sources_are_drawn_in_parts(monkeypatch):
    values = np.random.default_rng(4).random(50)
    monkeypatch.setattr(stats, "_AT_ONCE", 128)
    found = stats.paired_bootstrap([values], draws=999)
    spread = values.std() / np.sqrt(50)
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.15)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_a_crossing_lies_where_the_line_meets_zero(differences):
    lengths = [100.0 * 2**i for i in range(len(differences))]
    found = stats.crossing(lengths, differences)
    if differences[-1] >= 0:
        assert found is None
    elif max(differences) < 0:
        assert found == 0
    else:
        step = (lengths[-1] - lengths[0]) / 4000
        grid = np.union1d(np.arange(lengths[0], lengths[-1], step), lengths)
        last = grid[np.interp(grid, lengths, differences) >= 0][-1]
        assert last - 1e-6 <= found <= last + step


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.wilson(0.5, 0),
        lambda: stats.wilson(1.5, 3),
        lambda: stats.macro([]),
        lambda: stats.paired_bootstrap([]),
        lambda: stats.paired_bootstrap([np.array([])]),
    ],
)
def test_what_has_no_mean_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_all_the_same_leaves_no_width():
    flat = stats.paired_bootstrap([np.full(5, 0.25), np.full(9, 0.75)])
    assert set(itertools.chain(flat)) == {0.5}
