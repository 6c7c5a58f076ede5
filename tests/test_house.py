"""The house rules that a machine can hold."""

import ast
from pathlib import Path

import pytest

from tests.sanitized_functions import kernel_factories

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "gpu", "model_loaders")
MAY_IMPORT = {
    "pipeline": {
        "pipeline",
        "gpu",
        "model_loaders",
        "torch",
        "numpy",
        "numba",
        "pyarrow",
        "tqdm",
        "tokenizers",
        "datasets",
        "ray",
        "xgrammar",
    },
    "gpu": {"gpu", "numpy", "numba", "cupy", "cupyx", "llvmlite", "cuda"},
    "model_loaders": {
        "model_loaders",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "gguf",
        "huggingface_hub",
        "numpy",
        "tqdm",
    },
}


# The parts of pipeline/, lowest first: each may import those of the layers before its own.
LAYERS = (
    ("errors", "files", "arrays", "version"),
    ("prompts", "grammars", "drafting"),
    ("policy",),
    ("options", "results", "prompt_file"),
    ("audit", "batch", "replay", "exports"),
    ("stages", "centering"),
    ("engine",),
    ("running",),
    ("pipeline",),
    ("jobs", "testing", "__init__"),
    ("cli", "demo"),
    ("__main__",),
)


def modules():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    import sys

    package = path.relative_to(ROOT).parts[0]
    foreign = set(imports(path)) - MAY_IMPORT[package] - sys.stdlib_module_names
    assert not foreign, f"{path.name} imports {sorted(foreign)}"


def test_the_parts_of_the_pipeline_import_those_below_them():
    layer_of = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
    for path in (ROOT / "pipeline").rglob("*.py"):
        part = path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "pipeline":
                used = (*node.module.split("."), "__init__")[1]
                names = [name.name for name in node.names] if used == "__init__" else []
                for other in [name for name in names if name in layer_of] or [used]:
                    assert other == part or layer_of[other] < layer_of[part], f"{path} imports {node.module}"


def test_the_oracle_shares_no_code():
    for path in (ROOT / "tests").glob("naive*.py"):
        assert not set(imports(path)) & set(PACKAGES), path


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_is_documented(path):
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py" and not tree.body:
        return
    assert ast.get_docstring(tree), f"{path} has no module docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_no_pickle_and_no_remote_code():
    for path in modules():
        text = path.read_text()
        assert "torch.load(" not in text, path
        assert "import pickle" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_the_sanitizers_know_every_kernel():
    made = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{node.name}"
        for path in (ROOT / "gpu").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "Kernel"
    }
    assert made == set(kernel_factories())


def test_every_kernel_is_compiled_to_ptx():
    texts = [path.read_text() for path in (ROOT / "tests").glob("test_*.py")]
    compiling = "\n".join(text for text in texts if "compile_ptx(" in text)
    assert not [name for name in kernel_factories() if name.rpartition(".")[2] not in compiling]
