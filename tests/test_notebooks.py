"""Every notebook runs from top to bottom."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "commit notebooks without outputs"
    )
    nbclient.NotebookClient(notebook, timeout=600).execute()


def test_there_are_notebooks():
    assert NOTEBOOKS
