"""The engine: a queue of requests in, a stream of events out.

Each step prefills one chunk of one waiting prompt and runs one burst of decode steps for everybody
else. A sequence pauses within a burst where its mode may change, so a declaration is in force from
the very next forward pass of its own sequence, and the others do not wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Generator

import jax
import numpy as np

from da_jax.cache import pools
from da_jax.cache.pages import PagePool
from da_jax.engine import runner as device
from da_jax.engine.config import MAX_STOP_IDS, EngineConfig
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.request import Done, Event, PrefillProgress, Request, TokenLogprob
from da_jax.engine.sampling import key_of
from da_jax.engine.scheduler import Scheduler
from da_jax.engine.sequence import Sequence
from da_jax.kernels.paged_attention import Problem, choose, validate
from da_jax.models.config import GatedDelta, ModelConfig
from da_jax.models.decoder import Decoder

SPARE_ENTRIES = 64  # entries of a mask beyond two a page, see `shapes`
LONGEST_DEFAULT = 32_768


class RequestError(ValueError):
    """A request that cannot run, with the value and the remedy. Other requests are not touched."""


class Engine:
    """Runs requests on one model.

    Args:
      model: the model.
      table: the tokens as bytes.
      stop_ids: the checkpoint's own stop tokens.
      config: settings.

    Raises:
      ValueError: a setting that cannot work with this model.
      BackendError: the attention backend cannot run here, or not this model.
    """

    def __init__(
        self, model: Decoder, table: TokenTable, stop_ids: frozenset[int], config: EngineConfig
    ):
        self.config, self.table = config, table
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
        plan = pools.plan(
            model.config, page_size=config.page_size, max_tokens=self.max_len,
            sequences=config.max_num_seqs, longest_step=max(self.shapes.chunks),
            dtype=model.dtype, budget_bytes=config.kv_cache_bytes,
        )  # fmt: skip
        for problem in attention_problems(model.config, self.shapes, plan, model.dtype.name):
            choose(config.attention, problem)  # refused here, before anything is compiled
        vocabulary = self._vocabulary
        self.runner = device.Runner(
            model, self.shapes, plan, costs=_fit(token_costs(table), vocabulary),
            valid=_fit(table.known, vocabulary), impl=config.attention,
        )  # fmt: skip
        self.scheduler = Scheduler(PagePool(plan.num_pages), config.max_num_seqs, config.page_size)
        self._ids = itertools.count()
        self._pending: list[Event] = []  # for the next `step` to return
        self._unread: _Unread | None = None
        self._boxes: dict[int, list[Event]] = {}  # events of requests that a `run` waits for

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

    def add(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
          RequestError: when it can never run; nothing was queued.
        """
        self.check(request)
        sequence = self._sequence(request)
        self.scheduler.enqueue(sequence)
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
        )

    def cancel(self, request_id: int) -> None:
        """Ends a request now; its response holds what was generated. Unknown ids do nothing."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self._pending += sequence.finish("cancelled")
            self.scheduler.remove(sequence)

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do or to tell."""
        return self.scheduler.idle and not self._pending and self._unread is None

    def step(self) -> list[Event]:
        """Prefills one chunk, then runs one burst; returns what came of it."""
        for work in (self._take, self.prefill_step, self.decode_step):
            made = work()
            self._pending += made  # kept if the next piece of work fails
        events, self._pending = self._pending, []
        return events

    def prefill_step(self) -> list[Event]:
        """Admits what fits and prefills the next chunk of the first unfinished prompt."""
        self.scheduler.admit()
        waiting = [s for s in self.scheduler.running if not s.decoding]
        return self._prefill(waiting[0]) if waiting else []

    def decode_step(self) -> list[Event]:
        """Runs one burst for every sequence whose prompt is in the cache."""
        decoding = [s for s in self.scheduler.running if s.decoding]
        return self._burst(decoding) if decoding else []

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Answers requests, yielding their events and no others.

        Several runs may be interleaved in one thread; each advances all of them. A run that is
        abandoned cancels what it has not finished.

        Raises:
          RequestError: at once, when one of them can never run; nothing was queued.
        """
        for request in requests:
            self.check(request)
        return self._events(requests)

    def _events(self, requests: list[Request]) -> Generator[Event, None, None]:
        sequences, box = [self._sequence(request) for request in requests], list[Event]()
        for sequence in sequences:
            self.scheduler.enqueue(sequence)
        numbers = [sequence.request_id for sequence in sequences]
        self._boxes.update(dict.fromkeys(numbers, box))
        unfinished = set(numbers)
        try:
            while unfinished:
                while not box:
                    if self.idle:
                        raise RuntimeError(f"requests {sorted(unfinished)} were lost by a fault")
                    for event in self.step():
                        self._boxes.get(event.request_id, self._pending).append(event)
                event = box.pop(0)
                if isinstance(event, Done):
                    unfinished.remove(event.request_id)
                yield event
        finally:
            for number in unfinished:
                self.cancel(number)
            self._pending = [e for e in self._pending if e.request_id not in unfinished]
            for number in numbers:
                del self._boxes[number]

    def _prefill(self, sequence: Sequence) -> list[Event]:
        start, total = sequence.prefilled, sequence.prompt_len
        tokens = sequence.request.prompt.ids[start : start + self.config.prefill_chunk]
        choice = self.runner.prefill(
            tokens, start, self._rows([sequence], 1),
            forced=sequence.forced(1)[0], wants_top=_wants_top(sequence),
        )  # fmt: skip
        sequence.prefilled += len(tokens)
        self._unread = _Unread(choice, [(0, sequence)] if sequence.decoding else [])
        return [PrefillProgress(sequence.request_id, sequence.prefilled, total), *self._take()]

    def _burst(self, sequences: list[Sequence]) -> list[Event]:
        count = len(sequences)
        batch = device.Shapes.bucket(self.shapes.batches, count)
        decode, burst = self.runner.empty_decode(batch), self.shapes.burst
        for row, sequence in enumerate(sequences):
            decode.token[row] = sequence.tokens[-1]
            decode.position[row] = sequence.prompt_len + len(sequence.tokens) - 1
            decode.steps[row] = min(burst, sequence.tokens_left)
            decode.room[row] = device.FREE if sequence.room is None else sequence.room
            ids = sorted(sequence.stop_ids)
            decode.stop_ids[row, : len(ids)] = ids
            decode.forced[row] = sequence.forced(burst)
            if sequence.request.params.presence_penalty:
                decode.seen[row, sequence.tokens] = True
        wants_top = np.array(any(map(_wants_top, sequences)))
        choices = self.runner.decode(
            self._rows(sequences, batch), decode._replace(wants_top=wants_top)
        )
        self._unread = _Unread(choices, list(enumerate(sequences)))
        return self._take()

    def _take(self) -> list[Event]:
        """Takes what the device chose, after an interruption too.

        The caches have moved on with these tokens, and a recurrent state cannot go back.
        """
        events: list[Event] = []
        if self._unread is None:
            return events
        try:
            choices, rows = jax.device_get(self._unread.choices), self._unread.rows
            while rows:
                row, sequence = rows[0]
                written = np.count_nonzero(choices.token[:, row] >= 0)
                # What a row wrote beyond its end, or until a closed stream ended it, is dropped.
                if sequence.finish_reason or self._unread.taken == written:
                    rows.pop(0)
                    self._unread.taken = 0
                    continue
                at = (self._unread.taken, row)
                self._unread.taken += 1
                events += self._accept(sequence, _host_choice(choices, at, sequence))
        except BaseException:
            self._pending += events
            raise
        self._unread = None
        return events

    def _accept(self, sequence: Sequence, choice: TokenLogprob) -> list[Event]:
        events = sequence.accept(choice)
        if sequence.finish_reason:
            self.scheduler.remove(sequence)
        return events

    def _request_stop_ids(self, request: Request) -> frozenset[int]:
        own = frozenset() if request.params.ignore_eos else self._stop_ids
        return own | frozenset(request.params.stop_token_ids)

    def _rows(self, sequences: list[Sequence], batch: int) -> device.Rows:
        rows = self.runner.empty_rows(batch)
        views = [sequence.view() for sequence in sequences]
        for row, (sequence, view) in enumerate(zip(sequences, views)):
            rows.block_table[row, : len(sequence.pages)] = sequence.pages
            for name in ("page", "span", "block"):
                getattr(rows.mask, name)[row] = getattr(view, name)
            rows.mask.count[row], rows.slot[row] = view.count, sequence.slot
            params, sampling = sequence.request.params, rows.sampling
            sampling.temperature[row] = params.temperature
            sampling.top_p[row] = params.top_p
            sampling.top_k[row] = params.top_k
            sampling.presence_penalty[row] = params.presence_penalty
            sampling.key[row] = sequence.key
            sampling.generated[row] = len(sequence.tokens)
        validate(rows.mask, self.runner.plan.num_pages, self.config.page_size)
        return rows


@dataclasses.dataclass
class _Unread:
    """What the last call of a device program chose.

    Attributes:
      choices: [K, B], on the device.
      rows: (row, sequence) of those that have not taken all of theirs.
      taken: tokens that the first of them has taken.
    """

    choices: device.Choice
    rows: list[tuple[int, Sequence]]
    taken: int = 0


def shapes(config: EngineConfig, max_len: int, stop_ids: int) -> device.Shapes:
    """Every shape that the device programs of an engine have."""
    batches = [1]
    while batches[-1] < config.max_num_seqs:
        batches.append(min(2 * batches[-1], config.max_num_seqs))
    blocks = -(-max_len // config.page_size)
    small = max(config.prefill_chunk // 8, 1)
    return device.Shapes(
        batches=tuple(batches),
        chunks=tuple(sorted({small, config.prefill_chunk})),
        burst=config.burst,
        entries=2 * blocks + SPARE_ENTRIES,  # one a page, and one more for each visible span
        blocks=blocks,
        stop_ids=stop_ids + MAX_STOP_IDS,
    )


def attention_problems(
    config: ModelConfig, shapes: device.Shapes, plan: pools.CachePlan, dtype: str
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
            problems.append(Problem(batch, queries, mixer.num_heads, width, dtype, form, windowed))
    return list(dict.fromkeys(problems))


def token_costs(table: TokenTable) -> np.ndarray:
    """int32 [len(table)]: what each token takes of the room of a sequence that writes it."""
    sizes = np.array([len(table.bytes_of(i)) for i in range(len(table))], np.int32)
    return np.where(table.contains(b">"), np.int32(device.PAUSE), sizes)


def _fit(values: np.ndarray, vocabulary: int) -> np.ndarray:
    """[V] from values of the tokenizer's ids: an embedding may be padded beyond them."""
    out = np.zeros(vocabulary, values.dtype)
    out[: len(values)] = values[:vocabulary]
    return out


def _wants_top(sequence: Sequence) -> bool:
    return bool(sequence.request.params.logprobs)


def _host_choice(choice: device.Choice, at: tuple[int, int], sequence: Sequence) -> TokenLogprob:
    wanted = sequence.request.params.logprobs or 0
    top = zip(choice.top_ids[at][:wanted].tolist(), choice.top_logprobs[at][:wanted].tolist())
    return TokenLogprob(int(choice.token[at]), float(choice.logprob[at]), tuple(top))
