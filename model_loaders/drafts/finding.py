"""Where a draft's checkpoint is, and what can be said of it without its target.

A target takes long to load, so what is wrong with a draft's name, folder or configuration is best said before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from safetensors import safe_open

from model_loaders.drafts import row_scaled
from model_loaders.drafts.formats.detect import detect
from model_loaders.drafts.formats.values import Values
from model_loaders.errors import CheckpointError, explained
from model_loaders.files import read_json_object

# The drafts shipped for the demo target, each a folder of this package.
DEMO_DRAFTS = {
    "demo": Path(__file__).parent.parent / "demo_dspark",  # most tokens a round
    "demo-dflash": Path(__file__).parent.parent / "demo_dflash",
    "demo-dflash2": Path(__file__).parent.parent / "demo_dflash2",
}


@dataclass(frozen=True)
class FoundDraft:
    """A draft's checkpoint, its configuration read as far as it goes without the target.

    name: as it was asked for. folder: what holds config.json. revision: the hub's commit for a hub name, else as asked.
    is_hub: whether the weights are still to be fetched. layout: the module of `formats` that reads the values.
    quantised: whether matrices are stored as row_scaled.py says.
    """

    name: str
    folder: Path
    revision: str | None
    is_hub: bool
    layout: ModuleType
    values: Values
    quantised: bool

    def weights(self) -> tuple[Path, ...]:
        """Its *.safetensors files; those of the hub are fetched. Raises CheckpointError if there are none."""
        folder = _snapshot(self.name, self.revision, "*.safetensors") if self.is_hub else self.folder
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors; other weight formats are not read")
        return files


def find_draft(name: str | Path, *, revision: str | None = None) -> FoundDraft:
    """The draft `name`, for `load_draft`; of the hub's only config.json is fetched.

    name, revision: as `load_draft` takes them. Raises CheckpointError for whatever is wrong with any target.
    """
    name = str(name)
    with explained(f"draft={name!r}: not usable as a draft"):
        folder, revision, is_hub = _find(name, revision)
        path = folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"{path} is missing; a draft folder needs config.json and *.safetensors")
        raw = read_json_object(path)
        layout = detect(raw, path)
        if quantised := row_scaled.is_row_scaled(raw, path):
            raw = {key: value for key, value in raw.items() if key != row_scaled.KEY}
        found = FoundDraft(name, folder, revision, is_hub, layout, Values(path, raw, *layout.NESTED), quantised)
        if not is_hub:
            tensor_names(found.weights())
    return found


def tensor_names(files: tuple[Path, ...]) -> set[str]:
    """The names of all tensors, without their `model.` prefix; only headers are read. Raises CheckpointError."""
    names: set[str] = set()
    for path in files:
        with explained(f"{path} can't be read as safetensors"), safe_open(path, framework="pt") as stream:
            names |= {key.removeprefix("model.") for key in stream.keys()}  # noqa: SIM118 (not a dict)
    return names


def _find(name: str, revision: str | None) -> tuple[Path, str | None, bool]:
    """The local folder of a draft, its revision (the hub's commit for a hub name), and whether it is the hub's."""
    if not name.strip():
        raise CheckpointError(f"draft={name!r}, expected {demo_names()}, a folder or a hub name")
    if name in DEMO_DRAFTS:
        return DEMO_DRAFTS[name], None, False
    if (folder := Path(name).expanduser()).is_dir():
        return folder, revision, False
    if folder.is_file():
        raise CheckpointError(f"draft={name!r}: a file, expected the folder of config.json and *.safetensors")
    if folder.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"draft={name!r}: no such folder; expected {demo_names()}, a folder or a hub name")
    found = _snapshot(name, revision, "config.json")
    return found, found.name, True


def _snapshot(name: str, revision: str | None, files: str) -> Path:
    """The folder that holds these files of a hub's checkpoint. Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[files]))
    except Exception as error:
        why = " ".join(str(error).split())
        near = get_close_matches(name.replace("_", "-"), DEMO_DRAFTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(
            f"draft={name!r}, revision={revision!r}: no such folder, and the hub gave no snapshot ({why}); check the "
            f"name ({demo_names()} and, for a pipeline, 'ngram' need no hub), or download it and pass the folder{hint}"
        ) from error


def demo_names() -> str:
    """The names of the shipped drafts, as messages say them."""
    return ", ".join(map(repr, DEMO_DRAFTS))
