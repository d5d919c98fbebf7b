"""The engine: a queue of requests in, a stream of events out.

Each step prefills chunks of waiting prompts and runs one burst of decode steps for everybody else.
A sequence pauses within a burst where its mode may change, so a declaration is in force from the
very next forward pass of its own sequence, and the others do not wait.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from da_jax.cache import pools
from da_jax.cache.pages import PagePool
from da_jax.cache.prefix import PrefixCache
from da_jax.engine import memory
from da_jax.engine.batch import allowed_of, fill_decode, fill_rows
from da_jax.engine.config import MAX_STOP_IDS, EngineConfig
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.loop import Loop, RequestError
from da_jax.engine.request import Event, PrefillProgress, Request, TokenLogprob
from da_jax.engine.rows import PAUSE, Choice, Shapes, packed
from da_jax.engine.runner import Runner
from da_jax.engine.sampling import key_of
from da_jax.engine.scheduler import Scheduler
from da_jax.engine.sequence import Chunk, Sequence, most_spans
from da_jax.engine.timing import Timing
from da_jax.kernels.paged_attention import Problem, choose
from da_jax.models import sharding
from da_jax.models.config import GatedDelta, ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.protocol.guide import Guides
from da_jax.protocol.visibility import visible_spans

SPARE_ENTRIES = 64  # entries of a mask beyond two a page, see `shapes`
LONGEST_DEFAULT = 32_768


class Engine(Loop):
    """Runs requests on one model.

    Args:
      model: the model.
      table: the tokens as bytes.
      stop_ids: the checkpoint's own stop tokens.
      config: settings.
      ids: numbers for its requests.
      clock: seconds that never go back.

    Raises:
      ValueError: a setting that cannot work with this model, or a device that cannot hold it.
      BackendError: the attention backend cannot run here, or not this model.
    """

    def __init__(
        self,
        model: Decoder,
        table: TokenTable,
        stop_ids: frozenset[int],
        config: EngineConfig,
        ids: Iterator[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.config, self.table, self._clock = config, table, clock
        declared = model.config.max_positions
        self.max_len = min(config.max_model_len or LONGEST_DEFAULT, declared)
        if config.max_model_len and config.max_model_len > declared:
            raise ValueError(
                f"max_model_len is {config.max_model_len}, but the checkpoint declares "
                f"{declared} positions; lower it, or raise max_position_embeddings in config.json "
                "together with rope_parameters (older files: rope_scaling) that reach so far (yarn)"
            )
        self._stop_ids, self._vocabulary = stop_ids, model.config.vocab_size
        self.shapes = shapes(config, self.max_len, len(stop_ids))
        self.memory, plan = memory.plan(model, config, self.shapes, self.max_len)
        for problem in attention_problems(model.config, self.shapes, plan, model.dtype.name):
            choose(config.attention, problem)  # refused here, before anything is compiled
        self._costs = _fit(token_costs(table), self._vocabulary)
        self._opens = _fit(table.contains(b"<"), self._vocabulary)
        self.runner = Runner(
            model, self.shapes, plan, costs=self._costs, opens=self._opens, impl=config.attention
        )
        self._valid = packed(np.flatnonzero(table.known[: self._vocabulary]), self.runner.words)
        copies = range(plan.sequences, plan.num_slots) if plan.rings or plan.states else None
        prefix = PrefixCache(PagePool(plan.num_pages), _root(model, plan), copies)
        self.scheduler = Scheduler(
            prefix, max_num_seqs=plan.sequences, page_size=config.page_size,
            max_waiting=config.max_waiting, margin=config.burst,
            find_prefixes=config.prefix_cache,
        )  # fmt: skip
        self.timing = Timing()
        self._ids = itertools.count() if ids is None else ids
        self._turns = itertools.count()
        self._flights: list[_Flight] = []
        self._deadlines: list[tuple[float, int]] = []  # heap of (when, request id)
        self._unread: list[Sequence] = []  # whose text is read while the device runs on

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program; after it nothing compiles. See `compilations`."""
        self.runner.warm_up(progress)

    def check(self, request: Request) -> None:
        """Refuses a request that can never run.

        Raises:
          RequestError: with the value and the remedy.
        """
        length = len(request.prompt.ids)
        if length == 0:
            raise RequestError("the prompt is empty; give a document or a question")
        if length >= self.max_len:
            raise RequestError(
                f"the prompt has {length} tokens, but max_model_len is {self.max_len}; shorten the "
                "document or raise max_model_len (up to what the checkpoint declares)"
            )
        self._check_start(request)
        ids = {*request.prompt.ids.tolist(), *request.forced, *self._request_stop_ids(request)}
        if strange := sorted(i for i in ids if not 0 <= i < self._vocabulary):
            raise RequestError(
                f"token ids {strange[:9]} are beyond the model's vocabulary of {self._vocabulary}; "
                "the tokenizer or the ids belong to another model"
            )
        room = min(request.params.max_tokens, self.max_len - length)
        if len(request.forced) > room:
            raise RequestError(
                f"{len(request.forced)} forced tokens do not fit: max_tokens and max_model_len "
                f"leave room for {room}"
            )
        if request.params.guided:
            try:
                self._guides().check(self._request_stop_ids(request))
            except ValueError as error:
                raise RequestError(str(error)) from error

    def _guides(self) -> Guides:
        return self.table.guides(self._vocabulary)

    def _check_start(self, request: Request) -> None:
        """Refuses visible chunks that the mask cannot list apart, as it would widen instead."""
        start, prompt, page = request.start, request.prompt, self.config.page_size
        spans = len(visible_spans(prompt, start.mode, start.focus, request.scaffold))
        tokens = min(len(prompt) + request.params.max_tokens, self.max_len)
        most = most_spans(self.shapes.entries, tokens, page)
        if spans > most:
            raise RequestError(
                f"what is visible from the start lies in {spans} places of the prompt, but a mask "
                f"holds {most}; name fewer chunks, or some that follow each other"
            )

    def add(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
          RequestError: when it can never run; nothing was queued.
          QueueFull: when `max_waiting` requests wait already; nothing was queued.
        """
        self.check(request)
        sequence = self._sequence(request)
        self.scheduler.enqueue(sequence)
        if request.deadline is not None:
            ends = self._clock() + request.deadline
            heapq.heappush(self._deadlines, (ends, sequence.request_id))
        return sequence.request_id

    def _sequence(self, request: Request) -> Sequence:
        seed = request.params.seed
        return Sequence(
            next(self._ids),
            request,
            self.table,
            self._request_stop_ids(request),
            key=key_of(secrets.randbits(64) if seed is None else seed),
            max_len=min(len(request.prompt.ids) + request.params.max_tokens, self.max_len),
            page_size=self.config.page_size,
            entries=self.shapes.entries,
            guides=self._guides() if request.params.guided else None,
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do or to tell."""
        return self.scheduler.idle and not self._pending

    @property
    def room(self) -> int:
        """How many more requests may wait."""
        return self.scheduler.room

    def cached_tokens(self, request: Request) -> int:
        """Tokens at the start of its prompt that `add` would find in the cache."""
        return self.scheduler.cached_tokens(request.prompt.ids)

    def step(self) -> list[Event]:
        """Takes what the device chose, gives it new work, and returns what came of the old.

        The device gets a burst for all whose prompt is in the cache, after chunks of prompts that
        are not. While it runs, the host reads the text of those sequences that did not have to
        be read before.
        """
        work = self._expire, self._collect, self._prefill, self._burst, self._read
        return self._step(*work)

    def prefill_step(self) -> list[Event]:
        """A step without a burst: nothing decodes."""
        return self._step(self._expire, self._collect, self._prefill, self._read)

    def _step(self, *work: Callable[[], list[Event]]) -> list[Event]:
        # This is where the time goes, and what may be interrupted.
        jax.block_until_ready([flight.choices for flight in self._flights])
        events = self._all(*work)
        if self.scheduler.idle:
            self._flights.clear()  # of rows that nobody waits for any more
        return events

    def _cancel(self, request_id: int) -> list[Event]:
        sequence = self.scheduler.find(request_id)
        return [] if sequence is None else self._end(sequence, "cancelled")

    def _expire(self) -> list[Event]:
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            late = self.scheduler.find(heapq.heappop(self._deadlines)[1])
            events += [] if late is None else self._end(late, "deadline")
        return events

    def _end(self, sequence: Sequence, reason: str) -> list[Event]:
        """Ends a sequence after what it received so far."""
        events = sequence.read()
        if sequence.finish_reason is None:
            events += sequence.finish(reason)
        self.scheduler.remove(sequence)
        return events

    def _collect(self) -> list[Event]:
        """Takes what the device chose, after an interruption too.

        The caches have moved on with these tokens, and a recurrent state cannot go back.
        """
        events: list[Event] = []
        self.timing.began()
        while self._flights:
            flight = self._flights[0]
            choices = jax.device_get(flight.choices)
            if flight.burst:
                self.timing.collected(int((choices.token >= 0).any(1).sum()))
            while flight.rows:
                row, sequence = flight.rows[0]
                new = _host_choices(choices, row, sequence)
                flight.rows.pop(0)
                if sequence.finish_reason is None:  # else nobody waits for it any more
                    sequence.receive(new)
                    self._unread.append(sequence)
            self._flights.pop(0)
        urgent = [s for s in self._unread if self._urgent(s)]
        for sequence in urgent:
            events += self._read_one(sequence)
        self._unread = [s for s in self._unread if s not in urgent]
        return events

    def _urgent(self, sequence: Sequence) -> bool:
        """Whether the next step of a sequence depends on what it just wrote."""
        new = sequence.unread
        return (
            sequence.open
            or sequence.tokens_left <= 0
            or not sequence.stop_ids.isdisjoint(new)
            or bool((self._opens[new] | (self._costs[new] >= PAUSE)).any())
        )

    def _read(self) -> list[Event]:
        """Reads what need not be read before."""
        events: list[Event] = []
        while self._unread:
            events += self._read_one(self._unread[0])
            self._unread.pop(0)
        return events

    def _read_one(self, sequence: Sequence) -> list[Event]:
        if sequence.finish_reason is not None:
            return []
        events = sequence.read()
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)
        return events

    def _prefill(self) -> list[Event]:
        """Admits what fits and prefills as many chunks as a step may compute."""
        self.scheduler.admit()
        rows = sum(s.decoding for s in self.scheduler.running)
        budget = self.config.step_tokens - rows * self.config.burst
        events, spent = list[Event](), 0
        while not spent or spent < budget:
            sequence = self.scheduler.next_prefill(next(self._turns))
            if sequence is None:
                break
            source = self.scheduler.skip_cached(sequence)
            if source is not None:
                self.runner.copy(source, sequence.slot)
            chunk = sequence.next_chunk(self.config.prefill_chunk, self.scheduler.border(sequence))
            made, room = self._make_room(sequence, chunk.end)
            events += made
            if not room:
                break
            self._feed(sequence, chunk)
            spent += len(chunk.tokens)
            if chunk.start < sequence.prompt_len:
                done = min(sequence.cached, sequence.prompt_len)
                events.append(PrefillProgress(sequence.request_id, done, sequence.prompt_len))
        return events

    def _feed(self, sequence: Sequence, chunk: Chunk) -> None:
        """Prefills a chunk, and shares what others may find of it."""
        if len(chunk.tokens):
            self.timing.prefilled()
            rows = fill_rows(self.runner.empty_rows(1), [sequence], [chunk.view], self.runner.plan)
            choice = self.runner.prefill(
                chunk.tokens, chunk.start, rows, forced=sequence.forced(1)[0],
                allowed=self._valid & allowed_of(sequence), wants_top=_wants_top(sequence),
            )  # fmt: skip
            sequence.cached = chunk.end
            if sequence.length == sequence.prompt_len == chunk.end:
                self._flights.append(_Flight(choice, [(0, sequence)], burst=False))
        self.scheduler.share(sequence, chunk.start)
        if target := self.scheduler.copy_target(sequence):
            name, slot = target
            self.runner.copy(sequence.slot, slot)
            self.scheduler.prefix.keep(name, slot)

    def _make_room(self, sequence: Sequence, tokens: int) -> tuple[list[Event], bool]:
        """Lets others give way until a sequence has pages for `tokens`; whether it has them."""
        events: list[Event] = []
        while (victim := self.scheduler.reserve(sequence, tokens)) is not None:
            if victim is sequence:
                return events, False
            events += self._preempt(victim)
        return events, True

    def _preempt(self, sequence: Sequence) -> list[Event]:
        """Makes a running sequence give way, unless what it wrote already ends it."""
        events = self._read_one(sequence)
        if sequence.finish_reason is None:
            for flight in self._flights:  # its first token is chosen again
                flight.rows = [(row, s) for row, s in flight.rows if s is not sequence]
            self.scheduler.preempt(sequence)
        return events

    def _burst(self) -> list[Event]:
        """Starts a burst of everybody whose prompt is in the cache, as far as there is room."""
        events, sequences = list[Event](), list[Sequence]()
        ready = [s for s in self.scheduler.running if s.decoding and s.tokens_left]
        for sequence in sorted(ready, key=lambda s: s.rank):
            if sequence not in self.scheduler.running:
                continue  # it gave way
            steps = sequence.steps(self.shapes.burst)
            made, room = self._make_room(sequence, sequence.length - 1 + steps)
            events += made
            if room:
                sequences.append(sequence)
        sequences = [s for s in sequences if s in self.scheduler.running]
        if not sequences:
            return events
        batch = Shapes.bucket(self.shapes.batches, len(sequences))
        rows = fill_rows(
            self.runner.empty_rows(batch), sequences, [s.view() for s in sequences],
            self.runner.plan,
        )  # fmt: skip
        decode = self.runner.empty_decode(batch)
        decode.allowed[:] = self._valid
        decode = fill_decode(decode, sequences)._replace(
            wants_top=np.array(any(map(_wants_top, sequences))),
            patience=np.array(self.timing.patience, np.float32),
        )
        choices = self.runner.decode(rows, decode)
        self._flights.append(_Flight(choices, list(enumerate(sequences)), burst=True))
        self.timing.launched()
        return events

    def _request_stop_ids(self, request: Request) -> frozenset[int]:
        own = frozenset() if request.params.ignore_eos else self._stop_ids
        return own | frozenset(request.params.stop_token_ids)


@dataclasses.dataclass
class _Flight:
    """A call of a device program whose choices the host has not taken.

    Attributes:
      choices: [K, B], on the device.
      rows: (row, sequence) of those that have not taken theirs.
      burst: whether it is a burst.
    """

    choices: Choice
    rows: list[tuple[int, Sequence]]
    burst: bool


def _root(model: Decoder, plan: pools.CachePlan) -> bytes:
    """What stands for the model in the names of pages: all that shapes what they hold."""
    return repr((model.config, plan.dtype, plan.kv_dtype, sorted(plan.pages))).encode()


def shapes(config: EngineConfig, max_len: int, stop_ids: int) -> Shapes:
    """Every shape that the device programs of an engine have."""
    batches = [1]
    while batches[-1] < config.max_num_seqs:
        batches.append(min(2 * batches[-1], config.max_num_seqs))
    blocks = -(-max_len // config.page_size)
    small = max(config.prefill_chunk // 8, 1)
    return Shapes(
        batches=tuple(batches),
        chunks=tuple(sorted({small, config.prefill_chunk})),
        burst=config.burst,
        entries=2 * blocks + SPARE_ENTRIES,  # one a page, and one more for each visible span
        blocks=blocks,
        stop_ids=stop_ids + MAX_STOP_IDS,
    )


def attention_problems(
    config: ModelConfig, shapes: Shapes, plan: pools.CachePlan, dtype: str
) -> list[Problem]:
    """Every distinct call of `paged_attention`, at the largest shapes that the programs have."""
    problems = []
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        if isinstance(mixer, GatedDelta):
            continue
        owner = index if mixer.donor is None else mixer.donor
        windowed = mixer.window is not None
        form = plan.rings[owner] if windowed else plan.pages[owner]
        width = plan.ring_blocks(owner) if windowed else shapes.entries
        for batch, queries in ((max(shapes.batches), 1), (1, max(shapes.chunks))):
            heads = mixer.num_heads // sharding.attention_shards(mixer, plan.devices)
            problems.append(Problem(batch, queries, heads, width, dtype, form, windowed))
    return list(dict.fromkeys(problems))


def token_costs(table: TokenTable) -> np.ndarray:
    """int32 [len(table)]: what each token takes of the room of a sequence that writes it."""
    sizes = np.array([len(table.bytes_of(i)) for i in range(len(table))], np.int32)
    return np.where(table.contains(b">"), np.int32(PAUSE), sizes)


def _fit(values: np.ndarray, vocabulary: int) -> np.ndarray:
    """[V] from values of the tokenizer's ids: an embedding may be padded beyond them."""
    out = np.zeros(vocabulary, values.dtype)
    out[: len(values)] = values[:vocabulary]
    return out


def _wants_top(sequence: Sequence) -> bool:
    return bool(sequence.request.params.logprobs)


def _host_choices(choices: Choice, row: int, sequence: Sequence) -> list[TokenLogprob]:
    """What a row chose, in order."""
    tokens = choices.token[:, row]
    count = int(np.count_nonzero(tokens >= 0))
    wanted = sequence.request.params.logprobs or 0
    tops: Iterable[tuple[tuple[int, float], ...]] = itertools.repeat((), count)
    if wanted:
        ids = choices.top_ids[:count, row, :wanted].tolist()
        values = choices.top_logprobs[:count, row, :wanted].tolist()
        tops = (tuple(zip(*pair)) for pair in zip(ids, values))
    logprobs = choices.logprob[:count, row].tolist()
    return list(map(TokenLogprob, tokens[:count].tolist(), logprobs, tops))
