"""Checks that the mask acts, and costs what the account says, on any checkpoint.

Accuracy does not show it: a mask that does nothing looks fine. Four checks, each against what the
protocol says of a scripted response, not against what the engine made of it. They show that nothing
hidden is read; of what is visible only the mask that the operation is given, and one slot:

* likelihood: of the response under the plain prompt (v), the prompt with declarations and nothing
  masked (d), and masked (m): d and m are equal until something is hidden, and differ from there.
* poison: NaN in all that is hidden changes no bit of what the model says, and in one place that is
  visible does.
* pages: those that the operation visits at each step are those of the account and of the protocol.
* programs: none is compiled after warm-up, whatever is hidden, in batches and lengths of any size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import jax
import numpy as np

from da_jax.engine import compilations
from da_jax.engine.config import MAX_LOGPROBS
from da_jax.engine.llm import LLM
from da_jax.engine.request import Done, Request, Response, SamplingParams
from da_jax.engine.rows import Choice, DecodeRows, Rows
from da_jax.evals import poison, script
from da_jax.evals.script import Document, Script
from da_jax.models.config import ModelConfig
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Nats by which log-probabilities of the same prompt may differ, where nothing is hidden, because
it was prefilled in other steps. By dtype of the model."""
MOST = 0.5
"""Share of the tokens of a narrow block whose log-probability must differ by more than that."""


class Status(StrEnum):
    """What a check found."""

    PASS = "pass"
    FAIL = "fail"
    NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Check:
    """What a check found, in words, and in figures that JSON can hold."""

    name: str
    status: Status
    words: str
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Proof:
    """The engine, what it is asked, and what it must answer."""

    llm: LLM
    document: Document
    script: Script

    def request(self, arm: Arm = Arm.DA, tokens: int | None = None, **params: Any) -> Request:
        ids = self.script.ids[:tokens]
        options: dict[str, Any] = {"logprobs": MAX_LOGPROBS, "ignore_eos": True} | params
        return self.llm.request(
            self.document.chunks, self.document.question, arm=arm, forced=ids,
            sampling=SamplingParams(max_tokens=len(ids), **options),
        )  # fmt: skip

    def answer(self, request: Request) -> Response:
        (done,) = (e for e in self.llm.engine.run([request]) if isinstance(e, Done))
        return done.response

    def logprobs(self, arm: Arm) -> np.ndarray:
        return _logprobs(self.answer(self.request(arm)))


def failed(checks: Sequence[Check]) -> list[str]:
    """Names of the checks that did not pass, those that were not run included."""
    return [check.name for check in checks if check.status is not Status.PASS]


def check_model(config: ModelConfig) -> None:
    """Refuses a model that declarations cannot reach.

    Raises:
      ValueError: it has no layer of full attention.
    """
    if not config.layers_of("full"):
        kinds = sorted({kind for kind in ("sliding", "recurrent") if config.layers_of(kind)})
        raise ValueError(
            f"this {config.family} has no full-attention layer, only {' and '.join(kinds)} ones: "
            "declarations hide nothing there, so there is no mask to prove"
        )


def verify(llm: LLM, dtype: str) -> list[Check]:
    """Runs all checks on one engine; a proof is that all of them pass.

    Args:
      llm: an engine that does nothing else meanwhile.
      dtype: name of the dtype of the model, see `TOLERANCE`.

    Raises:
      ValueError: several replicas, a tokenizer that cannot write tags.
      RequestError: prompt and response do not fit.
    """
    if llm.loop is not llm.engine:
        raise ValueError("there are several replicas; verify one (data_parallel=1)")
    proof = _Proof(llm, *script.write(llm))
    made = compilations.made_here()
    likelihood = _likelihood(proof, TOLERANCE[dtype])
    pages = _pages(proof)
    _answer_batches(proof)
    programs = _programs(compilations.made_here() - made, llm)
    # Poison comes last: the programs that put it there are compiled too.
    return [likelihood, _poison(proof), pages, programs]


def _likelihood(proof: _Proof, tolerance: float) -> Check:
    """Three columns of the likelihood of one response."""
    v, d, m = (proof.logprobs(arm) for arm in (Arm.VANILLA, Arm.UNMASKED, Arm.DA))
    moved, blocks = np.abs(m - d), proof.script.blocks
    first = blocks[0][0]
    narrow = np.concatenate([np.array(block) for block in blocks])
    shares = [float((moved[block] > tolerance).mean()) for block in map(list, blocks)]
    before = float(moved[:first].max())
    figures = {
        "v": _nats(v), "d": _nats(d), "m": _nats(m),
        "narrow_d": _nats(d[narrow]), "narrow_m": _nats(m[narrow]),
        "tokens": len(m), "narrow_tokens": len(narrow), "largest_before": _finite(before),
        "tolerance": tolerance, "shares": shares, "v_is_d": proof.llm.renderer.style.da_only,
    }  # fmt: skip
    finite = all(np.isfinite(x).all() for x in (v, d, m))
    words = (
        f"v {-v.mean():.4f}, d {-d.mean():.4f}, m {-m.mean():.4f} nats a token over {len(m)}; "
        f"where tokens are hidden ({len(narrow)}) d {-d[narrow].mean():.4f}, "
        f"m {-m[narrow].mean():.4f}; before, d and m differ by {before:.1e} at most (allowed "
        f"{tolerance:.0e}); in narrow blocks they differ at "
        f"{', '.join(f'{share:.0%}' for share in shares)} of the tokens (over {MOST:.0%} needed)"
    )
    if figures["v_is_d"]:
        words += "; v is d, for this checkpoint knows only the prompt with declarations"
    good = finite and before <= tolerance and min(shares) > MOST
    return Check("likelihood", _status(good), words, figures)


def _pages(proof: _Proof) -> Check:
    """Pages that the operation visits, that the account says, and that the protocol implies."""
    request = proof.request()
    with _watched(proof) as seen:
        response = proof.answer(request)
    page, prompt = proof.llm.engine.config.page_size, request.prompt
    wrong: dict[str, list[int]] = {"operation": [], "account": [], "mask": []}
    total = dict.fromkeys(("operation", "account", "protocol", "everything"), 0)
    for index, (step, (pages, shown)) in enumerate(zip(response.steps, seen, strict=True)):
        length = len(prompt) + index + 1
        visible = proof.script.visible(prompt, length - 1, length)
        expected = _pages_of(visible, page)
        total["operation"] += pages
        total["account"] += step.read // page
        total["protocol"] += expected
        total["everything"] += -(-length // page)
        faults = {
            "operation": pages != expected,
            "account": step.read != page * expected or step.attended != visible.sum(),
            "mask": not np.array_equal(shown[:length], visible),
        }
        for name in (name for name, fault in faults.items() if fault):
            wrong[name].append(index + 1)
    hidden = total["everything"] - total["protocol"]
    steps = len(response.steps)
    words = (
        f"{steps} steps: the operation visited {total['operation']:,}, the account says "
        f"{total['account']:,}, the protocol {total['protocol']:,} of {total['everything']:,}"
    )
    for name, at in wrong.items():
        if at:
            words += f"; {name} wrong at {len(at)} steps, first {at[0]}"
    if hidden <= 0:
        words += "; no step hides a whole page, so this proves nothing: use smaller pages"
    figures = total | {"steps": steps, "page_size": page, "wrong": wrong}
    return Check("pages", _status(hidden > 0 and not any(wrong.values())), words, figures)


def _pages_of(visible: np.ndarray, page: int) -> int:
    """Entries that a mask needs for tokens [n]: each page once for each run of tokens in it."""
    padded = np.pad(visible, (0, -len(visible) % page)).reshape(-1, page)
    starts = padded & ~np.pad(padded, ((0, 0), (1, 0)))[:, :-1]
    return int(starts.sum())


@contextmanager
def _watched(proof: _Proof) -> Iterator[list[tuple[int, np.ndarray]]]:
    """For every decode step of row 0: pages that were visited, and positions that were shown."""
    runner, found = proof.llm.engine.runner, list[tuple[int, np.ndarray]]()
    decode, page = runner.decode, runner.plan.page_size

    def spy(rows: Rows, what: DecodeRows) -> Choice:
        choice = decode(rows, what)
        mask, table = rows.mask, rows.block_table[0]
        shown = np.zeros((len(table), page), bool)
        for entry in range(mask.count[0]):
            lo, hi = mask.span[0, entry] & 0xFFFF, mask.span[0, entry] >> 16
            # What a page holds is said by the table, not by the mask.
            shown[np.flatnonzero(table == mask.page[0, entry]), lo:hi] = True
        token, entries = jax.device_get((choice.token, choice.entries))
        visited = entries[token[:, 0] >= 0, 0]
        found.extend((int(pages), shown.reshape(-1)) for pages in visited)
        return choice

    with poison.instead(runner, decode=spy):
        yield found


def _answer_batches(proof: _Proof) -> None:
    """Requests of all sizes at once, each with a mask and sampling of its own."""
    llm, document, ids = proof.llm, proof.document, proof.script.ids
    most = llm.engine.config.max_num_seqs
    for count in sorted({1, 2, 3, most, most + 1}):
        requests = []
        for i in range(count):
            forced = ids[: 1 + (i + 1) * len(ids) // (count + 1)]
            params = SamplingParams(
                max_tokens=len(forced) + 3 * i, temperature=float(i % 2), top_k=i, seed=i,
                logprobs=[None, 3][i % 2], ignore_eos=True,
            )  # fmt: skip
            chunks = document.chunks[: 1 + i % len(document.chunks)]
            request = llm.request(
                chunks, document.question, arm=list(Arm)[i % 3], sampling=params, forced=forced
            )
            requests.append(request)
        done = sum(isinstance(event, Done) for event in llm.engine.run(requests))
        assert done == count, f"{done} of {count} requests ended"


def _programs(made: int, llm: LLM) -> Check:
    shapes = llm.engine.shapes
    words = (
        f"{made} compiled after warm-up, over masks of three arms, up to "
        f"{llm.engine.config.max_num_seqs + 1} sequences and prompts of many lengths"
    )
    figures = {"compiled": made, "batches": shapes.batches, "prefill": shapes.chunks}
    return Check("programs", _status(not made), words, figures)


def _poison(proof: _Proof) -> Check:
    """Poison in all that is hidden, then in one place that is not."""
    if jax.process_count() > 1:
        words = (
            f"NOT RUN: {jax.process_count()} processes share the model, and poison is put there "
            "by one; verify it in one process"
        )
        return Check("poison", Status.NOT_RUN, words, {})
    engine, request, few = proof.llm.engine, proof.request(), proof.request(tokens=3)
    proof.answer(request)  # so that all that follow find as much of the prompt in the cache
    clean, clean_few = proof.answer(request), proof.answer(few)
    with poison.poisoned(engine, _seen_by_protocol(proof, request.prompt)) as counts:
        dirty = proof.answer(request)
    changed = _changed(clean, dirty)
    with poison.poisoned(engine, _all_but_the_first(proof, request.prompt)):
        seen = proof.answer(few)
    noticed = _changed(clean_few, seen)
    poison.cleanse(engine)
    size, tokens = len(request.prompt), range(len(clean.token_ids) - 1)
    visible = (proof.script.visible(request.prompt, size + i, size) for i in tokens)
    hidden = sum(int(size - shown.sum()) for shown in visible)
    kind = "NaN" if engine.memory.kv_dtype not in ("int8", "float8_e4m3fn") else "a huge number"
    words = (
        f"{kind} in all that is hidden ({max(counts):,} slots of each full-attention layer at "
        f"most; {hidden:,} tokens of the prompt over all steps) changed {len(changed)} of "
        f"{len(clean.token_ids)} tokens or their {MAX_LOGPROBS} likeliest"
    )
    if changed:
        words += f", the first at {changed[0]}"
    words += f"; in one visible slot it changed {len(noticed)} of 2"
    figures = {
        "changed": len(changed), "tokens": len(clean.token_ids), "slots": max(counts),
        "hidden_tokens": hidden, "noticed_when_visible": len(noticed), "poison": kind,
    }  # fmt: skip
    return Check(
        "poison", _status(not changed and hidden > 0 and len(noticed) == 2), words, figures
    )


def _seen_by_protocol(proof: _Proof, prompt: PromptMap) -> poison.Shown:
    """What the protocol lets a sequence with the scripted response see."""
    plan = proof.llm.engine.runner.plan

    def shown(rows: Rows, row: int, position: int) -> np.ndarray:
        table = rows.block_table[row]
        visible = proof.script.visible(prompt, position, len(table) * plan.page_size)
        held = table < plan.num_pages
        slots = np.zeros((plan.num_pages, plan.page_size), bool)
        slots[table[held]] = visible.reshape(-1, plan.page_size)[held]
        return slots

    return shown


def _all_but_the_first(proof: _Proof, prompt: PromptMap) -> poison.Shown:
    """Everything but the first token of the prompt, which all modes see, once it is decoded."""
    plan = proof.llm.engine.runner.plan

    def shown(rows: Rows, row: int, position: int) -> np.ndarray:
        slots = np.ones((plan.num_pages, plan.page_size), bool)
        if position >= len(prompt):
            slots[rows.block_table[row, 0], 0] = False
        return slots

    return shown


def _changed(one: Response, other: Response) -> list[int]:
    """Tokens, counted from 1, whose log-probability or alternatives differ in any bit."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    # NaN is equal to nothing, itself included.
    return [i for i, (a, b) in enumerate(pairs, 1) if a != b or math.isnan(a.logprob)]


def _logprobs(response: Response) -> np.ndarray:
    return np.array([entry.logprob for entry in response.logprobs], np.float32)


def _nats(logprobs: np.ndarray | Sequence[float]) -> float | None:
    return _finite(-float(np.mean(logprobs)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _status(good: bool) -> Status:
    return Status.PASS if good else Status.FAIL
