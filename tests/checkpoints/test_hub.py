"""Names of checkpoints, and what the hub may answer."""

import types

import jax.numpy as jnp
import pytest
from huggingface_hub import errors

from da_jax import LLM
from da_jax.checkpoints import convert


def answer(monkeypatch, error):
    def download(name, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def response(status):
    return types.SimpleNamespace(headers={}, status_code=status, request=None)


def test_folders_and_the_shipped_checkpoint_need_no_network(tmp_path, monkeypatch):
    assert convert.resolve(tmp_path) == tmp_path
    assert convert.resolve("tiny") == convert.TINY
    with pytest.raises(FileNotFoundError, match="no folder"):
        convert.resolve("no-such-model")
    with pytest.raises(ValueError, match="revision 'v1' is for hub ids"):
        convert.resolve(tmp_path, revision="v1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"no folder 'nobody/no-such-model', .*reached"):
        convert.resolve("nobody/no-such-model")


def test_a_bucket_needs_an_extra_and_other_remote_folders_are_refused(bucket, request):
    assert str(convert.resolve(f"{bucket}/model")) == "gs://bucket/model"
    with pytest.raises(ValueError, match=r"s3://bucket/model'.* only gs://bucket/folder"):
        convert.resolve("s3://bucket/model")
    request.getfixturevalue("no_gcsfs")
    for work in (
        lambda name: LLM.from_pretrained(name),
        lambda name: convert.load(name, dtype=jnp.dtype(jnp.float32)),
        convert.resolve,
        convert.verify,
    ):
        with pytest.raises(ValueError, match=r"gs://bucket/x'.*gcsfs.*install 'da-jax\[gcs\]'"):
            work("gs://bucket/x")


def test_a_hub_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(name=name, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert convert.resolve("owner/name", revision="v1") == tmp_path
    assert asked["name"] == "owner/name" and asked["revision"] == "v1"
    wanted = ("*.safetensors", "*.json", "*.jinja", "*.model", "additional_chat_templates/*")
    assert set(wanted) <= set(asked["allow_patterns"])
    assert not any("bin" in pattern or "pth" in pattern for pattern in asked["allow_patterns"])
    assert "original/*" in asked["ignore_patterns"]
    convert.resolve("owner/name", weights=False)
    assert set(asked["allow_patterns"]) == set(wanted[1:]) | {"*.txt", "LICENSE*", "NOTICE*"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("403", response=response(403)),
         r"licence.*https://huggingface\.co/owner/name.*HF_TOKEN"),
        (errors.RepositoryNotFoundError("404", response=response(404)), "no such model.*private"),
        (errors.RevisionNotFoundError("404", response=response(404)), "no revision 'v9'"),
        (errors.HfHubHTTPError("401", response=response(401)), r"refused your token \(401\)"),
        (errors.HfHubHTTPError("500", response=response(500)), "the hub answered: 500"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached.*offline"),
        (ConnectionError("no route"), "cannot be reached.*no route"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_error_that_says_what_to_do(error, words, monkeypatch):
    answer(monkeypatch, error)
    with pytest.raises(FileNotFoundError, match=f"cannot get 'owner/name' .*{words}"):
        convert.resolve("owner/name", revision="v9")


def test_a_full_cache_is_named(monkeypatch):
    answer(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"cannot store .*owner/name.*HF_HOME") as error:
        convert.resolve("owner/name")
    assert error.value.errno == 28
