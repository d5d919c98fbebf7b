"""What the caller declares: the mode at the start, and chunks that are visible throughout."""

import dataclasses
import re

import numpy as np
import pytest
from support.dense import dense_logits
from support.references import tolerance

from da_jax import Chunk, Declaration, ModeChange, RequestError, SamplingParams, TextDelta
from da_jax.checkpoints import hf
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.request import Request
from da_jax.engine.sequence import Sequence
from da_jax.evals.poison import poisoned
from da_jax.protocol.modes import Arm, Mode
from da_jax.protocol.prompt import PromptMap

pytestmark = pytest.mark.long

CHUNKS = [f"part {letter}: " + letter * (9 + 5 * i) for i, letter in enumerate("abcdef")]
QUESTION = "which part?"
EVERY = (1, 2, 3, 4, 5, 6)
LENGTH = 384  # of every dense pass, so that one is compiled


@pytest.fixture(scope="module")
def model(tiny_folder):
    return hf.load(tiny_folder, dtype=np.float32)


def dense_logprobs(model, prompt, response, shown):
    """Of each response token; `shown` names the chunks that the token before it saw."""
    ids = np.zeros(LENGTH, np.int32)
    fed = len(prompt) + len(response) - 1
    ids[:fed] = [*prompt.ids, *response[:-1]]
    owner = np.zeros(len(prompt), int)
    for number, (start, end) in zip(prompt.numbers, prompt.chunks):
        owner[start:end] = number
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))
    for row, chunks in enumerate(shown, len(prompt) - 1):
        mask[row, : len(prompt)] &= np.isin(owner, [0, *chunks])
    logits = dense_logits(model, ids[None], mask)[0, len(prompt) - 1 : fed]
    logits = logits - logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(response)), response]


# What is declared, what is written, and what is seen from the last token of each piece on.
CASES = [
    ({"visible": (2, 5)}, (2, 5), [("free words", (2, 5)), ("<local>not", (2, 5))]),
    ({"visible": [5, 2, 5]}, (2, 5), [('<focus magic_chunks="1">x</focus>y', (2, 5))]),
    ({"visible": ()}, (), [("free words", ()), ('<focus magic_chunks="3">x', ())]),
    ({"visible": EVERY}, EVERY, [("<local>words", EVERY)]),
    ({"initial": "local"}, (), [("words", ()), ("</local>", EVERY), ("wide", EVERY)]),
    ({"initial": "focus:4,1"}, (1, 4), [("a", (1, 4)), ('<focus magic_chunks="2">', (2,))]),
    (
        {"initial": Declaration(Mode.FOCUS, (6,))},
        (6,),
        [("</answer>", EVERY), ("b<local>", ()), ("c</local>", EVERY), ("d", EVERY)],
    ),
    ({"initial": "global"}, EVERY, [("a<local>", ()), ("b", ())]),
]


@pytest.mark.parametrize(("declared", "first", "pieces"), CASES)
def test_every_token_sees_what_the_caller_declared(random_llm, model, declared, first, pieces):
    response, shown = [], [first]
    for text, after in pieces:
        tokens = random_llm.tokenizer.encode(text)
        response += tokens
        shown += [shown[-1]] * (len(tokens) - 1) + [after]
    prompt = random_llm.request(CHUNKS, QUESTION).prompt
    expected = dense_logprobs(model, prompt, response, shown[:-1])
    ours = random_llm.score(CHUNKS, QUESTION, response, **declared)
    np.testing.assert_allclose(ours, expected, atol=tolerance("qwen3"))
    wide = random_llm.score(CHUNKS, QUESTION, response, arm="unmasked")
    assert (abs(ours[0] - wide[0]) > 1e-4) == (first != EVERY)  # the first token too


def test_ids_of_the_callers_choice_name_what_is_seen(random_llm, model):
    """Chunks of two turns, in no order of their ids, with a turn between them."""
    ids = (70, 3, 999_999_999)
    own = [Chunk(text, id=id_) for text, id_ in zip(CHUNKS[:3], ids)]
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    where = dict(history=history, chunks=own[1:])
    prompt = random_llm.request(own[:1], QUESTION, **where).prompt
    assert prompt.numbers == ids and len(prompt.scaffold) == 3
    tag = '<focus magic_chunks="3, 999999999">'
    response = random_llm.tokenizer.encode(f"a{tag}b</focus>c")
    opened, closed = (len(random_llm.tokenizer.encode(text)) for text in (f"a{tag}", "b</focus>"))
    shown = [(70,)] * opened + [ids[1:]] * closed + [ids]
    expected = dense_logprobs(model, prompt, response, shown)
    ours = random_llm.score(own[:1], QUESTION, response, initial="focus:70", **where)
    np.testing.assert_allclose(ours, expected, atol=tolerance("qwen3"))


@pytest.mark.parametrize("declared", [{"visible": (3, 5)}, {"visible": ()}, {"initial": "local"}])
def test_hidden_pages_full_of_nan_change_nothing(random_llm, declared):
    options = dict(max_tokens=40, logprobs=0, ignore_eos=True, **declared)
    clean = random_llm.generate(CHUNKS, QUESTION, **options)
    with poisoned(random_llm.engine) as hidden:
        dirty = random_llm.generate(CHUNKS, QUESTION, **options)
    assert max(hidden) > min(hidden)  # the prompt saw all of itself, but for its last token
    assert dirty.token_ids == clean.token_ids
    assert [e.logprob for e in dirty.logprobs] == [e.logprob for e in clean.logprobs]


@pytest.mark.parametrize("more", range(16))
def test_pages_that_saw_the_whole_prompt_do_not_give_the_first_token(random_llm, model, more):
    """The same prompt was answered before; its length runs over all places of a page."""
    question = QUESTION + "!" * more
    text = random_llm.tokenizer.encode("ab")
    random_llm.score(CHUNKS, question, text)
    prompt = random_llm.request(CHUNKS, question).prompt
    narrow = dense_logprobs(model, prompt, text, [()] * 2)
    np.testing.assert_allclose(
        random_llm.score(CHUNKS, question, text, visible=()), narrow, atol=tolerance("qwen3")
    )
    wide = dense_logprobs(model, prompt, text, [EVERY] * 2)
    np.testing.assert_allclose(
        random_llm.score(CHUNKS, question, text), wide, atol=tolerance("qwen3")
    )


def test_steps_are_accounted_by_what_is_seen_and_declarations_by_what_is_written(random_llm):
    text = '<focus magic_chunks="1">x</focus><local>y</local><focus magic_chunks="9">'
    forced = random_llm.tokenizer.encode(text)
    options = dict(forced=forced, max_tokens=len(forced))
    request = random_llm.request(CHUNKS, QUESTION, visible=(2,), **options)
    (*events, done) = random_llm.engine.run([request])
    hidden = sum(b - a for n, (a, b) in enumerate(request.prompt.chunks, 1) if n != 2)
    steps = done.response.steps
    assert [step.vanilla - step.attended for step in steps] == [hidden] * (len(forced) - 1)
    usual = random_llm.generate(CHUNKS, QUESTION, **options)
    assert [step.mode for step in steps] == [step.mode for step in usual.steps]
    assert done.response.segments == usual.segments
    for key in ("focus", "transitions", "declines", "tokens"):
        assert done.response.summary[key] == usual.summary[key]
    changes = [event.mode for event in events if isinstance(event, ModeChange)]
    assert changes == [Mode.FOCUS, Mode.GLOBAL, Mode.LOCAL, Mode.GLOBAL]


def test_an_initial_mode_is_in_segments_events_and_account(random_llm):
    forced = random_llm.tokenizer.encode("ab</local>cd")
    events = list(
        random_llm.stream(CHUNKS, QUESTION, initial="local", forced=forced, max_tokens=len(forced))
    )
    response = events[-1].response
    assert response.segments == (("ab</local>", Mode.LOCAL), ("cd", Mode.GLOBAL))
    assert response.answer == "ab"
    by_mode = {mode: "" for mode in Mode}
    for event in events:
        if isinstance(event, TextDelta):
            by_mode[event.mode] += event.text
    assert (by_mode[Mode.LOCAL], by_mode[Mode.GLOBAL]) == ("ab</local>", "cd")
    assert [(e.mode, e.focus) for e in events if isinstance(e, ModeChange)] == [(Mode.GLOBAL, ())]
    # The first token comes from the prefill; "</local>" is the last that is chosen in LOCAL.
    assert response.summary["tokens"] == {"total": 12, "global": 2, "focus": 0, "local": 10}
    assert response.summary["transitions"] == 1 and response.summary["mismatched_closers"] == 0


def test_fixed_chunks_run_full_bursts(random_llm, bursts):
    """Nothing that is written changes what is seen."""
    burst = random_llm.engine.config.burst
    options = dict(forced="<local>" * 4, max_tokens=4 * burst + 1, ignore_eos=True)
    random_llm.generate(CHUNKS, QUESTION, visible=(1,), **options)
    assert bursts == [burst] * 4


@pytest.mark.parametrize("tokens", [20, 220])
def test_a_batch_of_declared_requests_gives_what_each_gives_alone(random_llm, monkeypatch, tokens):
    """The longer ones have no room at once: some give way, and are computed anew."""
    gave_way, preempt = [], random_llm.engine.scheduler.preempt
    monkeypatch.setattr(
        random_llm.engine.scheduler, "preempt", lambda s: (gave_way.append(s), preempt(s))
    )
    declared = [{"visible": (1,)}, {"initial": "local"}, {"visible": ()}, {"initial": "focus:2"}]
    options = dict(max_tokens=tokens, ignore_eos=True)
    requests = [random_llm.request(CHUNKS, QUESTION, **options, **d) for d in declared]
    alone = [random_llm._responses([request])[0] for request in requests]
    assert not gave_way
    together = random_llm._responses(requests)
    assert bool(gave_way) == (tokens == 220)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.summary for r in together] == [r.summary for r in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visible": (3, 9)}, "visible names 9, but the prompt has chunks 1 to 6"),
        ({"visible": (0,)}, "a chunk of visible is 0; give a whole number"),
        ({"visible": ("3",)}, "a chunk of visible is '3'"),
        ({"visible": 3}, r"visible is 3; give the numbers of chunks in a sequence, such as \(3, 7"),
        ({"visible": "3,5"}, "visible is '3,5'; give the numbers of chunks in a sequence"),
        ({"initial": "focus:7"}, "initial names 7, but the prompt has chunks 1 to 6"),
        ({"initial": "narrow"}, "the initial mode is 'narrow'; use 'global', 'local' or"),
        ({"initial": "local", "visible": (1,)}, r"visible is \(1,\) and initial is .*; give one"),
        ({"visible": (1,), "arm": "unmasked"}, r"visible is \(1,\) in the arm 'unmasked', which"),
        ({"initial": "local", "arm": "vanilla"}, "in the arm 'vanilla', which sees everything"),
    ],
)
def test_what_cannot_be_declared_is_refused(random_llm, options, message):
    with pytest.raises(ValueError, match=message):
        random_llm.request(CHUNKS, QUESTION, **options)


# --- without a model -----------------------------------------------------------------------------

TABLE = TokenTable([b"a", b">"])


def sequence_of(prompt, entries=500, **declared):
    request = Request(prompt, SamplingParams(max_tokens=9), **declared)
    return Sequence(
        0, request, TABLE, frozenset(), key=np.zeros(2, np.uint32), max_len=len(prompt) + 9,
        page_size=4, entries=entries,
    )  # fmt: skip


def prompt_of(pattern):
    """A prompt of a token each: `.` is scaffold, a digit a chunk of that number."""
    places = [(at, at + 1) for at in range(len(pattern))]
    return PromptMap(
        np.arange(len(pattern), dtype=np.int32),
        tuple(place for place, what in zip(places, pattern) if what != "."),
        tuple(place for place, what in zip(places, pattern) if what == "."),
        "", (), (), (), Arm.DA, tuple(int(what) for what in pattern if what != "."),
    )  # fmt: skip


@pytest.mark.parametrize("declared", [{}, {"visible": ()}, {"initial": Declaration(Mode.LOCAL)}])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 10])
@pytest.mark.parametrize("limit", [1, 4, 9, 16])
def test_the_last_token_of_the_prompt_has_a_step_of_its_own(declared, length, limit):
    pattern = "1" * (length > 1) + "." * max(length - 1, 1)
    sequence = sequence_of(prompt_of(pattern), **declared)
    steps = []
    while sequence.cached < length:
        chunk = sequence.next_chunk(limit)
        steps.append((len(chunk.tokens), chunk.view.prompt_tokens))
        sequence.cached = chunk.end
    sizes = [size for size, _ in steps]
    assert sum(sizes) == length and 0 < min(sizes) and max(sizes) <= limit
    if declared and length > 1:
        *wide, (last, seen) = steps
        assert (last, seen) == (1, pattern.count("."))
        assert all(seen == length for _, seen in wide)
        assert sequence.shareable == length - 1
    else:
        assert {seen for _, seen in steps} == {length}
    if not declared:
        assert len(steps) == -(-length // limit) and sequence.shareable == length


def test_what_the_mask_cannot_list_apart_is_all_visible():
    prompt = prompt_of(".1.2.3.4.5.6.7.8.9.")
    pages = 7  # of 19 + 9 tokens
    for entries, seen in ((pages + 10, 10), (pages + 9, 19)):
        sequence = sequence_of(prompt, entries)
        sequence._read("<local>", hidden=False)
        assert sequence.view().prompt_tokens == seen
        assert sequence.view().count <= entries
        sequence._read('</local><focus magic_chunks="5">', hidden=False)
        assert sequence.view().prompt_tokens == 11  # nine places, which either holds


def test_visible_chunks_that_the_mask_cannot_list_apart_are_refused(random_llm, monkeypatch):
    engine = random_llm.engine
    request = random_llm.request(["x"] * 12, QUESTION, visible=(1, 3, 5, 7), max_tokens=5)
    pages = -(-(len(request.prompt) + 5) // engine.config.page_size)
    for entries, fits in ((pages + 5, True), (pages + 4, False)):
        shapes = dataclasses.replace(engine.shapes, entries=entries)
        monkeypatch.setattr(engine, "shapes", shapes)
        if fits:
            engine.check(request)
            continue
        with pytest.raises(
            RequestError, match="lies in 5 places of the prompt, but a mask holds 4"
        ):
            engine.check(request)


@pytest.mark.parametrize("declared", [{}, {"visible": (870,)}, {"initial": "focus:870"}])
def test_guided_tags_name_ids_of_the_callers_choice(random_llm, declared):
    chunks = [Chunk(text, id=id_) for text, id_ in zip(CHUNKS, (870, 12, 13))]
    named = set()
    for seed in range(6):
        response = random_llm.generate(
            chunks, QUESTION, forced='<focus magic_chunks="', guided=True, temperature=1.5,
            seed=seed, max_tokens=200, **declared,
        )  # fmt: skip
        assert response.summary["declines"] == {}
        tag, end, _ = response.text.partition(">")
        assert end
        named |= {int(number) for number in re.findall("[0-9]+", tag)}
    assert named and named <= {870, 12, 13}
