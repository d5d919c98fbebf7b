"""Means over sources, and intervals around them. A source is a task; all sources weigh the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
"""Confidence of every interval."""
DRAWS = 10_000
"""Samples of a bootstrap."""
_AT_ONCE = 2**22  # counts that a bootstrap holds at once


class Estimate(NamedTuple):
    """A mean and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def wilson(mean: float, n: int, level: float = LEVEL) -> Estimate:
    """Wilson's score interval of a mean of `n` scores from 0 to 1.

    For right and wrong answers it is that of a proportion. Scores between vary less than those with
    the same mean, so that for them it is too wide, if anything.

    Raises:
      ValueError: the mean is outside [0, 1], or `n` is not positive.
    """
    if n < 1 or not 0 <= mean <= 1:
        raise ValueError(f"a mean of {mean} of {n} scores; it must be from 0 to 1, of at least one")
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return Estimate(mean, max(centre - half, 0.0), min(centre + half, 1.0))


def macro(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, each with the same weight.

    The interval adds the squares of the distances to the ends of theirs (MOVER: Zou and Donner,
    Statistics in Medicine 27, 2008). So it has a width where every score is 1, and that of one
    estimate is its own.

    Raises:
      ValueError: there is none.
    """
    if not estimates:
        raise ValueError("no estimates; a mean needs at least one")
    value, low, high = np.array(estimates, np.float64).T
    mean = value.mean()
    below, above = (math.hypot(*side) / len(estimates) for side in (value - low, high - value))
    return Estimate(float(mean), float(mean - below), float(mean + above))


def paired_bootstrap(
    differences: Sequence[np.ndarray],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """The mean over sources of mean differences, with a percentile bootstrap interval.

    Examples are drawn with replacement within each source. How often each distinct difference is
    drawn is multinomial, which is what is drawn here: it is the same, and faster.

    Args:
      differences: of each source [n] float, one score less the other for each example.

    Raises:
      ValueError: there is no source, or one has no example.
    """
    if not differences or min(map(len, differences)) < 1:
        raise ValueError("a bootstrap needs at least one example of every source")
    rng = np.random.default_rng(seed)
    means = np.zeros(draws)
    for source in differences:
        means += _drawn_means(rng, np.asarray(source, np.float64), draws)
    means /= len(differences)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    value = np.mean([np.mean(source) for source in differences])
    return Estimate(float(value), float(low), float(high))


def crossing(lengths: Sequence[float], differences: Sequence[float]) -> float | None:
    """The length from which on differences stay below 0, by linear interpolation.

    Args:
      lengths: ascending.
      differences: at each length.

    Returns:
      0 where all are below 0; None where the last one is not.
    """
    if not differences or differences[-1] >= 0:
        return None
    above = [index for index, difference in enumerate(differences) if difference >= 0]
    if not above:
        return 0.0
    left = above[-1]
    (x0, x1), (y0, y1) = lengths[left : left + 2], differences[left : left + 2]
    return float(x0 + (x1 - x0) * y0 / (y0 - y1))


def _drawn_means(rng: np.random.Generator, values: np.ndarray, draws: int) -> np.ndarray:
    """[draws] float64: means of samples of the same size, drawn with replacement."""
    distinct, counts = np.unique(values, return_counts=True)
    rows = max(_AT_ONCE // len(distinct), 1)
    parts = [
        rng.multinomial(len(values), counts / len(values), size=min(rows, draws - start)) @ distinct
        for start in range(0, draws, rows)
    ]
    return np.concatenate(parts) / len(values)
