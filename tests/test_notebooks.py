"""Every notebook runs from top to bottom."""

import json
import os
from pathlib import Path

import pytest

from model_loaders import CheckpointError
from model_loaders.demo_model import demo_target_folder

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
    try:
        demo_target_folder()
    except CheckpointError as error:
        pytest.skip(f"no demo model: {error}")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text())["cells"]
    names: dict = {}
    for cell in cells:
        assert not cell.get("outputs"), "commit notebooks without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert os.listdir(tmp_path) == []


def test_they_are_numbered():
    assert [int(path.stem.split("_")[0]) for path in NOTEBOOKS] == list(range(1, len(NOTEBOOKS) + 1))
