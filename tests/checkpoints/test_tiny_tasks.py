"""The second step's language: answers follow from the text, and prompts are the renderer's."""

import re

import jax
import numpy as np
import pytest
import transformers

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny import scenes, tasks
from da_jax.checkpoints.tiny.batches import Shape, make_batch
from da_jax.checkpoints.tiny.export import export, make_tokenizer
from da_jax.checkpoints.tiny.model import Config, init
from da_jax.protocol.modes import ModeTracker
from da_jax.protocol.prompt import PromptRenderer

EVERY = (*scenes.TOPICS, "mixed")
MIX = dict.fromkeys((*tasks.KINDS, *lang.KINDS), 1.0)


def drawn(seed, topic, chunks=14, held_out=False):
    rng = np.random.default_rng(seed)
    scene = scenes.make_scene(rng, topic, chunks, held_out=held_out)
    asked = [tasks.ask(rng, scene, kind) for kind in MIX for _ in range(2)]
    return scene, [question for question in asked if question is not None]


def facts_of(text):
    """[(chunk, key, value)] in the order of the text; the value of a link ends in `=`."""
    return [
        (number, key, value or link)
        for number, line in enumerate(text.splitlines(), 1)
        for key, value, link in re.findall(r"(\w+)=(?:([a-z0-9]+)| (\w+=))", line)
    ]


def hops_from_text(text, question):
    """What a reader finds: [(chunk, key, value)], the last one with a value that is no key."""
    facts = facts_of(text)
    *words, key = question.removesuffix("=?").split()
    found = [fact for fact in facts if fact[1] == key]
    if "first" in words or "second" in words:
        assert len(found) == 2
        return [found["second" in words]]
    hops = found[:1]
    while hops and hops[-1][2].endswith("="):
        (following,) = (fact for fact in facts if fact[1] == hops[-1][2].removesuffix("="))
        hops.append(following)
    return hops


def spelt(value):
    letters = [f" {i}={letter}" for i, letter in enumerate(value, 1)]
    return f" spell={value}{''.join(letters)} back{''.join(letters[::-1])}"


def written(text, question):
    """The right response to a question of the second step, from the texts alone."""
    hops = hops_from_text(text, question)
    ordinal = next((f" {w}" for w in question.split() if w in ("first", "second")), "")
    shown = lambda value: f" {value}" if value.endswith("=") else value
    out = "".join(
        f' {key}={number}<focus magic_chunks="{number}"> {key}={shown(value)}</focus>'
        for number, key, value in hops
    )
    key = question.removesuffix("=?").split()[-1]
    value = hops[-1][2] if hops else "none"
    ending = (spelt(value) if question.startswith("read") else "") + f" answer={value}"
    declared = f"{ordinal}{out or f' {key}=none'}<local>{ending}</local>"
    keys = "".join(f" {key}=" for _, key, _ in hops) or f" {key}="
    return declared, f"{ordinal}{keys}{value}{ending}"


@pytest.mark.parametrize("topic", EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_both_responses_follow_from_the_text_of_document_and_question(topic, seed):
    scene, questions = drawn(seed, topic)
    for question in questions:
        if question.kind not in tasks.KINDS:
            continue
        for plain, expected in zip((False, True), written(scene.text, question.text)):
            tokens = tasks.respond(scene, question, plain=plain)
            assert "".join(token.piece for token in tokens) == expected + lang.END


def test_topics_bring_what_they_are_named_for():
    scenes = {topic: drawn(1, topic, 30)[0] for topic in EVERY}
    assert 1 <= len(facts_of(scenes["needle"].text)) <= 3
    assert len(facts_of(scenes["pairs"].text)) >= 4 * 30
    assert scenes["repeats"].repeated and scenes["chains"].links and scenes["people"].links
    assert scenes["mixed"].repeated and scenes["mixed"].links
    longest = max(len(scenes["chains"].path(key)) for key in scenes["chains"].links)
    assert longest == 3


@pytest.mark.parametrize("topic", EVERY)
def test_every_fact_of_the_text_is_known_once(topic):
    scene, _ = drawn(2, topic, 20)
    known = [*scene.facts.values(), *scene.links.values()]
    known += [fact for pair in scene.repeated.values() for fact in pair]
    found = [(number, key, value.removesuffix("=")) for number, key, value in facts_of(scene.text)]
    assert sorted(found) == sorted((fact.chunk, fact.key, fact.value) for fact in known)
    single = [fact.key for fact in (*scene.facts.values(), *scene.links.values())]
    assert len(set(single)) == len(single) and not set(single) & scene.repeated.keys()
    assert all(a.chunk < b.chunk and a.value != b.value for a, b in scene.repeated.values())


def test_training_and_held_out_documents_share_no_pair():
    pairs = {}
    for held_out in (True, False):
        texts = [drawn(s, t, 20, held_out)[0].text for s in range(25) for t in EVERY]
        pairs[held_out] = {fact[1:] for text in texts for fact in facts_of(text)}
    assert not pairs[True] & pairs[False]
    assert min(map(len, pairs.values())) > 1000


def test_the_second_step_keeps_the_first_ones_split():
    """What the first step held out is held out of the second too."""
    of_first = {
        (key, fact.value)
        for seed in range(60)
        for key, fact in lang.make_document(
            np.random.default_rng(seed), 20, held_out=True
        ).facts.items()
    }
    trained = {
        fact[1:]
        for seed in range(25)
        for topic in EVERY
        for fact in facts_of(drawn(seed, topic, 20)[0].text)
    }
    assert not of_first & trained


def test_modes_of_tokens_are_those_of_the_protocol():
    """Each token's mode is what the tracker of the engine has after reading it."""
    for seed, topic in enumerate(EVERY):
        scene, questions = drawn(seed, topic)
        for question in questions:
            tracker = ModeTracker(len(scene.chunks))
            for token in tasks.respond(scene, question)[:-1]:
                tracker.feed(token.piece)
                assert (tracker.mode.value, tracker.focus) == (
                    token.mode, tuple(sorted(token.focus))
                )  # fmt: skip
            assert tracker.stats.format_correct and not tracker.stats.declines


def test_new_words_leave_all_other_entries_alone():
    """The entries of the first step, by their place: control tokens, tags, bytes, words."""
    fixed = {lang.PAD: 0, lang.START: 1, lang.END: 2, lang.CHUNK: 3, lang.LOCAL_END: 11}
    assert {piece: lang.IDS[piece] for piece in fixed} == fixed
    assert len(lang.VOCABULARY) == 1152
    first = {i: entry for entry, i in lang.FIRST_VOCABULARY.items()}
    changed = {i: entry for entry, i in lang.VOCABULARY.items() if first[i] != entry}
    assert all(first[i].startswith("<|reserved_") for i in changed)
    assert len(changed) == len(lang.LATER)
    new = {lang.IDS[word] for word in lang.LATER}
    assert len(new) == len(lang.LATER) and min(new) == 1100
    tokenizer = make_tokenizer(lang.VOCABULARY)
    for word in lang.LATER:
        assert tokenizer.encode(word).ids == [lang.IDS[word]]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = Config(vocab_size=len(lang.VOCABULARY))
    export(init(jax.random.key(0), config), config, folder, tasks.STYLE, lang.VOCABULARY)
    return PromptRenderer(transformers.AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("plain", [0.0, 1.0])
@pytest.mark.parametrize("topic", EVERY)
def test_training_batches_hold_the_rendered_prompt(renderer, topic, plain):
    shape = Shape(
        (1, 12), 320, contexts=2, rows=8, row=76, mix=MIX, gap=0, ids=0.0, topics={topic: 1.0},
        plain=plain,
    )  # fmt: skip
    batch, placed = make_batch(np.random.default_rng(3), shape)
    assert placed
    for p in placed:
        context = batch.context[p.context][batch.chunk[p.context] >= 0]
        chunk = batch.chunk[p.context][: len(context)]
        asked = batch.rows[p.context, p.row, p.start : p.response]
        arm = "vanilla" if plain else "da"
        prompt = renderer.render(p.document.text, p.question.text, arm=arm)
        np.testing.assert_array_equal(prompt.ids, np.concatenate([context, asked]))
        places = [np.flatnonzero(chunk == n + 1) for n in range(len(p.document.chunks))]
        assert prompt.chunks == (() if plain else tuple((at[0], at[-1] + 1) for at in places))
        everything = batch.everything[p.context, p.row, p.start : p.end]
        assert not plain or everything.all()


def test_what_has_no_fact_is_not_asked():
    rng = np.random.default_rng(0)
    scene = scenes.make_scene(rng, "story", 3, held_out=False)
    assert tasks.ask(rng, scene, "first") is None
    assert tasks.ask(rng, scene, "read_second") is None


@pytest.mark.parametrize("masked", [True, False])
def test_a_misled_focus_names_a_chunk_without_the_key_and_finds_nothing_under_the_mask(masked):
    rng, changed = np.random.default_rng(0), 0
    for seed, topic in enumerate(EVERY):
        scene, questions = drawn(seed, topic)
        for question in questions:
            tokens = tasks.respond(scene, question, first_id=5)
            misled = tasks.misled(rng, scene, question, tokens, first_id=5, masked=masked)
            text = "".join(token.piece for token in misled)
            if misled == tokens:
                assert question.kind in ("two", "three", "absent", "missing")
                continue
            changed += 1
            *_, (number, key, value) = re.findall(r'chunks="(\d+)"> (\w+)=(\w+)', text)
            line = scene.text.splitlines()[int(number) - 5]
            assert f"{key}=" not in line
            focused = [token.focus for token in misled if token.mode == "focus"]
            assert focused[-1] == (int(number) - 4,)
            assert sum(token.role == tasks.GIVEN for token in misled) == 1
            if masked:
                assert value == "none" and text.endswith(("none", f"answer=none</local>{lang.END}"))
            else:
                right = "".join(token.piece for token in tokens)
                assert text == re.sub(r'="\d+"(?!.*=")', f'="{number}"', right)
    assert changed > 50


def test_a_wrong_number_is_not_learnt():
    shape = Shape(
        (3, 8), 200, contexts=2, rows=8, row=76, mix=MIX, topics={"story": 1.0}, misled=1.0
    )  # fmt: skip
    batch, placed = make_batch(np.random.default_rng(0), shape)
    given = 0
    for p in placed:
        learnt = batch.role[p.context, p.row, p.response - 1 : p.end - 1] >= 0
        expected = [token.role != tasks.GIVEN for token in p.tokens]
        assert learnt.tolist() == expected
        given += expected.count(False)
    assert given > 10
