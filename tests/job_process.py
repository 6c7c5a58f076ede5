"""Jobs that are killed: ``python -m tests.job_process TARGET DRAFT WORK``, a process apart because it forks.

It loads a pair once, then runs the same job in many forks, each killed with SIGKILL at another instant and followed by
one that goes on, and prints a line of JSON a case: the instant, and the hash of everything that the folder holds then.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm.auto import tqdm

from pipeline import SamplingParams, SpeculativePipeline
from pipeline.jobs import Job
from pipeline.jobs.journal import Entry

PARAMS = SamplingParams(top_k=20, max_new_tokens=5, seed=3, return_sampling_mask=True, sampling_logprobs="support")
NUM_SHARDS = 2


def write_prompts(path, **own):
    lines = [{"token_ids": [4 + i, 5], "params": {"n": 1 + i % 2, **own}} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(pipe, folder, prompts):
    with Job(folder, prompts, PARAMS, shard_size=4) as job:
        job.run(pipe, progress=False)
        assert not job.missing


def content(folder):
    """The hash of all rollouts, of what the journal counts, and of the names that lie there."""
    digest = hashlib.sha256(repr(sorted(path.name for path in folder.iterdir())).encode())
    for path in sorted(folder.glob("*.parquet")):
        digest.update(json.dumps(pq.read_table(path).to_pylist()).encode())
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    summary = sorted((entry["shard"], json.dumps(entry["summary"])) for entry in entries)
    assert [shard for shard, _ in summary] == list(range(NUM_SHARDS)), "a shard is lost or doubled in the journal"
    digest.update(repr(summary).encode())
    return digest.hexdigest()


def kill_at(fatal, journal):
    """Have this process kill itself at one of the instants of writing: number `fatal`, from 1."""
    count = 0

    def event():
        nonlocal count
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function):
        def call(*arguments, **options):
            event()
            result = function(*arguments, **options)
            event()
            return result

        return call

    write_table, line = pq.write_table, Entry.line

    def in_halves(table, file, **options):
        whole = pa.BufferOutputStream()
        write_table(table, whole, **options)
        data = whole.getvalue().to_pybytes()
        file.write(data[: len(data) // 2])
        file.flush()
        event()
        file.write(data[len(data) // 2 :])

    def half_a_line(entry):
        text = line(entry)
        with journal.open("ab") as file:  # as a write that was cut would leave it
            file.write(text[: len(text) // 2].encode())
        event()
        os.truncate(journal, journal.stat().st_size - len(text) // 2)
        return text

    os.fsync, os.replace, os.chmod = around(os.fsync), around(os.replace), around(os.chmod)
    pq.write_table, Entry.line = in_halves, half_a_line


def fork(task, wait=None):
    """Run a task in a fork; returns its exit status. wait: seconds before it is killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = task() or 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    if wait is not None:
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_every_write(pipe, work, prompts):
    """Killed at the first, second, third, ... event of writing, each time in a new folder; then gone on with."""
    fatal = 0
    while True:
        fatal += 1
        folder = work / f"event-{fatal}"

        def task(folder=folder, fatal=fatal):
            kill_at(fatal, folder / "journal.jsonl")
            run(pipe, folder, prompts)

        status = fork(task)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        assert fork(lambda folder=folder: run(pipe, folder, prompts)) == 0
        print(json.dumps([f"event {fatal}", content(folder)]), flush=True)
        shutil.rmtree(folder)


def at_any_instant(pipe, work, prompts, manifest, seconds, kills):
    """Killed again and again after a random time until it is through; several jobs of the same manifest.

    The times grow, so that a machine that has become slower gets through too; one that hangs is an error.
    """
    rng, job = random.Random(0), 0
    while kills > 0:
        folder, killed = work / f"instant-{job}", 0
        folder.mkdir()
        shutil.copy(manifest, folder)
        while True:
            wait = rng.uniform(0, 0.8 * seconds * 1.05**killed)
            status = fork(lambda folder=folder: run(pipe, folder, prompts), wait)
            if status == 0:
                break
            assert status == -signal.SIGKILL, status
            assert wait < 100 * seconds, "it hangs"
            killed += 1
        print(json.dumps([f"{killed} kills", content(folder)]), flush=True)
        kills, job = kills - killed, job + 1


def main(target, draft, work):
    torch.set_num_threads(1)
    # tqdm's own lock is shared by all forks: one that is killed while it holds it would stop all others.
    tqdm.set_lock(threading.RLock())
    work = Path(work)
    pipe = SpeculativePipeline.from_pretrained(target, draft, device="cpu", max_batch=3, max_length=64)
    pipe.generate([[4]], PARAMS)  # kernels are loaded before the forks
    for name, own in (("seeded", {}), ("unseeded", {"seed": None})):
        prompts = write_prompts(work / f"{name}.jsonl", **own)
        whole = work / name
        started = time.perf_counter()
        assert fork(lambda whole=whole, prompts=prompts: run(pipe, whole, prompts)) == 0
        seconds = time.perf_counter() - started
        print(json.dumps([name, content(whole)]), flush=True)
        if own:
            at_any_instant(pipe, work, prompts, whole / "manifest.json", seconds, kills=20)
        else:
            at_every_write(pipe, work, prompts)


if __name__ == "__main__":
    main(*sys.argv[1:])
