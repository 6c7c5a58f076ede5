"""Jobs on Ray: the worker by itself, and, marked `ray`, two workers on this machine's CPUs."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import InvalidRequest, SamplingParams
from pipeline.jobs import Job
from pipeline.jobs.journal import Entry
from pipeline.jobs.manifest import pipeline_parts
from pipeline.jobs.on_ray import ShardWorker, keywords_of, run_on_ray
from tests import pipes
from tests.test_jobs import PARAMS, PROMPTS, assert_same_rollouts, rollouts_of, write
from tests.test_jobs import run as run_job

ROOT = Path(__file__).parent.parent
BIASED = replace(PARAMS, logit_bias={5: -np.inf, 9: 1.0})


def load_arguments(**more):
    pair = {"target": str(pipes.target_folder(320)), "draft": str(pipes.draft_folder(320))}
    return pair | {"device": "cpu", "max_batch": 3, "max_length": 64} | more


def loaded():
    from pipeline import SpeculativePipeline

    return SpeculativePipeline.from_pretrained(**load_arguments())


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def test_a_worker_makes_what_a_job_makes(tmp_path, prompts):
    run_job(tmp_path / "whole", prompts, BIASED, pipe=loaded())
    folder = tmp_path / "job"
    with Job(folder, prompts, BIASED, shard_size=4) as job:
        job.begin(pipeline_parts(loaded()))
        made_of = (str(folder), str(prompts), keywords_of(BIASED), load_arguments(), job.provenance)
        workers = [ShardWorker(*made_of), ShardWorker(*made_of)]
        for index in reversed(job.missing):
            (line,) = workers[index % 2]({"shard": np.array([index])})["entry"]
            job.record(Entry.read(line))
            job.record(Entry.read(line))  # a shard that was made twice counts once
        assert not job.missing
        assert job.summary.num_rollouts == 15
    assert_same_rollouts(rollouts_of(folder), rollouts_of(tmp_path / "whole"))


def test_a_worker_with_another_pipeline_is_refused(tmp_path, prompts):
    with Job(tmp_path / "job", prompts, PARAMS, shard_size=4) as job:
        job.begin(pipeline_parts(loaded()))
        made_of = (str(tmp_path / "job"), str(prompts), keywords_of(PARAMS))
        with pytest.raises(InvalidRequest, match=r"max_batch=2, expected 3.*options sha256="):
            ShardWorker(*made_of, load_arguments(max_batch=2), job.provenance)


def test_parameters_can_be_sent():
    import pickle

    sent = pickle.loads(pickle.dumps(keywords_of(BIASED)))
    assert SamplingParams(**sent) == BIASED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0, expected an integer of at least 1"),
        ({"num_workers": True}, "num_workers=True, expected"),
        ({"num_workers": 2, "gpus_per_worker": -1}, "gpus_per_worker=-1, expected a number of at least 0"),
        ({"num_workers": 2}, r"num_workers=2, expected Ray: pip install specmask\[ray\]"),
    ],
)
def test_bad_arguments(tmp_path, prompts, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    with Job(tmp_path / "job", prompts, PARAMS) as job, pytest.raises(InvalidRequest, match=message):
        run_on_ray(job, load_arguments(), **arguments)


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    import ray

    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
        yield
        ray.shutdown()


class DiesOnce:
    """A logits processor that kills its process the first time that it is called anywhere."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __call__(self, ids, scores):
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return scores
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def __repr__(self):
        return "DiesOnce"


@pytest.mark.ray
@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_comes_to_the_same(tmp_path, prompts, cluster, num_workers):
    whole, folder = tmp_path / "whole", tmp_path / "job"
    summary = run_job(whole, prompts, BIASED, pipe=loaded())
    with Job(folder, prompts, BIASED, shard_size=4) as job:
        on_ray = run_on_ray(job, load_arguments(), num_workers=num_workers, gpus_per_worker=0, progress=False)
        assert not job.missing
    assert on_ray == summary
    assert_same_rollouts(rollouts_of(folder), rollouts_of(whole))
    with Job(folder, prompts, BIASED, shard_size=4) as job:  # and either way can go on with it
        assert run_on_ray(job, load_arguments(), num_workers=num_workers, gpus_per_worker=0) == summary
    assert run_job(folder, prompts, BIASED, pipe=loaded()) == summary


@pytest.mark.ray
def test_a_worker_that_dies_is_replaced(tmp_path, prompts, cluster):
    marker = tmp_path / "died"
    params = replace(PARAMS, logits_processors=[DiesOnce(marker)])
    with Job(tmp_path / "job", prompts, params, shard_size=4) as job:
        run_on_ray(job, load_arguments(), num_workers=2, gpus_per_worker=0, progress=False)
        assert not job.missing
    assert marker.exists()
    run_job(tmp_path / "whole", prompts, params, pipe=loaded())
    assert_same_rollouts(rollouts_of(tmp_path / "job"), rollouts_of(tmp_path / "whole"))
    lines = (tmp_path / "job" / "journal.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["shard"] for line in lines) == list(range(len(lines)))
