"""`da-jax info`: what it prints, where it finds models, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
from etils import epath

from da_jax.cli import main as cli
from da_jax.models import catalog


@pytest.fixture
def info(monkeypatch, capsys):
    """A call of `da-jax info arguments`: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["da-jax", "info", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
            sys.exit(0)
        out = capsys.readouterr()
        return done.value.code or 0, out.out, out.err

    return call


def test_json_has_flat_keys_with_units(info):
    code, out, _ = info("gemma-4-E4B", "--json")
    facts = json.loads(out)
    assert code == 0
    assert list(facts) == [
        "model", "source", "family", "parameters", "parameters_read_per_step", "vocab_size",
        "hidden_size", "max_positions", "layers_full", "layers_sliding", "layers_recurrent",
        "layers_shared_kv", "layers_full_shared_kv", "layers_sliding_shared_kv",
        "layers_with_experts", "window_tokens", "dtype", "weights", "kv_dtype",
        "batch", "context_tokens",
        "page_size_tokens", "prefill_chunk_tokens", "kv_bytes_per_token_full",
        "kv_bytes_per_token_sliding", "kv_read_bytes_per_token_full",
        "kv_read_bytes_per_token_sliding", "state_bytes_per_sequence", "devices",
        "device_kv_bytes_per_token_full", "device_kv_bytes_per_token_sliding",
        "device_kv_read_bytes_per_token_full", "device_kv_read_bytes_per_token_sliding",
        "device_state_bytes_per_sequence", "memory_bytes",
        "memory_bytes_weights", "memory_bytes_pages", "memory_bytes_rings", "memory_bytes_states",
        "memory_bytes_workspace", "per_layer_embedding_bytes", "read_bytes_per_step",
        "read_bytes_per_step_weights", "read_bytes_per_step_full", "read_bytes_per_step_sliding",
        "read_bytes_per_step_states", "savable_share_kv", "savable_share_all", "contexts", "fits",
        "notes",
    ]  # fmt: skip
    assert (facts["layers_full"], facts["layers_sliding"], facts["layers_shared_kv"]) == (7, 35, 18)
    assert facts["kv_bytes_per_token_full"] == 16_384
    assert facts["kv_read_bytes_per_token_full"] == 28_672
    assert facts["context_tokens"] == 32_768
    assert f"{facts['savable_share_kv']:.1%} {facts['savable_share_all']:.1%}" == "96.2% 9.2%"
    assert [row["context_tokens"] for row in facts["contexts"]] == [8_192, 32_768, 131_072]
    assert list(facts["fits"][0]) == [
        "chip",
        "chip_memory_bytes",
        "dtype",
        "context_tokens",
        "note",
    ]
    assert facts["memory_bytes"] == sum(
        facts[f"memory_bytes_{part}"]
        for part in ("weights", "pages", "rings", "states", "workspace")
    )
    assert any("per-layer embeddings" in note for note in facts["notes"])


def test_options_reach_the_arithmetic(info):
    _, out, _ = info(
        "Qwen3.6-27B", "--json", "--batch", "8", "--context", "131072", "--weights", "int8",
        "--page-size", "32", "--prefill-chunk", "256",
    )  # fmt: skip
    facts = json.loads(out)
    assert facts["memory_bytes_pages"] == 8 * 131_072 * 65_536
    assert 26.9e9 < facts["memory_bytes_weights"] < 27e9
    assert facts["weights"] == "int8" and facts["dtype"] == "bfloat16"
    assert facts["page_size_tokens"] == 32 and facts["prefill_chunk_tokens"] == 256
    _, out, _ = info("Qwen3.6-27B", "--json", "--dtype", "float32")
    assert json.loads(out)["kv_bytes_per_token_full"] == 2 * 65_536


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gemma-4-31B", ["10 full, 50 sliding, window 1,024", "30.70 B", "81,920 B", "4.1%"]),
        ("Qwen/Qwen3.6-27B", ["16 full, 48 recurrent", "153.9 MB", "87.5%", "weights need"]),
        ("gemma-4-E2B", ["7 full (4 read another's KV)", "6,144 B, 14,336 B read"]),
        ("tiny", ["ships with the package", "4 full"]),
    ],
)
def test_text_for_people(info, monkeypatch, model, words):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = info(model)
    assert code == 0
    assert [word for word in [*words, "Longest context on one device"] if word not in out] == []


def test_a_folder_is_read(info, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(catalog.hf_config("gemma-3-1b")))
    code, out, _ = info(str(tmp_path), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["source"] == str(tmp_path)
    assert facts["parameters"] == 999_885_952 and facts["max_positions"] == 32_768


def test_a_folder_in_a_bucket_is_read(info, bucket):
    folder = epath.Path(bucket) / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(catalog.hf_config("gemma-3-1b")))
    code, out, _ = info(f"{bucket}/model", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["source"] == f"{bucket}/model"
    assert facts["parameters"] == 999_885_952
    code, _, err = info(f"{bucket}/nothing")
    assert code == 1 and "gs://bucket/nothing/config.json does not exist" in err


def test_a_converted_folder_says_what_it_holds(info, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(catalog.hf_config("gemma-3-1b")))
    record = {"format": 1, "complete": True, "dtype": "bfloat16", "quantize": "int8"}
    (tmp_path / "da_jax.json").write_text(json.dumps(record))
    stored = json.loads(info(str(tmp_path), "--json")[1])
    asked = json.loads(info("gemma-3-1b", "--json", "--weights", "int8")[1])
    assert json.loads(info(str(tmp_path), "--json", "--weights", "auto")[1]) == stored
    assert stored["weights"] == "int8"
    assert stored["memory_bytes"] == asked["memory_bytes"]
    (tmp_path / "da_jax.json").write_text(json.dumps(record | {"complete": False}))
    (tmp_path / "config.json").unlink()
    code, out, err = info(str(tmp_path))
    assert code == 1 and out == "" and "incomplete" in err and "interrupted" in err


def test_neither_jax_nor_the_network_and_the_hub_cache_first(tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--else-it" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(catalog.hf_config("Qwen3-1.7B")))
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    code = (
        "import sys\n"
        "from da_jax.cli.main import app\n"
        "try: app(['info', 'someone/else-it', '--json'])\n"
        "except SystemExit: pass\n"
        "print('jax' in sys.modules, file=sys.stderr)"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    facts = json.loads(done.stdout)
    assert facts["parameters"] == 1_720_574_976 and "someone--else-it" in facts["source"]
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gemma-4-31"], "the nearest are gemma-4-31B"),
        (["someone/else"], "unknown model 'someone/else'"),
        (["a/b/c"], "unknown model 'a/b/c'"),
        (["Qwen3-8B", "--batch", "0"], "batch is 0"),
        (["Qwen3-8B", "--context", "0"], "context is 0"),
        (["Qwen3-8B", "--dtype", "auto"], "dtype is 'auto'"),
        (["Qwen3-8B", "--weights", "int4"], "--weights is 'int4'"),
        (["Qwen3-8B", "--weights", "bf16"], "must be int8, or auto: what the checkpoint says"),
    ],
)
def test_refusals_are_one_line(info, arguments, words):
    code, out, err = info(*arguments)
    assert code == 1 and out == ""
    assert words in err and "Traceback" not in err and err.count("\n") == 1


def test_notes_on_what_is_beyond_the_checkpoint(info):
    _, out, _ = info("Qwen3-8B", "--context", "131072", "--json")
    assert "beyond the 40,960 positions" in json.loads(out)["notes"][0]
    _, out, _ = info("gemma-3-4b", "--dtype", "float16", "--json")
    assert "float16's range" in json.loads(out)["notes"][0]


def test_a_mesh_says_what_each_device_holds(info):
    """Gemma 4 31B: 32 query heads; 16 KV heads in sliding layers, 4 in full ones."""
    one, eight = (json.loads(info("gemma-4-31B", "--mesh", n, "--json")[1]) for n in "18")
    assert one["device_kv_bytes_per_token_full"] == one["kv_bytes_per_token_full"]
    assert eight["kv_bytes_per_token_full"] == one["kv_bytes_per_token_full"]
    assert eight["device_kv_bytes_per_token_full"] == one["kv_bytes_per_token_full"] // 4
    assert eight["device_kv_bytes_per_token_sliding"] == one["kv_bytes_per_token_sliding"] // 8
    assert eight["memory_bytes_rings"] == one["memory_bytes_rings"] // 8
    # Only keys and values of full layers (2 x 4 x 512 of 5376 features, 10 layers; k_eq_v halves
    # it), norms and scalars are on all devices whole.
    whole = 10 * 4 * 512 * 5376
    divided = (one["parameters"] - whole) * 2 / 8 + whole * 2
    assert eight["memory_bytes_weights"] == pytest.approx(divided, rel=1e-3)
    code, out, _ = info("gemma-4-31B", "--mesh", "8")
    assert code == 0 and "on each of 8 devices" in out and "Longest context on 8 devices" in out
    assert info("Qwen3.6-27B", "--mesh", "0")[2].startswith("da-jax: --mesh is 0")
    assert "7 devices cannot share this qwen3_5" in info("Qwen3.6-27B", "--mesh", "7")[2]


def test_a_mesh_divides_states_by_heads(info):
    one, four = (json.loads(info("Qwen3.6-27B", "--mesh", n, "--json")[1]) for n in "14")
    assert four["device_state_bytes_per_sequence"] == one["state_bytes_per_sequence"] // 4
    assert four["memory_bytes_states"] == one["memory_bytes_states"] // 4
