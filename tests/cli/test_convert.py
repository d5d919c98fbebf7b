"""`da-jax convert`: what it writes, says and refuses."""

import json
import shutil
import sys

import pytest
from support import prompt_fixtures, tiny

from da_jax.cli import main as cli
from da_jax.engine.llm import load_tokenizer
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import PLAIN, TOOL, Style


@pytest.fixture
def convert(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["da-jax", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
            sys.exit(0)
        return done.value.code or 0, *capsys.readouterr()

    return call


def test_int8_is_written_verified_and_checked_again(convert, tiny_folder, tmp_path):
    code, out, err = convert(tiny_folder, tmp_path / "out", "--quantize", "int8")
    assert code == 0 and "wrote" in out and "as int8, verified" in out
    assert "converting" in err and "verifying" in err and "100%" not in out
    record = json.loads((tmp_path / "out" / "da_jax.json").read_text())
    assert record["quantize"] == "int8" and record["dtype"] == "bfloat16" and record["complete"]
    code, out, _ = convert("--verify-only", tmp_path / "out")
    assert code == 0 and f"{len(record['checksums'])} parameters are as they were written" in out
    record["checksums"]["norm.scale"] = "0"
    (tmp_path / "out" / "da_jax.json").write_text(json.dumps(record))
    code, out, err = convert("--verify-only", tmp_path / "out")
    assert code == 1 and "norm.scale" in err and "Traceback" not in err


def test_an_unfinished_conversion_is_started_over_and_says_so(convert, tiny_folder, tmp_path):
    (tmp_path / "out").mkdir()
    record = {"format": 1, "complete": False, "dtype": "float32"}
    (tmp_path / "out" / "da_jax.json").write_text(json.dumps(record))
    code, out, err = convert(tiny_folder, tmp_path / "out", "--no-verify")
    assert code == 0 and "not verified" in out and "starting over" in err


def test_a_missing_tokenizer_is_a_warning(convert, tiny_folder, tmp_path):
    code, _, err = convert(tiny_folder, tmp_path / "whole", "--no-verify")
    assert code == 0 and "warning" not in err
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path / "bare")
    code, out, err = convert(tmp_path / "bare", tmp_path / "out", "--no-verify")
    assert code == 0 and "wrote" in out
    assert "warning" in err and "no tokenizer.json or tokenizer.model" in err


@pytest.mark.parametrize("case", ["tool", "plain", "own", "no template"])
def test_the_folder_holds_the_prompt_style_that_was_resolved(convert, tiny_folder, tmp_path, case):
    source = shutil.copytree(tiny_folder, tmp_path / "source")
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    for template in source.glob("*.jinja"):
        template.unlink()
    if case != "no template":
        (source / "chat_template.jinja").write_text(
            tiny.TEMPLATE if case == "plain" else prompt_fixtures.TOOLS_IN_TURNS
        )
    if case == "own":
        (source / "da_style.json").write_text(Style(**tiny.STYLE).to_json())
    path.write_text(json.dumps(config))
    code, _, err = convert(source, tmp_path / "out")
    assert code == 0 and "warning" not in err
    if case == "no template":
        assert Style.of_folder(tmp_path / "out") is None
        return
    found = Style.of_folder(tmp_path / "out")
    assert found == {"tool": TOOL, "plain": PLAIN, "own": Style(**tiny.STYLE)}[case]
    assert found == PromptRenderer(load_tokenizer(source)).style
    before, after = (
        PromptRenderer(load_tokenizer(folder)).render(["one", "two"], "why?")
        for folder in (source, tmp_path / "out")
    )
    assert list(before.ids) == list(after.ids)
    assert convert("--verify-only", tmp_path / "out")[0] == 0
    (tmp_path / "out" / "da_style.json").write_text("{}")
    code, _, err = convert("--verify-only", tmp_path / "out")
    assert code == 1 and "da_style.json was changed" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny"], "name the folder to write"),
        (["tiny", "out", "--dtype", "int8"], "--dtype is 'int8'"),
        (["tiny", "out", "--quantize", "int4"], "--quantize is 'int4'"),
        (["tiny", "out", "--verify-only"], "takes one folder"),
        (["tiny", "out", "--revision", "v1"], "revision 'v1' is for hub ids"),
        (["--verify-only", "no-such-folder"], "no-such-folder does not exist"),
    ],
)
def test_options_that_make_no_sense_are_refused(convert, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = convert(*arguments)
    assert code == 1 and out == "" and words in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_bucket_without_its_package_is_refused_before_anything_is_downloaded(
    convert, no_gcsfs, monkeypatch
):
    def download(name, **options):
        raise AssertionError(f"{name} was downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for arguments in (("nobody/model", "gs://bucket/x"), ("--verify-only", "gs://bucket/x")):
        code, out, err = convert(*arguments)
        assert code == 1 and out == "" and "Traceback" not in err
        assert "pip install 'da-jax[gcs]'" in err
