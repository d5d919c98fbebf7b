"""NaN in every slot of the pages that a mask hides."""

from __future__ import annotations

import functools

import jax
import numpy as np


def poison_hidden(runner, monkeypatch) -> list[int]:
    """Makes each slot that the mask of a program hides NaN before it runs, and restores it after.

    Returns:
      A list that grows by the number of these slots with each program that runs.
    """
    counts: list[int] = []
    put = functools.partial(jax.device_put, device=runner.caches.pages[0].sharding)

    def around(program, rows, used):
        hidden = np.ones(next(iter(runner.caches.pages.values())).shape[::3][:2], bool)
        for row in used:
            for entry in range(rows.mask.count[row]):
                lo, hi = rows.mask.span[row, entry] & 0xFFFF, rows.mask.span[row, entry] >> 16
                hidden[rows.mask.page[row, entry], lo:hi] = False
        saved = {layer: np.array(page) for layer, page in runner.caches.pages.items()}
        where = hidden[:, None, None, :, None]
        dirty = {layer: np.where(where, np.nan, page) for layer, page in saved.items()}
        runner.caches = put(runner.caches._replace(pages=dirty))
        choice = program()
        new = runner.caches.pages
        clean = {layer: np.where(where, old, new[layer]) for layer, old in saved.items()}
        runner.caches = put(runner.caches._replace(pages=clean))
        counts.append(int(hidden.sum()))
        return choice

    prefill, decode = runner.prefill, runner.decode
    monkeypatch.setattr(
        runner,
        "prefill",
        lambda tokens, position, rows, **options: around(
            lambda: prefill(tokens, position, rows, **options), rows, [0]
        ),
    )
    monkeypatch.setattr(
        runner,
        "decode",
        lambda rows, what: around(lambda: decode(rows, what), rows, np.flatnonzero(what.steps)),
    )
    return counts
