"""Jobs: killed, gone on with, refused, and streamed."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model_loaders import load_draft, load_target
from pipeline import InvalidRequest, Rollouts, SamplingParams, SpeculativePipeline
from pipeline.jobs import Job
from pipeline.jobs.shards import request_seed
from pipeline.prompt_file import PromptReader, scan_prompts
from pipeline.prompt_file.contents import contents
from pipeline.results.summary import MOST_REASONS, OTHER, Summary
from tests import pipes
from tests.test_rollouts import same

ROOT = Path(__file__).parent.parent
PARAMS = SamplingParams(top_k=20, max_new_tokens=5, seed=3, return_sampling_mask=True)
PROMPTS = [{"token_ids": [4 + i, 5], "id": f"p{i}", "params": {"n": 1 + i % 2}} for i in range(10)]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(folder, prompts, params=PARAMS, *, pipe=None, shard_size=4, **options):
    """Run a job to its end; its summary."""
    with Job(folder, prompts, params, shard_size=shard_size) as job:
        return job.run(pipe or pipes.pipe(max_batch=3, max_length=64, **options), progress=False)


def rollouts_of(folder):
    return [r for path in sorted(folder.glob("*.parquet")) for r in Rollouts.from_parquet(path)]


def assert_same_rollouts(some, others):
    for one, other in zip(some, others, strict=True):
        assert same(one, replace(other, params_index=one.params_index))


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", PROMPTS)


# --- killed ---------------------------------------------------------------------------------------------------------


def test_a_killed_job_goes_on_to_the_same_end(tmp_path):
    """SIGKILL at every event of writing, and at 20 random instants: no file, token or journal line differs."""
    environment = os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.job_process", pipes.target_folder(320), pipes.draft_folder(320), tmp_path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    split = [name for name, _ in cases].index("unseeded")
    for part in (cases[:split], cases[split:]):
        assert len({digest for _, digest in part}) == 1, part
    assert sum(name.startswith("event") for name, _ in cases) > 25
    assert sum(int(name.split()[0]) for name, _ in cases if name.endswith("kills")) >= 20


# --- gone on with ---------------------------------------------------------------------------------------------------


def test_a_shard_is_what_generate_gives_for_its_prompts(tmp_path, prompts):
    summary = run(tmp_path / "job", prompts)
    found = rollouts_of(tmp_path / "job")
    assert [(r.prompt_index, r.sample_index) for r in found] == [(i, j) for i in range(10) for j in range(1 + i % 2)]
    assert summary.num_rollouts == len(found) == 15
    assert summary.num_tokens == sum(len(r.token_ids) for r in found)
    for path in sorted((tmp_path / "job").glob("*.parquet")):
        shard = Rollouts.from_parquet(path)
        own = sorted({r.prompt_index for r in shard})
        wanted = pipes.pipe(max_batch=3, max_length=64).generate(
            [PROMPTS[i]["token_ids"] for i in own], [replace(PARAMS, n=1 + i % 2) for i in own]
        )
        for one, other in zip(shard, wanted, strict=True):
            place = {"prompt_index": one.prompt_index, "prompt_id": one.prompt_id}
            assert same(one, replace(other, params_index=one.params_index, **place))
        assert shard.provenance["params"][shard[0].params_index] == replace(PARAMS, n=1 + own[0] % 2).to_dict()


def test_prompts_without_a_seed_get_the_job_s(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"token_ids": [4, 5]}] * 4)
    folder = tmp_path / "job"
    run(folder, prompts, replace(PARAMS, seed=None), shard_size=1)
    seed = json.loads((folder / "manifest.json").read_text())["seed"]
    found = rollouts_of(folder)
    assert [r.seed for r in found] == [request_seed(seed, i) for i in range(4)]
    assert len({r.seed for r in found}) == 4
    assert len({tuple(r.token_ids) for r in found}) > 1
    assert Rollouts.from_parquet(folder / "rollouts-00000.parquet").provenance["params"][0]["seed"] is None
    folder.joinpath("journal.jsonl").unlink()
    run(folder, prompts, replace(PARAMS, seed=None), shard_size=1)
    assert_same_rollouts(rollouts_of(folder), found)


def truncated(folder):
    path = folder / "rollouts-00001.parquet"
    os.truncate(path, path.stat().st_size // 2)


def of_the_same_size(folder):
    path = folder / "rollouts-00001.parquet"
    path.write_bytes(b"x" * path.stat().st_size)


def flipped(folder):
    """Bytes of a page of data, before Parquet's footer."""
    path = folder / "rollouts-00001.parquet"
    content = bytearray(path.read_bytes())
    content[40:48] = bytes(255 - byte for byte in content[40:48])
    path.write_bytes(content)


def gone(folder):
    (folder / "rollouts-00001.parquet").unlink()


def a_link(folder):
    path = folder / "rollouts-00001.parquet"
    path.rename(folder.parent / "elsewhere.parquet")
    path.symlink_to(folder.parent / "elsewhere.parquet")


def half_a_line(folder):
    path = folder / "journal.jsonl"
    os.truncate(path, path.stat().st_size - 9)


def lines_of_nonsense(folder):
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    other = json.loads(lines[0])
    strange = [{}, [], 3, other | {"shard": 99}, other | {"shard": -1}, other | {"summary": {}}, other | {"size": "x"}]
    strange += [other | {"size": 1e400}, other | {"seconds": None}, {"shard": 0}]
    path.write_bytes(b"\0" * 30 + b"\n{\n" + b"".join(json.dumps(s).encode() + b"\n" for s in strange) + lines[0] * 2)


def no_journal(folder):
    (folder / "journal.jsonl").unlink()


def leftovers(folder):
    (folder / ".rollouts-00001.parquet.abc123.tmp").write_bytes(b"half")
    no_journal(folder)


@pytest.mark.parametrize(
    "damage",
    [truncated, of_the_same_size, flipped, gone, a_link, half_a_line, lines_of_nonsense, no_journal, leftovers],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_folder_is_mended(tmp_path, prompts, damage):
    folder = tmp_path / "job"
    summary = run(folder, prompts)
    whole, names = rollouts_of(folder), sorted(path.name for path in folder.iterdir())
    damage(folder)
    again = run(folder, prompts)
    assert again == summary
    assert_same_rollouts(rollouts_of(folder), whole)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert not any(path.is_symlink() for path in folder.iterdir())


# --- refused --------------------------------------------------------------------------------------------------------


def test_prompts_that_are_no_file_are_refused(tmp_path):
    expected = r"^prompts=list, expected the path of a JSONL or Parquet file: a job goes on from it; "
    with pytest.raises(InvalidRequest, match=expected):
        Job(tmp_path / "job", ["The sky is"], PARAMS)
    assert not (tmp_path / "job").exists()


def test_a_changed_prompts_file_is_refused(tmp_path, prompts):
    run(tmp_path / "job", prompts)
    before = prompts.read_bytes()
    write(prompts, [*PROMPTS[:-1], {"token_ids": [9]}])
    expected = r"^the job in .* was started with other prompts \(another content\); use the same, or a new folder: "
    expected += r"prompts sha256=[0-9a-f]{64}, expected [0-9a-f]{64}$"
    with pytest.raises(InvalidRequest, match=expected):
        Job(tmp_path / "job", prompts, PARAMS, shard_size=4)
    prompts.write_bytes(before)
    run(tmp_path / "job", prompts)


@pytest.mark.parametrize(
    ("params", "shard_size", "message"),
    [
        (replace(PARAMS, top_k=21), 4, r"params \(top_k=21, expected 20\); .*: params sha256="),
        (
            replace(PARAMS, seed=None),
            4,
            r"params \(seed=None, expected 3\); .*: params sha256=",
        ),
        (PARAMS, 5, r"other shard_size \(5, expected 4\); .*: shard_size sha256=\w{64}, expected \w{64}$"),
    ],
)
def test_changed_parameters_are_refused(tmp_path, prompts, params, shard_size, message):
    run(tmp_path / "job", prompts)
    with pytest.raises(InvalidRequest, match=message):
        Job(tmp_path / "job", prompts, params, shard_size=shard_size)


class OtherVerify:
    preserves_law = True


def test_another_pipeline_is_refused(tmp_path, prompts):
    folder = tmp_path / "job"
    run(folder, prompts)
    hashes = r"sha256=\w{64}, expected \w{64}$"
    with pytest.raises(InvalidRequest, match=rf"other options \(max_batch=2, expected 3\); .*: options {hashes}"):
        run(folder, prompts, pipe=pipes.pipe(max_batch=2, max_length=64))
    with pytest.raises(InvalidRequest, match=rf"other draft \(None, expected .*: draft {hashes}"):
        run(folder, prompts, pipe=pipes.pipe(False, max_batch=3, max_length=64))
    with pytest.raises(InvalidRequest, match=rf"other target \(name=.*: target {hashes}"):
        run(folder, prompts, pipe=pipes.pipe(max_batch=3, max_length=64, vocab_size=400))
    pipe = pipes.pipe(max_batch=3, max_length=64)
    pipe.stages["verify"] = OtherVerify()
    with pytest.raises(InvalidRequest, match=rf"\(verify='tests.test_jobs.OtherVerify', expected N.*: stages {hashes}"):
        run(folder, prompts, pipe=pipe)


@pytest.mark.parametrize("what", ["config.json", "draft", "tokenizer.json", "chat template", "generation_config.json"])
def test_what_else_decides_tokens_is_part_of_a_model(tmp_path, prompts, what):
    """The same weights with another configuration are another model; a copy elsewhere, in another process, isn't."""
    folders = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    shutil.copytree(pipes.target_folder(), folders["target"])
    shutil.copytree(pipes.draft_folder(), folders["draft"])

    def again():
        target = load_target(folders["target"], device="cpu")
        draft = load_draft(folders["draft"], target)
        run(tmp_path / "job", prompts, pipe=SpeculativePipeline(target, draft, max_batch=3, max_length=64))

    run(tmp_path / "job", prompts)
    again()
    change(folders, what)
    part = "draft" if what == "draft" else "target"
    hashes = r"sha256=\w{64}, expected \w{64}$"
    with pytest.raises(InvalidRequest, match=rf"other {part} \(.*config_sha256=.*: {part} {hashes}"):
        again()


def change(folders, what):
    """Edit one file of the pair."""
    target = folders["target"]
    if what == "chat template":
        (target / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
        return
    path = folders["draft"] / "config.json" if what == "draft" else target / what
    held = json.loads(path.read_text()) if path.exists() else {}
    if what == "draft":
        held["dflash_config"]["mask_token_id"] += 1
    elif what == "config.json":
        held.setdefault("rope_parameters", {"rope_type": "default"})["rope_theta"] = 50.0
    elif what == "tokenizer.json":
        held["added_tokens"].append(held["added_tokens"][0] | {"id": 319, "content": "<new>"})
    else:
        held["eos_token_id"] = 5
    path.write_text(json.dumps(held))


def test_processors_are_known_by_name(tmp_path, prompts):
    def soften(ids, scores):
        return scores * 0.5

    other = [lambda ids, scores: scores]
    run(tmp_path / "job", prompts, replace(PARAMS, logits_processors=[soften]))
    with pytest.raises(InvalidRequest, match="params sha256="):
        Job(tmp_path / "job", prompts, replace(PARAMS, logits_processors=other), shard_size=4)
    run(tmp_path / "job", prompts, replace(PARAMS, logits_processors=[soften]))


def test_one_process_at_a_time(tmp_path, prompts):
    with (
        Job(tmp_path / "job", prompts, PARAMS),
        pytest.raises(InvalidRequest, match="expected a job that nobody else runs: another process is at it"),
    ):
        Job(tmp_path / "job", prompts, PARAMS)
    Job(tmp_path / "job", prompts, PARAMS).close()


def test_a_job_that_another_process_began_meanwhile_is_taken_over(tmp_path, prompts, monkeypatch):
    from pipeline.jobs import job as module

    scan, folder = module.scan_prompts, tmp_path / "job"

    def slow(*arguments):
        monkeypatch.undo()
        run(folder, prompts)  # all of it, by somebody else
        return scan(*arguments)

    monkeypatch.setattr(module, "scan_prompts", slow)
    with Job(folder, prompts, PARAMS, shard_size=4) as job:
        assert not job.missing
        assert job.manifest.seed == json.loads((folder / "manifest.json").read_text())["seed"]


def test_a_folder_with_anything_else_is_refused(tmp_path, prompts):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "thesis.tex").touch()
    with pytest.raises(InvalidRequest, match=r"expected an empty folder, .* or a job's: it holds thesis"):
        Job(tmp_path / "job", prompts, PARAMS)


@pytest.mark.parametrize("left", ["journal.jsonl", "rollouts-00000.parquet"])
def test_a_folder_that_lost_its_manifest_is_no_new_job(tmp_path, prompts, left):
    """What it holds may be of other prompts and parameters."""
    run(tmp_path / "job", prompts)
    for path in list((tmp_path / "job").iterdir()):
        if path.name not in (left, ".lock"):
            path.unlink()
    with pytest.raises(InvalidRequest, match=f"expected manifest.json beside {left}: put it back, or begin in another"):
        Job(tmp_path / "job", prompts, PARAMS, shard_size=4)
    (tmp_path / "job" / left).unlink()
    assert run(tmp_path / "job", prompts).num_rollouts == 15


HOSTILE_MANIFESTS = {
    "not JSON": lambda held: "{",
    "a list": lambda held: [],
    "another format": lambda held: held | {"format": "specmask.job.v0"},
    "no shards": lambda held: held | {"shards": []},
    "a shard of the past": lambda held: held | {"shards": [[-1, 1, 0, 1, 1]]},
    "a shard of text": lambda held: held | {"shards": [["../../etc/passwd", 1, 0, 1, 1]]},
    "a seed too large": lambda held: held | {"seed": 2**64},
    "a part too few": lambda held: held | {"parts": {}},
}


@pytest.mark.parametrize("change", HOSTILE_MANIFESTS)
def test_a_manifest_is_checked(tmp_path, prompts, change):
    run(tmp_path / "job", prompts)
    path = tmp_path / "job" / "manifest.json"
    held = HOSTILE_MANIFESTS[change](json.loads(path.read_text()))
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(InvalidRequest, match=r"manifest.json: expected a job's manifest: "):
        Job(tmp_path / "job", prompts, PARAMS, shard_size=4)


@pytest.mark.parametrize("name", ["../outside.parquet", "/etc/passwd", "rollouts-00000.parquet"])
def test_names_in_a_folder_s_files_lead_nowhere(tmp_path, prompts, name):
    """Paths are made from indices; what a manifest or a journal says of them is for readers."""
    folder = tmp_path / "job"
    run(folder, prompts)
    whole = rollouts_of(folder)
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line | {"file": name}) + "\n" for line in lines[1:]))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"]["prompts"]["name"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    outside = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    run(folder, prompts)
    assert_same_rollouts(rollouts_of(folder), whole)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == outside


# --- streamed -------------------------------------------------------------------------------------------------------


def test_a_large_file_goes_through_in_bounded_memory(tmp_path):
    """Refused prompts, so that all but the generating is done: 40 MB of prompts, in a fraction of that."""
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for i in range(5_000):
            line = {"token_ids": [1000], "id": f"request {i}", "params": {"stop": f"{i} " + 8000 * "x"}}
            file.write(json.dumps(line) + "\n")
    assert path.stat().st_size > 40e6
    pipe = pipes.pipe(False)
    run(tmp_path / "warm", write(tmp_path / "one.jsonl", [{"token_ids": [1000]}]), pipe=pipe)
    tracemalloc.start()
    try:
        summary = run(tmp_path / "job", path, pipe=pipe, shard_size=128)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.num_failed == summary.num_rollouts == 5_000
    assert peak < 10e6  # a shard's prompts are 1 MB


def test_a_large_parquet_file_is_read_in_groups(tmp_path):
    """10 MB in 50 groups: no more than a few of them are in Arrow's memory at once."""
    path, pool = tmp_path / "prompts.parquet", pa.default_memory_pool()
    rng = np.random.default_rng(0)
    texts = [rng.bytes(2_000).hex() for _ in range(2_500)]
    pq.write_table(pa.table({"prompt": texts}), path, row_group_size=50)
    assert path.stat().st_size > 5e6
    del texts
    most = before = pool.bytes_allocated()
    for number, _ in enumerate(contents(path, 0, 1)):
        if number % 25 == 0:
            most = max(most, pool.bytes_allocated())
    assert number == 2_499
    assert most - before < 2e6


def parquet_of(lines, path, row_group_size):
    columns = {
        "token_ids": pa.array([line.get("token_ids") for line in lines], pa.list_(pa.int64())),
        "messages": pa.array([line.get("messages") for line in lines]),
        "prompt": pa.array([line.get("prompt") for line in lines], pa.string()),
        "id": pa.array([line.get("id") for line in lines], pa.string()),
        "params": pa.array([line.get("params") for line in lines]),
    }
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


MIXED = [
    *PROMPTS,
    {"prompt": "once upon"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "name": "x"}]},
]


@pytest.mark.parametrize("row_group_size", [1, 3, 1000])
def test_parquet_is_read_like_jsonl(tmp_path, row_group_size):
    files = write(tmp_path / "p.jsonl", MIXED), parquet_of(MIXED, tmp_path / "p.parquet", row_group_size)
    scans = [scan_prompts(path, PARAMS, 4) for path in files]
    readers = [PromptReader(path, PARAMS) for path in files]
    assert [shard[1:] for shard in scans[0].shards] == [shard[1:] for shard in scans[1].shards]
    for index in (0, 1, 3, 2, 2, len(scans[0].shards) - 1, 0):
        assert readers[0].read(scans[0].shards[index]) == readers[1].read(scans[1].shards[index])
    assert [line.id for line in readers[1].read(scans[1].shards[0])] == ["p0", "p1", "p2"]


def test_parquet_params_may_be_json(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "params": ['{"logit_bias": {"5": "-inf"}}', None]})
    pq.write_table(table, tmp_path / "p.parquet")
    (shard,) = scan_prompts(tmp_path / "p.parquet", PARAMS, 8).shards
    lines = PromptReader(tmp_path / "p.parquet", PARAMS).read(shard)
    assert [line.params.logit_bias for line in lines] == [{5: -np.inf}, None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a", ""]}, "line 2: prompt='', expected a string"),
        ({"prompt": ["a", None]}, "line 2: no prompt, expected exactly one of"),
        ({"prompt": ["a"], "text": ["b"]}, r"columns \['text'\], expected only prompt"),
        ({"prompt": ["a", "b"], "id": ["x", "x"]}, "line 2: id='x', expected one that line 1 hasn't"),
        ({"prompt": ["a"], "params": ["{"]}, "line 1: .* expected a JSON object"),
    ],
)
def test_bad_parquet(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pytest.raises(InvalidRequest, match=message):
        scan_prompts(tmp_path / "p.parquet", PARAMS, 8)


def test_no_parquet_at_all(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(InvalidRequest, match=r"p.parquet: expected a Parquet file"):
        scan_prompts(tmp_path / "p.parquet", PARAMS, 8)


def test_an_endless_line_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.prompt_file.contents.LONGEST_LINE", 1000)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "' + "x" * 5000 + '"}\n{"prompt": ""}\n')
    with pytest.raises(InvalidRequest, match=r"line 2: .*expected at most 1000 bytes a line\n.*line 3: prompt=''"):
        scan_prompts(path, PARAMS, 8)


def test_a_file_cut_in_use_is_seen(tmp_path, prompts):
    scan = scan_prompts(prompts, PARAMS, 4)
    os.truncate(prompts, 100)
    with pytest.raises(InvalidRequest, match="more prompts; it was cut while in use"):
        PromptReader(prompts, PARAMS).read(scan.shards[1])


def test_a_summary_goes_through_json_and_stays_small():
    summary = Summary(5, 20, 15, 4)
    summary.support_sizes.update([3, 3, 20])
    for i in range(MOST_REASONS + 50):
        summary._fail("because" + "!" * i, 2, [f"p{i}", f"p{i}"])
    back = Summary.from_dict(json.loads(json.dumps(summary.to_dict())))
    assert back == summary
    assert len(back.failures) == MOST_REASONS + 1
    assert back.failures[OTHER] == 100
    assert back.num_failed == 2 * (MOST_REASONS + 50)
    assert back.examples["because"] == ["p0"]
    back.merge(summary)
    assert back.num_tokens == 40
    assert back.support_sizes == {3: 4, 20: 2}
    assert back.failures["because!!!"] == 4
