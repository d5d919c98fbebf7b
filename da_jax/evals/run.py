"""Asks a model the examples of tasks in several arms, and keeps what comes back in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, NamedTuple

from da_jax.engine.request import Done, Event, ModeChange, Request, Response, SamplingParams
from da_jax.evals import planning
from da_jax.evals.folder import RunFolder
from da_jax.evals.planning import Case, Plan, Prompts, Selection
from da_jax.evals.records import Record, runs
from da_jax.evals.task import Example, Score, Task
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

if TYPE_CHECKING:
    from da_jax.engine.llm import LLM
    from da_jax.engine.loop import Loop

SCORERS = 8
"""Answers that are scored at a time; a judge takes seconds over each."""
_WAITING = 64  # answers that may wait for their score before no more requests are taken

Watch = Callable[[RunFolder, int], None]
"""Called with the folder and the number of responses that are complete."""


class _Job(NamedTuple):
    """A request that is answered once, and kept for every arm that it stands for."""

    case: Case
    prompt: PromptMap
    asked: Arm
    arms: tuple[Arm, ...]
    focused: set[int]


class _Scorers:
    """Threads that score answers. Unlike those of an executor they do not outlive the program."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Score], Task, Example, str] | None]
        self._jobs = queue.SimpleQueue()
        for number in range(SCORERS):
            threading.Thread(target=self._work, name=f"score-{number}", daemon=True).start()

    def submit(self, task: Task, example: Example, answer: str) -> Future[Score]:
        """Has an answer scored."""
        future: Future[Score] = Future()
        self._jobs.put((future, task, example, answer))
        return future

    def close(self) -> None:
        """Begins no more; waits for nothing that is being scored."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in range(SCORERS):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, task, example, answer = job
            try:
                future.set_result(task.score(example, answer))
            except Exception as error:  # noqa: BLE001  it is raised where the result is taken
                future.set_exception(error)


def evaluate(
    llm: LLM | None,
    selection: Selection,
    plan: Plan,
    prompts: Prompts,
    folder: RunFolder,
    *,
    sampling: SamplingParams | None = None,
    sampling_seed: int = 0,
    watch: Watch = lambda folder, done: None,
) -> int:
    """Makes the responses that a folder does not have yet.

    Every response is on disk as soon as it is scored. One whose scoring fails is kept unscored, and
    scored when the run is resumed. An interruption ends it at once, and loses what is being
    generated, no more.

    Args:
      llm: the model, whose `max_model_len` every prompt and response fits. None where no response
        is missing, but scores are, see `unanswered`.
      plan: made from the same selection and prompts.
      sampling: how tokens are chosen; `max_tokens` and `seed` are set for each response.
      sampling_seed: with a temperature, the seed of all; the arms of an example share theirs.

    Returns:
      How many responses of the plan are unscored.

    Raises:
      ValueError: a prompt is not the one of a record that is there, or of an unscored response; or
        there is no model and responses are missing.
      RequestError: a request that cannot run.
    """
    planning.check_prompts(plan, folder.prompts)
    planning.check_prompts(plan, {k: r.prompt_sha256 for k, r in folder.unscored.items()})
    if llm is None and (missing := unanswered(plan, folder)):
        raise ValueError(f"{missing} responses are missing; give a model")
    runner = _Runner(llm, selection, prompts, folder, sampling or SamplingParams(), sampling_seed)
    done = sum(key in folder.prompts for key in plan.prompts)
    watch(folder, done)
    with contextlib.closing(_Scorers()) as pool, contextlib.closing(runner.run(pool)) as steps:
        for kept in steps:
            done += kept
            watch(folder, done)
    return sum(key in folder.unscored for key in plan.prompts)


def unanswered(plan: Plan, folder: RunFolder) -> int:
    """How many responses of a plan a folder does not have, neither scored nor unscored."""
    return sum(key not in folder.prompts and key not in folder.unscored for key in plan.prompts)


class _Runner:
    """The loop of `evaluate`."""

    def __init__(
        self,
        llm: LLM | None,
        selection: Selection,
        prompts: Prompts,
        folder: RunFolder,
        sampling: SamplingParams,
        sampling_seed: int,
    ):
        self._loop = None if llm is None else llm.loop
        self._selection, self._prompts = selection, prompts
        self._folder, self._sampling, self._sampling_seed = folder, sampling, sampling_seed
        self._pending: dict[int, _Job] = {}
        self._scoring: dict[Future[Score], tuple[Record, ...]] = {}

    def run(self, pool: _Scorers) -> Generator[int, None, None]:
        """Asks and keeps everything; yields how many records there are more, now and then."""
        jobs, more = self._jobs(pool), True
        try:
            while more or self._pending or self._scoring:
                while more and self._room():
                    job = next(jobs, None)
                    if more := job is not None:
                        self._pending[self._engine.add(self._request(job))] = job
                if self._pending:
                    if self._engine.idle:
                        raise RuntimeError(f"requests {sorted(self._pending)} were lost by a fault")
                    for event in self._engine.step():
                        self._take(event, pool)
                elif self._scoring:
                    wait(self._scoring, return_when=FIRST_COMPLETED)
                if (kept := self._keep()) is not None:
                    yield kept
        finally:
            for number in self._pending:
                self._engine.cancel(number)
            for records in self._scoring.values():
                for record in records:
                    self._folder.keep_unscored(record, "interrupted")

    @property
    def _engine(self) -> Loop:
        assert self._loop is not None  # `evaluate` saw that there is something to ask
        return self._loop

    def _room(self) -> bool:
        """Whether one more example is taken up, to be answered or to be scored."""
        return len(self._scoring) < _WAITING and (self._loop is None or self._loop.room > 0)

    def _jobs(self, pool: _Scorers) -> Iterator[_Job]:
        """What is left to ask; answers that only lack a score are scored meanwhile."""
        for case in planning.cases(self._selection, self._prompts.count):
            wanted: dict[Arm, list[Arm]] = {}
            for arm in self._selection.arms:
                record = self._folder.unscored.get(case.key(arm))
                if record is not None:
                    self._score(pool, case.task, case.example, (record,))
                elif case.key(arm) not in self._folder.prompts:
                    wanted.setdefault(self._prompts.asked(arm), []).append(arm)
            for asked, arms in wanted.items():
                prompt = self._prompts.render(case.example, asked)
                yield _Job(case, prompt, asked, tuple(arms), set())

    def _request(self, job: _Job) -> Request:
        seed = None
        if self._sampling.temperature:
            where = [self._sampling_seed, *job.case.key(Arm.DA)[:3]]
            drawn = hashlib.sha256(json.dumps(where).encode()).digest()
            seed = int.from_bytes(drawn[:4], "little") >> 1
        tokens = self._selection.tokens(job.case.task)
        params = dataclasses.replace(self._sampling, max_tokens=tokens, seed=seed)
        return Request(job.prompt, params, arm=job.asked)

    def _take(self, event: Event, pool: _Scorers) -> None:
        job = self._pending.get(event.request_id)
        if job is None:
            return
        if isinstance(event, ModeChange):
            job.focused.update(event.focus)
        elif isinstance(event, Done):
            del self._pending[event.request_id]
            records = tuple(self._record(job, arm, event.response) for arm in job.arms)
            self._score(pool, job.case.task, job.case.example, records)

    def _record(self, job: _Job, arm: Arm, response: Response) -> Record:
        """The record of a response, with a void score."""
        task, length, example = job.case
        return Record(
            task=task.name,
            group=task.group.value,
            length=length,
            seed=self._selection.seed,
            index=example.index,
            arm=arm.value,
            prompt_sha256=planning.digest(job.prompt),
            chunks=len(job.prompt.chunks),
            prompt_tokens=response.prompt_tokens,
            completion_tokens=response.completion_tokens,
            finish_reason=response.finish_reason,
            text=response.text,
            answer=response.answer,
            token_ids=response.token_ids,
            expected=example.expected,
            score=0.0,
            score_details={},
            summary=response.summary,
            trace=runs(response.steps),
            evidence_chunks=planning.evidence_chunks(example, job.prompt),
            focused_chunks=tuple(sorted(job.focused)),
        )

    def _score(
        self, pool: _Scorers, task: Task, example: Example, records: tuple[Record, ...]
    ) -> None:
        """Begins to score one answer, which all of the records share."""
        self._scoring[pool.submit(task, example, records[0].answer)] = records

    def _keep(self) -> int | None:
        """Puts what is scored into the folder.

        Returns:
          How many records that were; None where nothing was ready, neither scored nor failed.
        """
        ready = [future for future in self._scoring if future.done()]
        kept = 0 if ready else None
        for future in ready:
            records = self._scoring[future]  # kept unscored if anything below raises
            try:
                score = future.result()
                if not 0 <= score.value <= 1:
                    raise ValueError(f"the score is {score.value}; it must be from 0 to 1")
            except (OSError, RuntimeError, ValueError) as error:  # a judge that is out of reach
                for record in records:
                    self._folder.keep_unscored(record, f"{type(error).__name__}: {error}")
            else:
                value, details = float(score.value), dict(score.details)
                for record in records:
                    self._folder.add(
                        dataclasses.replace(record, score=value, score_details=details)
                    )
                kept = (kept or 0) + len(records)
            del self._scoring[future]
        return kept
