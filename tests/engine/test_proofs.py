"""Proofs that the mask acts, exactly, and costs what the trace says."""

import threading

import jax
import numpy as np
import pytest
from support.dense import dense_logits
from support.references import CASES, tensors, tolerance

from da_jax.checkpoints import hf
from da_jax.engine.request import Done
from da_jax.evals.poison import poisoned
from da_jax.protocol.modes import Arm, Mode
from da_jax.protocol.visibility import visible_spans

CHUNKS = [f"part {letter}: " + letter * (9 + 5 * i) for i, letter in enumerate("abcdef")]
QUESTION = "which part?"
SCRIPT = (
    'read <focus magic_chunks="2">bb</focus> then <local>own words only</local> and '
    '<focus magic_chunks="1, 4-5">three</focus><local>so it is</local> done'
)


def visible_per_query(response, prompt):
    """bool [n, n] over prompt and response: what each fed token saw, from the recorded modes."""
    n = len(prompt) + response.completion_tokens - 1
    mask = np.tril(np.ones((n, n), bool))
    for step, (mode, focus) in enumerate(modes(response.text), start=len(prompt)):
        seen = np.zeros(n, bool)
        for start, end in visible_spans(prompt, mode, focus):
            seen[start:end] = True
        seen[len(prompt) :] = True
        mask[step] &= seen
    return mask


def modes(text):
    """(mode, focus) of each fed character: an independent reading of the script's four tags."""
    tags = {
        '<focus magic_chunks="2">': (Mode.FOCUS, (2,)),
        '<focus magic_chunks="1, 4-5">': (Mode.FOCUS, (1, 4, 5)),
        "<local>": (Mode.LOCAL, ()),
        "</focus>": (Mode.GLOBAL, ()),
        "</local>": (Mode.GLOBAL, ()),
    }
    # The tokenizer is byte by byte, but for `">`, which is one token.
    tokens = text.replace('">', "\N{BULLET}")
    state, out = (Mode.GLOBAL, ()), []
    for at in range(len(tokens)):
        so_far = tokens[: at + 1].replace("\N{BULLET}", '">')
        state = next((mode for tag, mode in tags.items() if so_far.endswith(tag)), state)
        out.append(state)
    return out[:-1]  # the last token is never fed


def write(llm):
    """The response to the script, with the log-probability of every token."""
    request = llm.request(CHUNKS, QUESTION, forced=SCRIPT, max_tokens=200, logprobs=0)
    events = list(llm.engine.run([request]))
    return request.prompt, events[-1].response


@pytest.fixture(scope="module")
def scripted(random_llm):
    return write(random_llm)


def test_the_script_was_written_and_honoured(scripted):
    _, response = scripted
    assert response.text.startswith(SCRIPT)
    assert response.summary["focus"] == {"attempts": 2, "successes": 2, "declines": 0}
    assert response.summary["transitions"] == 8


@pytest.mark.parametrize("name", ["qwen3", "gemma4_e2b", "qwen3_5"])
def test_decode_equals_one_dense_forward_with_the_mask(name, request, family_llm):
    if name == "qwen3":
        folder = request.getfixturevalue("tiny_folder")
        prompt, response = request.getfixturevalue("scripted")
    else:
        llm, folder = family_llm(name)
        prompt, response = write(llm)
    model = hf.load(folder, dtype=np.float32)
    scripted_tokens = len(modes(SCRIPT)) + 1
    ids = np.concatenate([prompt.ids, response.token_ids])[: len(prompt) + scripted_tokens - 1]
    mask = visible_per_query(response, prompt)[: len(ids), : len(ids)]
    logits = dense_logits(model, ids[None], mask)[0, len(prompt) - 1 :]
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = logprobs[np.arange(scripted_tokens), response.token_ids[:scripted_tokens]]
    ours = [entry.logprob for entry in response.logprobs[:scripted_tokens]]
    np.testing.assert_allclose(ours, expected, atol=tolerance(name))


def test_attended_tokens_are_those_of_the_mask(scripted):
    prompt, response = scripted
    scripted_steps = len(modes(SCRIPT))
    mask = visible_per_query(response, prompt)[len(prompt) :][:scripted_steps]
    steps = response.steps[:scripted_steps]
    assert [step.attended for step in steps] == mask.sum(1).tolist()
    assert [step.mode for step in steps] == [mode for mode, _ in modes(SCRIPT)]
    assert [step.vanilla for step in steps] == [
        len(prompt) + t for t in range(1, scripted_steps + 1)
    ]


def test_pages_that_the_operation_visits_are_those_of_the_trace(random_llm, monkeypatch):
    runner, visited = random_llm.engine.runner, []
    decode = runner.decode

    def spy(rows, what):
        choice = decode(rows, what)
        visited.extend(choice.entries[choice.token[:, 0] >= 0, 0].tolist())
        return choice

    monkeypatch.setattr(runner, "decode", spy)
    response = random_llm.generate(CHUNKS, QUESTION, forced=SCRIPT, max_tokens=150)
    page = random_llm.engine.config.page_size
    assert [step.read for step in response.steps] == [page * n for n in visited]
    narrow = {step.read for step in response.steps if step.mode is Mode.LOCAL}
    wide = {step.read for step in response.steps if step.mode is Mode.GLOBAL}
    assert max(narrow) < min(wide)


def test_hidden_pages_full_of_nan_change_nothing(random_llm, scripted):
    """Before every burst each slot that the mask hides becomes NaN; after it, it is restored."""
    _, clean = scripted
    with poisoned(random_llm.engine) as hidden:
        dirty = random_llm.generate(CHUNKS, QUESTION, forced=SCRIPT, max_tokens=200, logprobs=0)
    assert max(hidden) > min(hidden)
    assert dirty.token_ids == clean.token_ids
    assert [e.logprob for e in dirty.logprobs] == [e.logprob for e in clean.logprobs]


def test_likelihoods_of_the_three_arms_differ_exactly_where_tokens_are_hidden(random_llm):
    def score(arm):
        return random_llm.score(CHUNKS, QUESTION, SCRIPT, arm=arm)

    plain, unmasked, masked = score("vanilla"), score("unmasked"), score("da")
    states = [(Mode.GLOBAL, ()), *modes(SCRIPT)]  # what was seen while each token was chosen
    first = next(i for i, (mode, _) in enumerate(states) if mode is not Mode.GLOBAL)
    np.testing.assert_array_equal(masked[:first], unmasked[:first])
    narrow = [i for i, (mode, _) in enumerate(states) if mode is not Mode.GLOBAL]
    assert (np.abs(masked - unmasked)[narrow] > 1e-4).mean() > 0.95
    assert (np.abs(plain - unmasked) > 1e-4).mean() > 0.95


def test_a_tag_that_grows_too_long_widens_from_the_very_next_step(random_llm):
    """It changes the mode at a token that holds no `>`, in the middle of a burst."""
    text = "<local>abc<focus " + "x" * 200
    response = random_llm.generate(CHUNKS[:2], QUESTION, forced=text, max_tokens=220)
    hidden = [step.vanilla - step.attended for step in response.steps]
    assert response.summary["declines"] == {"too_long": 1}
    written = [mode for piece, mode in response.segments for _ in piece]
    cut = next(at for at, mode in enumerate(written) if at > 7 and mode is Mode.GLOBAL)
    assert 130 < cut < 200 and set(hidden[6 : cut - 1]) == {max(hidden)} and not any(hidden[cut:])
    options = dict(forced=text[:cut], max_tokens=cut + 1, logprobs=0)
    (*_, before), after = (
        random_llm.generate(
            CHUNKS[:2], QUESTION, forced=text[:cut], max_tokens=cut, logprobs=0
        ).logprobs,
        random_llm.generate(CHUNKS[:2], QUESTION, **options).logprobs,
    )
    assert before.logprob == pytest.approx(after[cut - 1].logprob, abs=1e-6)


def test_a_focus_on_every_chunk_hides_nothing(random_llm):
    text = '<focus magic_chunks="1-6">everything</focus>'
    np.testing.assert_allclose(
        random_llm.score(CHUNKS, QUESTION, text, arm="da"),
        random_llm.score(CHUNKS, QUESTION, text, arm="unmasked"),
        atol=1e-5,
    )


def test_the_unmasked_arm_reports_modes_but_attends_to_everything(random_llm):
    response = random_llm.generate(
        CHUNKS, QUESTION, arm=Arm.UNMASKED, forced=SCRIPT, max_tokens=150
    )
    assert response.summary["tokens"]["local"] > 0
    assert response.summary["reduction"] == 0
    assert all(step.attended == step.vanilla for step in response.steps)


def test_the_paper_scaffold_hides_more_and_is_still_exact(random_llm):
    options = dict(forced="<local>" + "x" * 30, max_tokens=37, arm="da")
    wide = random_llm.generate(CHUNKS, QUESTION, system="s" * 60, **options)
    paper = random_llm.generate(CHUNKS, QUESTION, system="s" * 60, scaffold="paper", **options)
    saved = [a.attended - b.attended for a, b in zip(wide.steps, paper.steps)]
    assert set(saved[:6]) == {0} and len(set(saved[6:])) == 1 and saved[-1] > 60


def test_nothing_compiles_after_warm_up(random_llm, compiled_by_this_thread):
    def answer_batches():
        for count in (1, 2, 3, 4, 7):
            forced = [SCRIPT[: 20 * i] for i in range(count)]
            requests = [
                random_llm.request(
                    CHUNKS[: 1 + i % 6], QUESTION * (i + 1), forced=text, max_tokens=10 + 30 * i,
                    temperature=i % 2, top_k=i, logprobs=[None, 3][i % 2], arm=list(Arm)[i % 3],
                    stop=("zz",) * (i % 2), seed=i,
                )
                for i, text in enumerate(forced)
            ]  # fmt: skip
            done = [e for e in random_llm.engine.run(requests) if isinstance(e, Done)]
            assert len(done) == count

    random_llm.generate(CHUNKS, QUESTION, max_tokens=20)  # other tests handled its caches
    before = len(compiled_by_this_thread)
    answer_batches()
    assert len(compiled_by_this_thread) == before


@pytest.fixture(scope="module")
def compiled_by_this_thread():
    """The programs compiled here; Orbax may leave threads behind that compile too."""
    found, here = [], threading.get_ident()

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == here:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(3))
    assert found  # it hears
    return found


def test_the_random_model_is_what_the_proofs_think_it_is(tiny_folder):
    model = hf.load(tiny_folder, dtype=np.float32)
    weights = tensors(CASES["qwen3"])
    np.testing.assert_array_equal(model.embedding[...], weights["model.embed_tokens.weight"])
