"""Packed batches: what each token sees, against a statement of it in plain loops."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from da_jax.checkpoints.tiny import language as lang
from da_jax.checkpoints.tiny.batches import SCAFFOLD, Shape, make_batch
from da_jax.checkpoints.tiny.model import Config, forward, init

SHAPE = Shape((4, 7), context=160, contexts=2, rows=4, copy=0.2)
TEXT = {i: piece for piece, i in lang.VOCABULARY.items()}


def pieces_of(ids):
    """Byte-level pieces back to text."""
    byte = {letter: b for b, letter in enumerate(lang.BYTE_LETTERS)}
    for i in ids:
        piece = TEXT[int(i)]
        if piece in lang.CONTROL or piece in lang.TAGS:
            yield piece
        else:
            yield bytes(byte[letter] for letter in piece).decode()


def mode_after(text):
    """Mode and chunk numbers in force once ``text`` of a response has been written."""
    tags = re.findall(r'<(/?)(global|local|focus)(?: magic_chunks="([\d,]+)")?>', text)
    if not tags or tags[-1][0] or tags[-1][1] == "global":
        return "global", set()
    return tags[-1][1], {int(i) for i in tags[-1][2].split(",") if i}


@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_each_token_sees_what_the_tags_before_it_declare(masked):
    shape = dataclasses.replace(SHAPE, rows=10, masked=masked, ids=1.0)
    batch, placed = make_batch(np.random.default_rng(5), shape)
    assert {p.question.kind for p in placed} == set(lang.KINDS)
    for p in placed:
        shown = {}  # chunk number in the tags -> chunk of the batch
        for token, chunk in zip(pieces_of(batch.context[p.context]), batch.chunk[p.context]):
            if token.isdigit():
                shown[int(token)] = chunk
        for i in range(p.start, p.end):
            text = "".join(pieces_of(batch.rows[p.context, p.row, p.response : i + 1]))
            mode, numbers = mode_after(text) if masked else ("global", set())
            want = {SCAFFOLD} | {shown[n] for n in numbers}
            if mode == "global":
                want |= set(shown.values())
            at = (p.context, p.row, i)
            every = set(shown.values()) if batch.everything[at] else set()
            got = {SCAFFOLD} | every | {int(c) for c in batch.focus[at] if c > 0}
            assert got == want, text


def test_every_response_token_is_a_target_once():
    batch, placed = make_batch(np.random.default_rng(6), SHAPE)
    for p in placed:
        at = np.s_[p.context, p.row, p.response - 1 : p.end - 1]
        assert list(pieces_of(batch.target[at])) == [token.piece for token in p.tokens]
        assert (batch.role[at] >= 0).all()
        assert (batch.role[p.context, p.row, p.start : p.response - 1] == -1).all()


def test_a_batch_follows_from_its_seed():
    first, second = (make_batch(np.random.default_rng(7), SHAPE)[0] for _ in range(2))
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def model():
    config = Config(vocab_size=len(lang.VOCABULARY))
    return init(jax.random.key(0), config), config


def test_packing_changes_no_logits(model):
    """A segment among others gives what it gives alone with its context."""
    params, config = model
    batch, placed = make_batch(np.random.default_rng(8), dataclasses.replace(SHAPE, masked=1.0))
    packed, _ = forward(params, config, batch)
    p = next(p for p in placed if p.start > 0)
    here = np.s_[p.context, p.row, p.start : p.end]
    own = batch.segment == batch.segment[p.context, p.row, p.start]
    alone = batch._replace(rows=np.where(own, batch.rows, lang.IDS[lang.PAD]))
    np.testing.assert_allclose(forward(params, config, alone)[0][here], packed[here], atol=1e-5)


def test_local_tokens_read_no_chunk(model):
    """In a single layer, other text in the chunks leaves the logits of LOCAL tokens alone."""
    params, config = model
    one_layer = {**params, "layers": params["layers"][:1]}
    batch, placed = make_batch(np.random.default_rng(9), dataclasses.replace(SHAPE, masked=1.0))
    other = batch._replace(context=np.where(batch.chunk > 0, lang.IDS["."], batch.context))
    before, after = (forward(one_layer, config, b)[0] for b in (batch, other))
    change = np.abs(before - after).max(-1)
    modes = {"global": [], "focus": [], "local": []}
    for p in placed:
        for i, token in enumerate(p.tokens, p.response):
            modes[token.mode].append(change[p.context, p.row, i])
    assert max(modes["local"]) < 1e-6
    assert max(modes["global"]) > 1e-2
    assert max(modes["focus"]) > 1e-3


def test_the_exported_folder_is_a_qwen3_for_transformers(model, tmp_path):
    """Logits of an unpacked, unmasked segment against transformers' implementation."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from da_jax.checkpoints.tiny.export import export

    params, config = model
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    export(params, config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    shape = dataclasses.replace(SHAPE, masked=0.0, gap=0, copy=0.0)
    batch, placed = make_batch(np.random.default_rng(10), shape)
    ours, _ = forward(params, config, batch)
    p = placed[0]
    context = batch.context[p.context][batch.chunk[p.context] >= 0]
    ids = np.concatenate([context, batch.rows[p.context, p.row, p.start : p.end]])
    with torch.no_grad():
        logits = theirs(torch.tensor(ids[None].astype(np.int64))).logits[0, len(context) :]
    got = ours[p.context, p.row, p.start : p.end]
    np.testing.assert_allclose(got, logits.numpy(), atol=2e-4)
