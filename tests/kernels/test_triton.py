"""What is particular to the Triton backend; the conformance suite has the rest."""

import importlib.abc
import importlib.util
import itertools
import re
import sys
import warnings
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paged_cases import TOLERANCE, Case, make_case

from da_jax.kernels.chips import CHIPS, describe
from da_jax.kernels.paged_attention import choose, layout, support, triton
from da_jax.kernels.paged_attention.support import Problem
from da_jax.kernels.paged_attention.triton import Config

H200 = describe("gpu", "NVIDIA H200")
L4 = describe("gpu", "NVIDIA L4")
PALLAS_TRITON = "jax.experimental.pallas.triton"


def problem(
    head_dim=128, group=4, queries=1, dtype="bfloat16", kv_dtype=None, pages=2048, batch=1, heads=8
) -> Problem:
    form = layout(pages, heads, 64, head_dim, kv_dtype or dtype)
    return Problem(batch, queries, heads * group, 512, dtype, form)


def check(case: Case, config: Config | None = None, on=H200) -> None:
    """Compares the interpreted kernel with the answer; traced anew, so patches take effect."""
    options = {"softcap": None, "window": None, **case.options}
    attend = lambda *arguments: triton.attend(
        *arguments, target=on, config=config, interpret=True, **options
    )
    out, lse = jax.jit(attend)(case.q, case.pool, case.mask, case.lengths, case.q_lens)
    want, want_lse = case.answer()
    tolerance = TOLERANCE[str(case.q.dtype)]
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def small(**options) -> Case:
    return make_case(**{"kv_heads": 1, "queries": 3, **options})


@pytest.mark.parametrize(
    "config",
    [
        Config(splits=1, block=16, tile=1, warps=4, stages=2),
        Config(splits=2, block=32, tile=2, warps=4, stages=2),
        Config(splits=3, block=64, tile=3, warps=4, stages=2),
        Config(splits=9, block=16, tile=1, warps=4, stages=2),
        Config(splits=3, block=16, tile=3, warps=4, stages=2),
    ],
    ids=str,
)
def test_any_cut_gives_the_same_answer(config):
    check(small(window=30), config)


@pytest.mark.parametrize("page_size", [4, 48])
def test_blocks_need_not_fit_pages(page_size):
    check(small(page_size=page_size), Config(2, 32, 3, 4, 2))


def shifted_share(begin: int, end: int):
    share = triton._share

    def patched(split, splits, blocks):
        first, last = share(split, splits, blocks)
        return jnp.maximum(first + begin, 0), last + end

    return patched


def blind_to_the_last_entry(tables, count, *rest):
    return ORIGINAL["_locate"](tables, count - 1, *rest)


def one_page_late(tables, count, block, form, i):
    page, slot, position = ORIGINAL["_locate"](tables, count, block, form, i)
    return page, slot, position + form.page_size


def hidden_values_loaded(pool, form, side, head, page, slot, wanted):
    return ORIGINAL["_gather"](pool, form, side, head, page, slot, jnp.ones_like(wanted))


def hidden_scales_loaded(scales, side, head, page, slot, wanted):
    return ORIGINAL["_gather_scales"](scales, side, head, page, slot, jnp.ones_like(wanted))


def blind_to_the_window(position, last, earliest, window):
    return ORIGINAL["_seen"](position, last, earliest, None)


ORIGINAL = {
    name: getattr(triton, name) for name in ("_locate", "_gather", "_gather_scales", "_seen")
}
FAULTS = {
    "last entry not seen": ("_locate", blind_to_the_last_entry, {}),
    "positions a page late": ("_locate", one_page_late, {}),
    "hidden values loaded": ("_gather", hidden_values_loaded, {}),
    "hidden scales loaded": ("_gather_scales", hidden_scales_loaded, {"kv_dtype": "int8"}),
    "window ignored": ("_seen", blind_to_the_window, {"window": 20}),
    "share begins late": ("_share", shifted_share(1, 0), {}),
    "share begins early": ("_share", shifted_share(-1, 0), {}),
    "share ends early": ("_share", shifted_share(0, -1), {}),
}
SPLIT = Config(splits=3, block=16, tile=3, warps=4, stages=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(monkeypatch, fault):
    name, patch, options = FAULTS[fault]
    monkeypatch.setattr(triton, name, patch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(small(**options), SPLIT)


GPUS = [chip for chip in CHIPS if chip.family in support.KERNELS["triton"].pages]


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_candidates_fit_every_chip_and_the_default_is_first(chip):
    on = describe("gpu", chip.kinds[0])
    for head_dim, group, queries, dtype, kv_dtype in itertools.product(
        (32, 64, 128, 256, 512), (1, 5, 8), (1, 64), ("float32", "bfloat16"), (None, "int8")
    ):
        asked = problem(head_dim, group, queries, dtype, kv_dtype)
        assert triton.refuses(asked, on) is None
        found = triton.candidates(asked, on)
        assert found[0] == triton._default(asked, on) and len(found) == len(set(found))
        for config in found:
            assert Config(**asdict(config)) == config and config.block >= 16
            assert triton._shared_memory(asked, on, config) <= chip.fast_memory


def test_a_small_chip_gets_fewer_stages():
    asked = problem(512, 8, heads=4)
    assert triton.candidates(asked, H200)[0].stages == 3
    assert triton.candidates(asked, L4)[0].stages == 2


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_splits_fill_the_multiprocessors(batch, head_dim):
    splits = triton.candidates(problem(head_dim, batch=batch), H200)[0].splits
    assert 0.9 * H200.cores <= batch * 8 * splits <= 2 * H200.cores


def test_an_unknown_chip_gets_some_splits():
    unknown = describe("gpu", "NVIDIA Something", "8.9")
    assert 64 <= 8 * triton.candidates(problem(), unknown)[0].splits <= 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head dim 96: it takes powers of two"),
        ({"head_dim": 48}, "head dim 48: it takes powers of two"),
        ({"head_dim": 512, "group": 128}, r"needs \d+ bytes of shared memory, NVIDIA H200 has 232"),
        ({"kv_dtype": "int8", "pages": 3 << 13}, r"a pool of \d+ bytes of int8: from 2 to 4 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    assert re.search(message, triton.refuses(problem(**changes), H200))


@pytest.mark.parametrize("pages", [1 << 14, 1 << 16])
def test_8_bit_pools_of_other_sizes_are_taken(pages):
    assert triton.refuses(problem(kv_dtype="int8", pages=pages), H200) is None


def test_a_setting_that_does_not_fit_is_refused_before_launch():
    with pytest.raises(ValueError, match=r"needs \d+ bytes .* lower block, stages or tile"):
        check(small(), Config(1, 1024, 3, 4, 4), L4)


def test_a_jax_without_triton_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, PALLAS_TRITON, None)
    assert f"this JAX has no {PALLAS_TRITON}" in support.missing("triton")
    with pytest.raises(RuntimeError, match="this JAX has no"):
        choose("triton:interpret")


class Deprecated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Pallas' Triton module where importing it warns."""

    def __init__(self):
        self.warned = 0

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == PALLAS_TRITON else None

    def exec_module(self, module):
        self.warned += 1
        warnings.warn("Pallas Triton is deprecated", DeprecationWarning, stacklevel=2)
        module.CompilerParams = object


def test_a_deprecated_triton_is_imported_without_a_warning(monkeypatch):
    finder = Deprecated()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, PALLAS_TRITON)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    assert support.missing("triton") is None and finder.warned == 1
    monkeypatch.delitem(sys.modules, PALLAS_TRITON)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    spec = importlib.util.find_spec(triton.__name__)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copy)  # where dataclasses look for annotations
    spec.loader.exec_module(copy)
    assert finder.warned == 2
