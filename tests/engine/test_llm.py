import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.references import CASES

from da_jax import LLM, Chunk, EngineConfig, RequestError, Style
from da_jax.checkpoints import convert
from da_jax.engine.llm import load_tokenizer, stop_token_ids
from da_jax.engine.sequence import Sequence
from da_jax.models import registry
from da_jax.models.hf_config import parse

CONFIG = parse(CASES["qwen3"])

DOCUMENT = "one two three. " * 4


def test_a_list_of_questions_shares_a_document_or_brings_its_own(random_llm):
    shared = random_llm.generate(DOCUMENT, ["a?", "bb?"], max_tokens=4)
    single = [random_llm.generate(DOCUMENT, q, max_tokens=4) for q in ("a?", "bb?")]
    assert [r.token_ids for r in shared] == [r.token_ids for r in single]
    documents = [DOCUMENT, ["x", Chunk("y", label="file")]]
    own = random_llm.generate(documents, ["a?", "bb?"], max_tokens=4)
    assert own[0].token_ids == shared[0].token_ids
    assert own[1].prompt_tokens != shared[1].prompt_tokens
    with pytest.raises(ValueError, match="3 documents for 2 questions"):
        random_llm.generate(["x", "y", "z"], ["a?", "b?"])


def test_a_bad_request_in_a_list_is_named_before_anything_runs(random_llm):
    with pytest.raises(RequestError, match="question 1: the prompt has"):
        random_llm.generate(["x", "y" * 600], ["a?", "b?"])
    assert random_llm.engine.idle


def test_chat_keeps_earlier_turns_visible(random_llm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
    ]
    response = random_llm.chat(
        messages, documents=[DOCUMENT, "more"], forced="<local>xy", max_tokens=12
    )
    prompt = random_llm.request(
        [DOCUMENT, "more"], "second question", system="Be brief.", history=messages[1:3]
    ).prompt
    assert response.prompt_tokens == len(prompt)
    assert "first answer" in prompt.text and len(prompt.chunks) == 2
    hidden = sum(end - start for start, end in prompt.chunks)
    assert response.steps[-1].vanilla - response.steps[-1].attended == hidden
    with pytest.raises(ValueError, match="message 0"):
        random_llm.chat([{"role": "user", "content": None}])
    with pytest.raises(ValueError, match="last message"):
        random_llm.chat([])
    with pytest.raises(ValueError, match="last message"):
        random_llm.chat(messages[:3])
    with pytest.raises(ValueError, match="last message"):
        random_llm.chat(messages[:1])


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"system": "Be brief."}, "system is no option of `chat`; give it as the first message"),
        ({"history": []}, "history is no option of `chat`; give it as the messages before"),
        ({"chunks": ["x"]}, "chunks is no option of `chat`; give it as 'chunks' of the message"),
        ({"document": "x"}, "document is no option of `chat`; give it as `documents`"),
        ({"question": "x?"}, "question is no option of `chat`; give it as the last message"),
    ],
)
def test_chat_says_where_to_give_what_its_messages_hold(random_llm, options, remedy):
    with pytest.raises(ValueError, match=remedy):
        random_llm.chat([{"role": "user", "content": "q?"}], **options)


def test_an_unknown_arm_is_refused(random_llm):
    with pytest.raises(ValueError, match="masked"):
        random_llm.generate(DOCUMENT, "a?", arm="masked")


def test_an_orbax_checkpoint_answers_like_its_source(random_llm, tiny_folder, tmp_path):
    convert.convert(tiny_folder, tmp_path / "orbax", dtype=jnp.float32)
    llm = LLM.from_pretrained(
        tmp_path / "orbax", style=Style(**tiny.STYLE), config=random_llm.engine.config
    )
    ours = llm.generate(DOCUMENT, "a?", max_tokens=16)
    assert ours.token_ids == random_llm.generate(DOCUMENT, "a?", max_tokens=16).token_ids


def test_stop_tokens_come_from_the_generation_config_else_the_tokenizer(tmp_path):
    folder = tiny.write_folder(tmp_path)
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(folder, tokenizer) == {tokenizer.eos_token_id}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert stop_token_ids(folder, tokenizer) == {1, 5}
    (folder / "generation_config.json").write_text("{}")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        stop_token_ids(folder, tokenizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 40_000}, "page_size is 40000"),
        ({"max_model_len": 100_000}, "declares 512 positions"),
        ({"kv_cache_bytes": 1000}, "or raise kv_cache_bytes"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"attention": "cuda"}, "unknown attention backend 'cuda'"),
    ],
)
def test_settings_that_cannot_work_say_so_at_once(tiny_folder, options, words):
    with pytest.raises(ValueError, match=words):
        LLM.from_pretrained(tiny_folder, style=Style(**tiny.STYLE), **options)


def test_a_tokenizer_of_another_model_is_refused(random_llm):
    config = dataclasses.replace(CONFIG, vocab_size=200)
    model = registry.build(config, dtype=jnp.float32)
    llm = LLM(
        model,
        random_llm.tokenizer,
        frozenset([1]),
        style=Style(**tiny.STYLE),
        config=EngineConfig(
            page_size=16, max_model_len=512, max_num_seqs=1, prefill_chunk=8, burst=1
        ),
    )
    with pytest.raises(RequestError, match="beyond the model's vocabulary of 200"):
        llm.generate(DOCUMENT, "a?")


@pytest.mark.parametrize("options", [{"prefill_chunk": 24}, {"page_size": 8}, {"burst": 3}])
def test_sizes_of_pages_chunks_and_bursts_change_nothing(random_llm, tiny_folder, options):
    config = dataclasses.replace(random_llm.engine.config, max_num_seqs=1, **options)
    other = LLM.from_pretrained(tiny_folder, style=Style(**tiny.STYLE), config=config)
    script = 'a <focus magic_chunks="1,3">bc</focus><local>d'
    chunks = ["one two", "three four", "five six", "seven"]
    ours = other.score(chunks, "a?", script)
    np.testing.assert_allclose(ours, random_llm.score(chunks, "a?", script), atol=1e-5)


def test_a_focus_on_more_chunks_than_the_mask_has_room_for_is_declined(random_llm):
    """Pages of 16 tokens hold several of these chunks: a mask can not list them all apart."""
    sequence = random_llm.engine._sequence
    few = sequence(random_llm.request(["ab"] * 20, "a?", max_tokens=5))
    assert few._most_ids() is None
    many = random_llm.request(["x"] * 60, "a?", max_tokens=5)
    tight = Sequence(
        0, many, random_llm.engine.table, frozenset(), key=np.zeros(2, np.uint32), max_len=500,
        page_size=16, entries=40,
    )  # fmt: skip
    most = tight._most_ids()
    assert most == 40 - 32 - 2
    for count in (most, most + 1):
        ids = ",".join(str(2 * i + 1) for i in range(count))
        tight._read(f'<focus magic_chunks="{ids}">', hidden=False)
        assert tight.view().count <= 40
        assert (tight.view().prompt_tokens < len(many.prompt)) == (count == most)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers would make an empty one, and the question would be lost."""
    folder = tiny.write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        LLM.from_pretrained(folder)
