"""Every notebook runs from top to bottom, and is committed with small outputs."""

import json
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from model_loaders import CheckpointError
from model_loaders.targets.demo import demo_target_folder

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
    try:
        demo_target_folder()
    except CheckpointError as error:
        pytest.skip(f"no demo model: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"__name__": "notebook"}
    for cell in cells_of(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
    plt.close("all")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_there_and_small(path):
    outputs = [output for cell in cells_of(path) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    assert not any(output["output_type"] == "error" for output in outputs)
    assert path.stat().st_size < 200_000


def cells_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_they_are_numbered():
    assert [path.stem[:3] for path in NOTEBOOKS] == [f"{i:02d}_" for i in range(1, len(NOTEBOOKS) + 1)]
