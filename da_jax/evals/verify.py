"""Checks that the mask acts, and costs what the account says, on any checkpoint.

Accuracy does not show it: a mask that does nothing looks fine. Six checks, each against what the
protocol says of a scripted response, not against what the engine made of it:

* likelihood: of the response under the plain prompt (v), the prompt with declarations and nothing
  masked (d), and masked (m): d and m are equal until something is hidden, and differ from there.
* oracle: v, d and m are those of a dense forward pass without the engine, as exactly as rounding
  allows. So neither too little nor too much is seen, of what moves a likelihood more than that.
* poison: NaN in all that is hidden changes no bit of what the model says: nothing hidden is read.
* probes: NaN in one slot that is visible changes it, for the first and the last slot of each page
  (of 32 pages at most) and one between, each in one layer, in decode under each mode and in the end
  of prefill. So what rounding would cover is still seen to be read.
* pages: those that the operation visits at each step are those of the account and of the protocol.
* programs: none is compiled after warm-up, whatever is hidden, in batches and lengths of any size.

Not proven: what several sequences that decode at once see (they run, their masks are not checked);
other lengths and other prompts; slots between the probed ones, as far as likelihoods cannot show
them: in bfloat16 and with 8-bit pages that is a fault which moves them less than rounding does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
from da_jax.evals import poison, probes, script
from da_jax.evals.oracle import Oracle
from da_jax.evals.script import Document, Script, State
from da_jax.kernels.paged_attention.pool import QUANTIZED
from da_jax.models.config import ModelConfig
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Nats by which log-probabilities of the same prompt may differ, where nothing is hidden, for a
backend whose sums have no fixed order. By dtype of the model."""
FLOOR = 1e-5
"""Nats: a smaller difference is none, where no greater one was seen before anything was hidden."""
MOST = 0.5
"""Share of the tokens of a narrow block whose log-probability must differ by more than that."""
FACTOR, MEAN, LARGEST = 2.0, 1e-4, 1e-3
"""The engine may differ from a dense float32 pass by `FACTOR` times what a dense pass in the dtype
of the model and of its pages does, and by `MEAN` nats, on average over tokens. Where both are
float32, which leaves rounding nothing to explain, no token may differ by more than `LARGEST`."""


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
        """float32 [R] of the scripted response; NaN for what the engine did not write."""
        found = [entry.logprob for entry in self.answer(self.request(arm)).logprobs]
        missing = [math.nan] * (len(self.script.ids) - len(found))
        return np.array([*found, *missing], np.float32)

    def warm(self) -> None:
        """Answers once, so that all that follow find as much of the prompt in the cache."""
        self.answer(self.request(tokens=1))

    def need(self) -> int:
        """Tokens of the longest prompt with the response."""
        chunks, question = self.document.chunks, self.document.question
        prompts = [self.llm.renderer.render(chunks, question, arm=arm.value) for arm in Arm]
        return max(map(len, prompts)) + len(self.script.ids)


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
      ValueError: several replicas, a tokenizer that cannot write tags, too short sequences.
    """
    if llm.loop is not llm.engine:
        raise ValueError("there are several replicas; verify one (data_parallel=1)")
    proof = _Proof(llm, *script.write(llm))
    if (need := proof.need()) > llm.engine.max_len:
        raise ValueError(
            f"the checks take sequences of {need} tokens with pages of "
            f"{llm.engine.config.page_size}, but max_model_len is {llm.engine.max_len}: raise it "
            "(--max-model-len), or take smaller pages (--page-size)"
        )
    made = compilations.made_here()
    proof.warm()
    columns = {arm: proof.logprobs(arm) for arm in (Arm.UNMASKED, Arm.DA, Arm.VANILLA)}
    likelihood = _likelihood(proof, columns, TOLERANCE[dtype])
    pages = _pages(proof)
    lost = _answer_batches(proof)
    programs = _programs(compilations.made_here() - made, lost, llm)
    # The others come last: their own programs are compiled too.
    alone = jax.process_count() == 1
    others = [
        check(proof) if alone else _not_run(name)
        for name, check in (
            ("oracle", lambda proof: _oracle(proof, columns, dtype)),
            ("poison", _poison),
            ("probes", _probes),
        )
    ]
    return [likelihood, *others, pages, programs]


def _not_run(name: str) -> Check:
    words = (
        f"NOT RUN: {jax.process_count()} processes share the model, and this check runs in one; "
        "verify it in one process"
    )
    return Check(name, Status.NOT_RUN, words, {})


def _likelihood(proof: _Proof, columns: Mapping[Arm, np.ndarray], tolerance: float) -> Check:
    """Three columns of the likelihood of one response."""
    v, d, m = (columns[arm] for arm in (Arm.VANILLA, Arm.UNMASKED, Arm.DA))
    moved, blocks = np.abs(m - d), proof.script.blocks
    first = blocks[0][0]
    narrow = np.concatenate([np.array(block) for block in blocks])
    before = float(moved[:first].max())
    noise = max(before, FLOOR)
    shares = [float((moved[block] > noise).mean()) for block in map(list, blocks)]
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
        f"{tolerance:.0e}); in narrow blocks they differ by more than {noise:.0e} at "
        f"{', '.join(f'{share:.0%}' for share in shares)} of the tokens (over {MOST:.0%} needed)"
    )
    if figures["v_is_d"]:
        words += "; v is d, for this checkpoint knows only the prompt with declarations"
    good = finite and before <= tolerance and min(shares) > MOST
    return Check("likelihood", _status(good), words, figures)


def _oracle(proof: _Proof, columns: Mapping[Arm, np.ndarray], dtype: str) -> Check:
    """The same columns by dense forward passes, where there is room for them."""
    try:
        return _against_dense(proof, columns, dtype)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    words = (
        "NOT RUN: the device has no room for a dense pass in float32 beside the model; share it "
        "among more devices (--tensor-parallel), or lower --max-model-len"
    )
    return Check("oracle", Status.NOT_RUN, words, {})


def _against_dense(proof: _Proof, columns: Mapping[Arm, np.ndarray], dtype: str) -> Check:
    runner, ids = proof.llm.engine.runner, proof.script.ids
    exact = Oracle(runner, exact=True)
    rounds = dtype != "float32" or runner.plan.kv_dtype in QUANTIZED
    own = Oracle(runner, exact=False) if rounds else exact
    words, good, figures, longest = list[str](), True, dict[str, Any](), 0
    for name, arm in (("v", Arm.VANILLA), ("d", Arm.UNMASKED), ("m", Arm.DA)):
        prompt = proof.request(arm).prompt
        total = len(prompt) + len(ids)
        longest = max(longest, total)
        masks, which = [np.ones(total, bool)], np.zeros(total, np.int32)
        if arm is Arm.DA:
            masks, which = proof.script.masks(prompt)
        given = np.concatenate([prompt.ids, ids]), masks, which, len(ids)
        expected = exact.logprobs(*given)
        error = np.abs(columns[arm] - expected)
        rounding = 0.0 if own is exact else float(np.abs(own.logprobs(*given) - expected).mean())
        allowed, mean, largest = FACTOR * rounding + MEAN, float(error.mean()), float(error.max())
        # NaN fails both.
        good &= mean <= allowed and (own is not exact or largest <= LARGEST)
        figures[name] = {
            "mean": _finite(mean), "largest": _finite(largest), "rounding": _finite(rounding),
            "allowed": _finite(allowed), "tokens": total,
        }  # fmt: skip
        words.append(f"{name} {mean:.1e} (allowed {allowed:.1e}, largest {largest:.1e})")
    figures["largest_allowed"] = LARGEST if own is exact else None
    hidden = float(np.abs(columns[Arm.DA] - columns[Arm.UNMASKED]).mean())
    figures["hiding_moves"] = _finite(hidden)
    text = (
        f"dense forward passes in float32, over up to {longest} tokens, differ by so many nats a "
        f"token: {', '.join(words)}; "
    )
    if own is exact:
        text += f"no token may differ by more than {LARGEST:.0e}"
    else:
        kinds = f"{dtype}, pages in {runner.plan.kv_dtype}"
        text += f"allowed is {FACTOR:g} times what rounding explains ({kinds})"
    return Check("oracle", _status(good), f"{text}; hiding moves them by {hidden:.1e}", figures)


def _pages(proof: _Proof) -> Check:
    """Pages that the operation visits, that the account says, and that the protocol implies."""
    request = proof.request()
    with _watched(proof) as seen:
        response = proof.answer(request)
    page, prompt = proof.llm.engine.config.page_size, request.prompt
    wrong: dict[str, list[int]] = {"operation": [], "account": [], "mask": []}
    total = dict.fromkeys(("operation", "account", "protocol", "everything"), 0)
    for index, (step, (pages, shown)) in enumerate(zip(response.steps, seen)):
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
    steps, made, due = len(response.steps), len(seen), len(proof.script.ids) - 1
    words = (
        f"{steps} steps: the operation visited {total['operation']:,}, the account says "
        f"{total['account']:,}, the protocol {total['protocol']:,} of {total['everything']:,}"
    )
    if not steps == made == due:
        words += f"; the operation made {made} steps, and the response takes {due}"
    for name, at in wrong.items():
        if at:
            words += f"; {name} wrong at {len(at)} steps, first {at[0]}"
    if hidden <= 0:
        words += "; no step hides a whole page, so this proves nothing: use smaller pages"
    figures = total | {"steps": steps, "made": made, "page_size": page, "wrong": wrong}
    good = hidden > 0 and steps == made == due and not any(wrong.values())
    return Check("pages", _status(good), words, figures)


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


def _answer_batches(proof: _Proof) -> int:
    """Runs batches of all sizes, rows with masks and sampling of their own; how many got lost."""
    lost = 0
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
        lost += count - sum(isinstance(event, Done) for event in llm.engine.run(requests))
    return lost


def _programs(made: int, lost: int, llm: LLM) -> Check:
    shapes = llm.engine.shapes
    words = (
        f"{made} compiled after warm-up, over masks of three arms, up to "
        f"{llm.engine.config.max_num_seqs + 1} sequences and prompts of many lengths"
    )
    if lost:
        words += f"; {lost} requests never ended"
    figures = {"compiled": made, "batches": shapes.batches, "prefill": shapes.chunks, "lost": lost}
    return Check("programs", _status(not made and not lost), words, figures)


def _poison(proof: _Proof) -> Check:
    """Poison in all that is hidden, then, to see that it acts, in one place that is not."""
    engine, request, few = proof.llm.engine, proof.request(), proof.request(tokens=3)
    prompt = request.prompt
    proof.warm()
    clean, clean_few = proof.answer(request), proof.answer(few)
    with poison.poisoned(engine, _seen_by_protocol(proof, prompt)) as counts:
        dirty = proof.answer(request)
    changed = _changed(clean, dirty)
    with poison.instead(engine.scheduler, find_prefixes=False):  # so that all is prefilled anew
        cold = proof.answer(few)
        with poison.poisoned(engine, _seen_by_protocol(proof, prompt)):
            dirty_few = proof.answer(few)
    in_prefill = _changed(cold, dirty_few)
    with poison.poisoned(engine, _all_but_the_first(proof, prompt)):
        seen = proof.answer(few)
    noticed = _changed(clean_few, seen)
    poison.cleanse(engine)
    size, tokens = len(prompt), range(len(clean.token_ids) - 1)
    visible = (proof.script.visible(prompt, size + i, size) for i in tokens)
    hidden = sum(int(size - shown.sum()) for shown in visible)
    words = (
        f"{_kind(proof)} in all that is hidden ({max(counts):,} slots of each full-attention layer "
        f"at most; {hidden:,} tokens of the prompt over all steps) changed {len(changed)} of "
        f"{len(clean.token_ids)} tokens or their {MAX_LOGPROBS} likeliest"
    )
    if changed:
        words += f", the first at {changed[0]}"
    words += f", and {len(in_prefill)} of {len(few.forced)} after a prompt that is not in the cache"
    words += f"; in one visible slot it changed {len(noticed)} of 2"
    figures = {
        "changed": len(changed), "tokens": len(clean.token_ids), "slots": max(counts),
        "changed_when_prefilled": len(in_prefill), "hidden_tokens": hidden,
        "noticed_when_visible": len(noticed), "poison": _kind(proof),
    }  # fmt: skip
    good = not changed and not in_prefill and hidden > 0 and len(noticed) == 2
    return Check("poison", _status(good), words, figures)


def _probes(proof: _Proof) -> Check:
    """Poison in one visible slot at a time."""
    engine, request, few = proof.llm.engine, proof.request(), proof.request(tokens=1)
    size, modes = len(request.prompt), set[State]()

    def visible(program: str, first: int, last: int) -> np.ndarray | None:
        if program == "prefill":  # what follows says what its last token saw
            return np.ones(last + 1, bool) if first and last == size - 1 else None
        state = proof.script.states[first - size]
        if state in modes:
            return None
        modes.add(state)
        return proof.script.visible(request.prompt, first, first + 1)

    with (
        poison.instead(engine.scheduler, find_prefixes=False),
        probes.probing(engine, visible) as prefilled,
    ):
        proof.answer(few)
    with probes.probing(engine, visible, seed=1) as found:
        proof.answer(request)
    poison.cleanse(engine)
    found = [*prefilled, *found]
    missed = [probe for probe in found if not probe.noticed]
    count = {name: sum(p.program == name for p in found) for name in ("decode", "prefill")}
    words = (
        f"{_kind(proof)} in one visible slot of one layer, {count['decode']} times in decode under "
        f"{len(modes)} masks and {count['prefill']} times in prefill, went unnoticed {len(missed)} "
        "times"
    )
    for probe in missed[:1]:
        words += f", first at position {probe.slot} in {probe.program} of position {probe.fed}"
    figures = count | {"masks": len(modes), "missed": [probe._asdict() for probe in missed]}
    good = not missed and len(modes) == len(set(proof.script.states[:-1]))
    return Check("probes", _status(good), words, figures)


def _kind(proof: _Proof) -> str:
    return "NaN" if proof.llm.memory.kv_dtype not in QUANTIZED else "a huge number"


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
    pairs = itertools.zip_longest(one.logprobs, other.logprobs)
    # NaN is equal to nothing, itself included.
    return [i for i, (a, b) in enumerate(pairs, 1) if a != b or math.isnan(a.logprob)]


def _nats(logprobs: np.ndarray | Sequence[float]) -> float | None:
    return _finite(-float(np.mean(logprobs)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _status(good: bool) -> Status:
    return Status.PASS if good else Status.FAIL
