"""Runs an engine for a benchmark, and tells what its host and its device take."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.bench.transcript import Words, transcript
from da_jax.checkpoints import convert, paths
from da_jax.engine import compilations
from da_jax.engine.config import EngineConfig
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.engine import Engine
from da_jax.engine.llm import load_model, load_tokenizer, stop_token_ids
from da_jax.engine.request import Done, Request, Response, SamplingParams, TokenLogprob
from da_jax.engine.rows import Choice, DecodeRows, Rows
from da_jax.models.decoder import Decoder
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

CHUNKS = 16
"""Chunks of a prompt: two of them are an eighth of it, as FOCUS shows about 12 % in the paper."""
_SCAFFOLD = 40  # a prompt over this is scaffold before its chunks, and as much behind them
_DISTINCT = 61  # pages of random numbers, repeated; a prime, so that chunks do not repeat
_UNLIMITED = 2**62
SHORTEST_PROMPT = 2 * CHUNKS


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with what engines and transcripts need of its tokenizer.

    Attributes:
      name: how rows name it.
      network: the weights.
      table: the tokens as bytes.
      stop_ids: the checkpoint's stop tokens.
      words: what transcripts are made of.
      folder: its folder, None for random weights.
    """

    name: str
    network: Decoder
    table: TokenTable
    stop_ids: frozenset[int]
    words: Words
    folder: Path | None = None

    @property
    def vocabulary(self) -> int:
        """Ids of the model."""
        return self.network.config.vocab_size


def load(name: str, dtype: str = "auto") -> Model:
    """Loads a checkpoint: a folder, a hub id or `tiny`."""
    compilations.keep()
    folder = convert.resolve(name)
    local = paths.local_metadata(folder)
    tokenizer = load_tokenizer(local)
    table = TokenTable.from_tokenizer(tokenizer)
    return Model(
        name=name,
        network=load_model(folder, EngineConfig(dtype=dtype)),
        table=table,
        stop_ids=stop_token_ids(local, tokenizer),
        words=Words.from_tokenizer(table, tokenizer),
        folder=local,
    )


def build(
    model: Model,
    batch: int,
    context: int,
    *,
    prefill: bool = True,
    compiled: bool = True,
    **options: Any,
) -> Engine:
    """An engine that decodes only batches of `batch`, so that nothing else has to be compiled.

    Args:
      model: the model.
      batch: sequences.
      context: longest sequence, prompt and response.
      prefill: whether it can prefill; else see `seat`.
      compiled: whether it is ready to run.
      **options: fields of `EngineConfig`.
    """
    options = {"kv_cache_bytes": _UNLIMITED} | options
    config = EngineConfig(max_num_seqs=batch, max_model_len=context, **options)
    engine = Engine(model.network, model.table, model.stop_ids, config)
    chunks = engine.shapes.chunks if prefill else ()
    engine.shapes = dataclasses.replace(engine.shapes, batches=(batch,), chunks=chunks)
    engine.runner.shapes = engine.shapes
    if compiled:
        engine.warm_up()
    return engine


def random_prompt(rng: np.random.Generator, vocabulary: int, length: int, chunks: int) -> PromptMap:
    """A prompt of random tokens, with `chunks` chunks; the plain prompt of `vanilla` for 0."""
    ids = rng.integers(vocabulary // 4, vocabulary // 2, length, dtype=np.int32)
    if not chunks:
        return PromptMap(ids, (), ((0, length),), "", (), (), (), Arm.VANILLA)
    if length < 2 * chunks:
        raise ValueError(f"a prompt of {length} tokens is too short for {chunks} chunks")
    edge = max(length // _SCAFFOLD, 1)
    borders = np.linspace(edge, length - edge, chunks + 1).astype(int).tolist()
    spans = tuple(itertools.pairwise(borders))
    return PromptMap(
        ids, spans, ((0, edge), (length - edge, length)), "", spans, ("",) * chunks,
        (None,) * chunks, Arm.DA,
    )  # fmt: skip


def transcripts(
    model: Model, arm: Arm, batch: int, prompt_tokens: int, new_tokens: int, seed: int = 0
) -> list[Request]:
    """Requests with a forced response each; a seed gives the same ones in every arm."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0)
    return [
        Request(
            random_prompt(rng, model.vocabulary, prompt_tokens, CHUNKS), params, arm,
            forced=transcript(model.words, new_tokens, CHUNKS, seed=seed + row),
        )
        for row in range(batch)
    ]  # fmt: skip


def seat(engine: Engine, requests: Several[Request]) -> list[int]:
    """Adds requests as if their prompts were prefilled; the first response token is read.

    The caches hold random numbers instead of what the prompts mean, which no time depends on. They
    are the same for the same requests, wherever their pages are.

    Returns:
      The numbers of the requests.

    Raises:
      ValueError: there is no room for all of them at once, or a first token is not forced.
    """
    if not all(request.forced for request in requests):
        raise ValueError("a request without a prefill needs its first token forced")
    numbers = [engine.add(request) for request in requests]
    scheduler = engine.scheduler
    scheduler.admit()
    pages = []
    for number in numbers:
        sequence = scheduler.find(number)
        assert sequence is not None
        if sequence not in scheduler.running or scheduler.reserve(sequence, sequence.max_len):
            for one in numbers:
                engine.cancel(one)
            raise ValueError(
                f"{len(requests)} sequences of {sequence.max_len} tokens do not fit at once in "
                f"{engine.runner.plan.num_pages} pages of {engine.runner.plan.page_size} tokens"
            )
        pages.append(sequence.pages)
        sequence.receive([TokenLogprob(sequence.request.forced[0], 0.0)])
        sequence.read()
    _furnish(engine, np.concatenate(pages))
    return numbers


def _furnish(engine: Engine, pages: np.ndarray) -> None:
    """Random numbers in pages, each by its place in the list, and in all rings; states of zeros."""
    plan, caches, key = engine.runner.plan, engine.runner.caches, jax.random.key(0)
    where = jnp.asarray(pages)
    filled = caches._replace(
        pages=jax.tree.map(lambda x: _fill(x, where, key=key), caches.pages),
        rings={
            i: jax.tree.map(functools.partial(_fill, key=key, repeat=plan.ring_blocks(i)), x)
            for i, x in caches.rings.items()
        },
        states=jax.tree.map(jnp.zeros_like, caches.states),
    )
    # Compiled programs take them from where they were.
    engine.runner.caches = jax.block_until_ready(jax.device_put(filled, engine.runner._kept))


@functools.partial(jax.jit, donate_argnums=0, static_argnames="repeat")
def _fill(
    x: jax.Array, where: jax.Array | None = None, *, key: jax.Array, repeat: int = _DISTINCT
) -> jax.Array:
    """Random numbers at x[where], by the place in `where`, the same again after `repeat`."""
    where = jnp.arange(len(x)) if where is None else where
    some = jax.random.normal(key, (min(repeat, _DISTINCT), *x.shape[1:]), jnp.float32)
    return x.at[where].set(some.astype(x.dtype)[jnp.arange(len(where)) % repeat % len(some)])


class Probe:
    """Steps an engine and adds up what that takes; a context manager, which ends the watch.

    It waits for the device before each step, so that what the step itself takes is the host's. That
    is counted in processor time of this thread: on a CPU the device would otherwise count too, for
    it takes the processor away, and so would whoever else is on the machine.

    Attributes:
      seconds: that passed in steps and in waiting for the device.
      host: processor seconds in `Engine.step`; a part of them passes while the device runs.
      exposed: those from a burst's tokens being there to the next burst being launched, in which
        the device has nothing to do.
    """

    def __init__(self, engine: Engine):
        self.engine, self.seconds, self.host, self.exposed = engine, 0.0, 0.0, 0.0
        self._choices: list[Choice] = []
        self._began = 0.0
        self._decode = engine.runner.decode

    def __enter__(self) -> Probe:
        self._own = vars(self.engine.runner).get("decode")
        self.engine.runner.decode = self._launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.runner.decode  # its class has one
        if self._own is not None:
            self.engine.runner.decode = self._own  # type: ignore[method-assign]

    def _launch(self, rows: Rows, decode: DecodeRows) -> Choice:
        choices = self._decode(rows, decode)
        self.exposed += time.thread_time() - self._began
        self._choices.append(choices)
        return choices

    def block(self) -> None:
        """Waits for what was launched."""
        start = time.perf_counter()
        jax.block_until_ready([flight.choices for flight in self.engine._flights])
        self.seconds += time.perf_counter() - start

    def step(self) -> list[Any]:
        """A step of the engine, after what it would have waited for."""
        self.block()
        start, self._began = time.perf_counter(), time.thread_time()
        events = self.engine.step()
        self.host += time.thread_time() - self._began
        self.seconds += time.perf_counter() - start
        return events

    @property
    def steps(self) -> int:
        """Decode steps that the device made."""
        return sum(int((np.asarray(c.token) >= 0).any(1).sum()) for c in self._choices)

    @property
    def bursts(self) -> int:
        """Bursts that were launched."""
        return len(self._choices)

    @property
    def entries(self) -> int:
        """Entries of block masks that were read, as the device says."""
        return sum(int(np.maximum(np.asarray(c.entries), 0).sum()) for c in self._choices)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A batch that was decoded.

    Attributes:
      seconds: from the first decode step to the last token on the host.
      tokens: that decode steps gave, of all sequences.
      steps: decode steps of the device.
      bursts: times that the host looked.
      host, exposed: processor seconds, see `Probe`.
      entries: entries of block masks that the device read.
      responses: one a sequence.
    """

    seconds: float
    tokens: int
    steps: int
    bursts: int
    host: float
    exposed: float
    entries: int
    responses: tuple[Response, ...]

    @property
    def per_token(self) -> float:
        """Seconds of one token of every sequence."""
        return self.seconds * len(self.responses) / self.tokens

    @property
    def rate(self) -> float:
        """Tokens a second, of all sequences."""
        return self.tokens / self.seconds

    @property
    def steps_per_token(self) -> float:
        """Decode steps of the device for one token of every sequence; 1 is the least."""
        return self.steps * len(self.responses) / self.tokens

    @property
    def attended(self) -> int:
        """Positions that the decode steps attended."""
        return sum(step.attended for response in self.responses for step in response.steps)

    @property
    def read(self) -> int:
        """Positions of the pages that the decode steps read."""
        return sum(step.read for response in self.responses for step in response.steps)

    def host_us(self, seconds: float) -> float:
        """Microseconds for each token, of seconds for all."""
        return seconds / self.tokens * 1e6


def run(engine: Engine, requests: Several[Request]) -> Measured:
    """Decodes requests whose prompts count as prefilled, see `seat`."""
    numbers = seat(engine, requests)
    done = dict[int, Response]()
    with Probe(engine) as probe:
        while not engine.idle:
            for event in probe.step():
                if isinstance(event, Done) and event.request_id in numbers:
                    done[event.request_id] = event.response
    return Measured(
        seconds=probe.seconds,
        tokens=sum(len(response.token_ids) - 1 for response in done.values()),
        steps=probe.steps,
        bursts=probe.bursts,
        host=probe.host,
        exposed=probe.exposed,
        entries=probe.entries,
        responses=tuple(done[number] for number in numbers),
    )
