"""What ends a response, and which special tokens are part of its text."""

import json
from types import SimpleNamespace

import pytest
from support import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from da_jax import LLM, EngineConfig, Style
from da_jax.engine.detokenize import IncrementalDecoder, TokenTable
from da_jax.engine.llm import stop_token_ids
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS


@pytest.mark.parametrize(
    ("generation", "config", "eos", "expected"),
    [
        ({"eos_token_id": [1, 106, 50]}, {"text_config": {"eos_token_id": 1}}, 1, {1, 106, 50}),
        ({"eos_token_id": [248046, 248044]}, {}, 248046, {248046, 248044}),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, 8, {0}),
        ({"temperature": 1.0}, {"eos_token_id": [1, 106]}, 1, {1, 106}),
        ({"eos_token_id": None}, {}, 5, {5}),
        ({"eos_token_id": []}, {"eos_token_id": None}, 5, {5}),
        (None, {"text_config": {"eos_token_id": 248044}}, 248046, {248044, 248046}),
        (None, {"eos_token_id": 0, "text_config": {"eos_token_id": 3}}, None, {0}),
        (None, {"text_config": None}, 5, {5}),
    ],
)
def test_stop_tokens_are_those_that_the_checkpoint_names(
    generation, config, eos, expected, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=eos)) == expected


def test_a_checkpoint_that_would_never_stop_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="set eos_token_id in generation_config"):
        stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=None))


def test_the_markers_of_thoughts_stay_in_the_text():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|channel>", "<channel|>", "<turn|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    ids = tokenizer.encode("<|channel>thought\nHm<channel|>42<turn|>").ids
    table = TokenTable.from_tokenizer(tokenizer, shown=(*THINK_STARTS, *THINK_ENDS))
    shown = [text for text, hidden in IncrementalDecoder(table).pieces(ids) if not hidden]
    assert "".join(shown) == "<|channel>thought\nHm<channel|>42"
    table = TokenTable.from_tokenizer(tokenizer)
    shown = [text for text, hidden in IncrementalDecoder(table).pieces(ids) if not hidden]
    assert "".join(shown) == "thought\nHm42"


def test_a_response_that_thinks(tmp_path):
    folder = tiny.write_folder(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t in ("<|channel>", "<channel|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{{ '<|channel>thought\n<channel|>' if not enable_thinking }}"
    path.write_text(json.dumps(config))
    settings = EngineConfig(
        page_size=16, max_model_len=256, max_num_seqs=1, prefill_chunk=64, burst=2
    )
    llm = LLM.from_pretrained(folder, style=Style(**tiny.STYLE), config=settings, thinking=True)
    prompt = llm.request(["one", "two"], "Who?").prompt
    assert prompt.text.endswith("<|im_start|>assistant\n")
    forced = '<|channel>thought\n<focus magic_chunks="2"><answer>no<channel|>It is 42.'
    response = llm.generate(["one", "two"], "Who?", forced=forced, max_tokens=len(forced))
    assert response.text.startswith(forced)
    assert response.answer.startswith("It is 42.")
    modes = {step.mode.value for step in response.steps[-len("It is 42.") :]}
    assert modes == {"global"} and response.summary["focus"]["successes"] == 1
    history = [{"role": "assistant", "content": response.text}]
    later = llm.request(["one", "two"], "Why?", history=history).prompt
    assert "It is 42." in later.text and "thought" not in later.text
