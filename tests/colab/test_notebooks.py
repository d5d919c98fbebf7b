"""Every notebook runs from top to bottom and keeps no outputs in the repository."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.long

NOTEBOOKS = sorted((Path(__file__).parents[2] / "colab").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


# Of jupyter-client and zmq, which the tests only use.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_runs(notebook, tmp_path):
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "unmasked" in printed


def test_it_is_clean_and_leaves_the_jax_of_the_runtime_alone(notebook):
    assert "colab-badge.svg" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "jax" in code[0].source and "-c" in code[0].source


def test_there_are_notebooks():
    assert NOTEBOOKS
