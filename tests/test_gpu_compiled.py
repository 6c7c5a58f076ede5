"""Kernels on the disk: what they are known by, that they are read again, and that a damaged file is harmless."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, int32, void

from gpu.device import compiled
from gpu.device.launch import Kernel, pointer_to
from tests.test_ptx_kernels import KERNELS

PRINT = """
import hashlib
from gpu.device.compiled import identity
from tests.test_ptx_kernels import KERNELS
for factory, *arguments in KERNELS.values():
    kernel = factory(*arguments)
    print(hashlib.sha256(identity(kernel.function, kernel.signature, kernel.max_registers).encode()).hexdigest())
"""


def test_a_kernel_is_known_in_every_process():
    """By the same name whatever Python's hashes are, and no two by one."""
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(compiled.ROOT.parent)}
        run = subprocess.run(
            [sys.executable, "-c", PRINT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=compiled.ROOT.parent,
        )
        found.append(run.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == len(KERNELS)


def test_what_a_function_closes_over_tells_it_apart():
    def made(value, inner=None):
        def kernel(out):
            out[0] = value if inner is None else inner(value)

        return kernel

    plain = [made(1), made(2), made(np.uint32(1)), made(1.0), made((1, "a")), made(1, made(3)), made(1, made(4))]
    assert len({compiled.identity(function, "s", 40) for function in plain}) == len(plain)
    assert len({compiled.identity(made(1), *of) for of in (("s", 40), ("s", None), ("t", 40))}) == 3
    with pytest.raises(TypeError, match=r"value=\{1\}, expected a constant or a function"):
        compiled.identity(made({1}), "s", 40)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPECMASK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a/kernels")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/specmask/kernels")),
        ({}, Path.home() / ".cache/specmask/kernels"),
    ],
)
def test_where_they_are(monkeypatch, variables, expected):
    for name in ("SPECMASK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compiled.folder().parent == expected


def test_old_sources_make_room(tmp_path):
    for i in range(6):
        (tmp_path / str(i)).mkdir()
        os.utime(tmp_path / str(i), (i, i))
    compiled._make_folder(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5", "new"]


@pytest.mark.gpu
def test_a_kernel_is_read_again(monkeypatch, tmp_path):
    from numba.cuda import dispatcher

    monkeypatch.setenv("SPECMASK_CACHE", str(tmp_path))

    def doubled(number):
        def kernel(out):
            out[cuda.threadIdx.x] = 2 * number

        return kernel

    def result(number):
        import cupy

        out = cupy.zeros(32, np.int32)
        Kernel(doubled(number), void(pointer_to(int32)), 32).launch((1,), out.data.ptr)
        return set(out.get().tolist())

    def refused(*_, **__):
        raise AssertionError("compiled")

    assert result(3) == {6}
    (file,) = compiled.folder().iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher._Kernel, "__init__", refused)
        assert result(3) == {6}
        with pytest.raises(AssertionError, match="compiled"):
            result(4)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert result(3) == {6}
    assert len(file.read_bytes()) == len(whole)
    assert result(4) == {8}
    assert len(list(compiled.folder().iterdir())) == 2
