"""``python -m pipeline generate``, in this process and once as its own."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from pipeline import InvalidRequest, Rollout, Rollouts, SamplingParams
from pipeline.audit import audit
from pipeline.cli import command
from pipeline.cli.arguments import field_help, given
from pipeline.drafting.lengths import ConfidenceThreshold
from pipeline.jobs.running import run
from pipeline.options import Options
from pipeline.policy.params import NO_TEXT_FORM
from pipeline.prompt_file import PromptLine, PromptReader, scan_prompts
from pipeline.results.summary import Summary
from tests import pipes
from tests.strategies import fuzz
from tests.test_rollouts import same

ROOT = Path(__file__).parent.parent
LINES = [
    {"prompt": "once upon", "id": "story"},
    {"messages": [{"role": "user", "content": "hello"}], "params": {"n": 2, "max_new_tokens": 3}},
    {"token_ids": [4, 5, 6], "id": 7, "params": {"logit_bias": {"5": "-inf", "9": 1}, "temperature": 0}},
]


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def arguments(tmp_path, *more, draft=True, lines=LINES):
    prompts = write(tmp_path / "prompts.jsonl", lines)
    pair = ["--target", str(pipes.target_folder(320)), *(["--draft", str(pipes.draft_folder(320))] if draft else [])]
    out = tmp_path / "out"
    common = ["--device", "cpu", "--max-batch", "2", "--max-length", "64", "--max-new-tokens", "6", "--seed", "5"]
    return ["generate", *pair, "--prompts", str(prompts), "--out", str(out), *common, *more], out


def read(out):
    return [Rollouts.from_parquet(path) for path in sorted(out.glob("*.parquet"))]


def read_prompts(path, params, shard_size=1 << 20):
    """All prompts of a file."""
    reader = PromptReader(path, params)
    return [line for shard in scan_prompts(path, params, shard_size).shards for line in reader.read(shard)]


# --- from beginning to end ------------------------------------------------------------------------------------------


def test_as_its_own_process(tmp_path):
    given, out = arguments(tmp_path, "--top-k", "30", "--return-sampling-mask", "--record", "audit", "--no-progress")
    done = subprocess.run([sys.executable, "-m", "pipeline", *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[0] == "requests        4, of which 4 done and 0 refused or aborted"
    (rollouts,) = read(out)
    assert len(rollouts) == 4
    assert all(audit(rollout).ok for rollout in rollouts)


def test_what_is_written_is_what_the_pipeline_generates(tmp_path, capsys):
    given, out = arguments(tmp_path, "--top-p", "0.9", "--top-k", "40", "--return-sampling-mask")
    assert command.main(given) == command.DONE
    (rollouts,) = read(out)
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "journal.jsonl",
        "manifest.json",
        "rollouts-00000.parquet",
    ]
    assert [(r.prompt_index, r.sample_index, r.prompt_id) for r in rollouts] == [
        (0, 0, "story"),
        (1, 0, None),
        (1, 1, None),
        (2, 0, "7"),
    ]
    base = SamplingParams(top_p=0.9, top_k=40, return_sampling_mask=True, max_new_tokens=6, seed=5)
    params = [
        base,
        replace(base, n=2, max_new_tokens=3),
        replace(base, logit_bias={5: -np.inf, 9: 1}, temperature=0),
    ]
    wanted = pipes.pipe(max_batch=2, max_length=64).generate(
        [LINES[0]["prompt"], LINES[1]["messages"], LINES[2]["token_ids"]], params
    )
    for one, other in zip(rollouts, wanted, strict=True):
        # The target is loaded twice: where its weights lie in memory may change the last bit of a logit.
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.sampling_mask.logprobs, other.sampling_mask.logprobs, atol=1e-5)
        mask = replace(other.sampling_mask, logprobs=one.sampling_mask.logprobs)
        assert same(one, replace(other, prompt_id=one.prompt_id, logprobs=one.logprobs, sampling_mask=mask))
    assert rollouts.provenance["params"] == [p.to_dict() for p in params]
    assert rollouts.provenance["options"]["max_batch"] == 2
    assert rollouts.provenance["prompts"]["name"] == "prompts.jsonl"
    assert len(rollouts.provenance["prompts"]["sha256"]) == 64
    shown = capsys.readouterr().out
    tokens = sum(len(r.token_ids) for r in rollouts)
    sizes = np.concatenate([r.sampling_mask.sizes for r in rollouts])
    assert f"tokens          {tokens} in " in shown
    assert f"support sizes   mean {sizes.mean():.1f}, p50 " in shown
    assert f", max {sizes.max()}\n" in shown
    assert f"written         1 files in {out}\n" in shown


def test_a_refused_request_is_told_and_counted(tmp_path, capsys):
    lines = [*LINES, {"token_ids": [1000], "id": "far"}, {"prompt": "x" * 70}]
    given, out = arguments(tmp_path, draft=False, lines=lines)
    assert command.main(given) == command.SOME_FAILED
    (rollouts,) = read(out)
    assert [r.error is None for r in rollouts] == [True, True, True, True, False, False]
    shown = capsys.readouterr().out
    assert "requests        6, of which 4 done and 2 refused or aborted" in shown
    assert "failed          1 (far): prompt token=1000, expected ids in [0, 320)" in shown
    assert "failed          1 (line 5): prompt length=70, expected less than max_length=64" in shown


def test_requests_refused_for_one_reason_are_told_in_a_line(tmp_path, capsys):
    """Over several shards, whatever the value; each rollout keeps its own reason."""
    lines = [{"prompt": "x" * (70 + i)} for i in range(7)] + [{"token_ids": [1000 + i]} for i in range(2)]
    given, out = arguments(tmp_path, "--shard-size", "4", draft=False, lines=lines)
    assert command.main(given) == command.SOME_FAILED
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert [line.partition(";")[0] for line in failed] == [
        "failed          7 (line 1, line 2, line 3, line 4, line 5, ...), the first: prompt length=70, expected less "
        "than max_length=64",
        "failed          2 (line 8, line 9), the first: prompt token=1000, expected ids in [0, 320)",
    ]
    errors = [r.error.partition(",")[0] for shard in read(out) for r in shard]
    assert errors == [*(f"prompt length={70 + i}" for i in range(7)), "prompt token=1000", "prompt token=1001"]


def test_shards_hold_whole_prompts_and_number_their_own_parameters(tmp_path):
    lines = [{"prompt": f"p{i}", "params": {"n": 1 + i % 3, "max_new_tokens": 1 + i % 4}} for i in range(9)]
    given, out = arguments(tmp_path, "--shard-size", "4", draft=False, lines=lines)
    assert command.main(given) == command.DONE
    shards = read(out)
    assert len(shards) > 2
    assert all(len(shard) >= 4 for shard in shards[:-1])
    places = []
    for shard in shards:
        for rollout in shard:
            own = shard.provenance["params"][rollout.params_index]
            assert own["max_new_tokens"] == 1 + rollout.prompt_index % 4
            places.append((rollout.prompt_index, rollout.sample_index))
        prompts = {rollout.prompt_index for rollout in shard}
        assert len(shard) == sum(1 + i % 3 for i in prompts)
    assert sorted(places) == [(i, j) for i in range(9) for j in range(1 + i % 3)]


@pytest.mark.parametrize("by_signal", [False, True])
def test_an_interrupted_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys, by_signal):
    lines = [{"prompt": f"p{i}", "params": {"max_new_tokens": 1 if i < 3 else 30}} for i in range(6)]
    given, out = arguments(tmp_path, "--shard-size", "3", draft=False, lines=lines)
    step, count = command.SpeculativePipeline.step, []

    def interrupted(pipe, **options):
        count.append(1)
        if len(count) == 5 and by_signal:
            signal.raise_signal(signal.SIGTERM)
        elif len(count) == 5:
            raise KeyboardInterrupt
        return step(pipe, **options)

    monkeypatch.setattr(command.SpeculativePipeline, "step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert command.main(given) == command.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before
    (rollouts,) = read(out)
    assert [r.prompt_index for r in rollouts] == [0, 1, 2]
    shown = capsys.readouterr().out
    assert "requests        3, of which 3 done" in shown
    assert f"written         1 files in {out}; 1 shards are left: run the same command again" in shown
    assert command.main(given) == command.DONE
    shown = capsys.readouterr().out
    assert "requests        6, of which 6 done" in shown
    assert " tokens/s after 3 in earlier runs\n" in shown
    assert [r.prompt_index for shard in read(out) for r in shard] == list(range(6))
    assert command.main(given) == command.DONE  # nothing is left to do


def test_control_c_ends_a_process_that_goes_on_when_started_again(tmp_path):
    """A real SIGINT in the middle of a job; until then its bar told rate and time left."""
    given, out = arguments(
        tmp_path, "--shard-size", "2", "--progress", draft=False, lines=[{"prompt": f"p{i}"} for i in range(400)]
    )
    # As from a terminal: what a script starts in its background ignores the signal, and so do its children.
    heeding = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    started = f"import runpy, signal; {heeding}; runpy.run_module('pipeline', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", started, *given],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 240
        while len(list(out.glob("*.parquet"))) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == command.INTERRUPTED, shown
    assert "Traceback" not in shown
    assert "shards are left: run the same command again" in shown
    assert re.search(r"\d+:\d\d<\d+:\d\d, +[\d.]+", shown), shown[-2000:]
    assert 5 <= len(read(out)) < 200
    assert command.main(given) == command.DONE
    assert [r.prompt_index for shard in read(out) for r in shard] == list(range(400))


def test_workers_are_handed_what_was_asked_for(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command, "run_on_ray", lambda job, load, **options: asked.append((load, options)))
    given, _ = arguments(tmp_path, "--workers", "3", "--progress", lines=[{"prompt": "x"}])
    assert command.main(given) == command.DONE
    load, options = asked[0]
    assert options == {"num_workers": 3, "gpus_per_worker": 0, "progress": True}
    assert load == {
        "target": str(pipes.target_folder(320)),
        "draft": str(pipes.draft_folder(320)),
        "device": "cpu",
        "dtype": "auto",
        "max_batch": 2,
        "max_length": 64,
    }
    assert "1 shards are left" in capsys.readouterr().out


# --- at the door ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command.SpeculativePipeline, "from_pretrained", load)


BAD_LINES = {
    "{": "expected a JSON object: Expecting property name",
    "[1]": "[1], expected a JSON object",
    '{"prompt": "\xff"': "expected a JSON object",
    '{"prompt": 3}': "prompt=3, expected a string",
    '{"prompt": ""}': "prompt='', expected a string with at least one character",
    '{"messages": []}': "messages=[], expected a list of objects, each with a role",
    '{"messages": [{"content": "x"}]}': "expected a list of objects, each with a role",
    '{"token_ids": [1, true]}': "token_ids=[1, True], expected a list of token ids",
    '{"token_ids": [-1]}': "token_ids=[-1], expected a list of token ids",
    '{"prompt": "x", "token_ids": [1]}': "prompt and token_ids, expected exactly one of prompt, messages, token_ids",
    '{"id": "x"}': "no prompt, expected exactly one of prompt, messages, token_ids",
    '{"prompt": "x", "parms": {}}': "parms={}, expected one of prompt, messages, token_ids, params, id",
    '{"prompt": "x", "params": 3}': "params=3, expected an object of sampling parameters",
    '{"prompt": "x", "params": {"top_q": 1}}': "params.top_q=1, expected a sampling parameter; did you mean top_p?",
    '{"prompt": "x", "params": {"max_batch": 1}}': "params.max_batch=1, expected a sampling parameter; max_batch is an",
    '{"prompt": "x", "params": {"logits_processors": []}}': "=[], expected a sampling parameter that can be given",
    '{"prompt": "x", "params": {"a\\nb": 1}}': "params.'a\\nb'=1, expected a sampling parameter: one of",
    '{"prompt": "x", "top_k": 3}': "params, id; sampling parameters go into",
    '{"prompt": "x", "params": {"grammar": "a"}}': "grammar='a', expected None, or a mapping with one of",
    '{"prompt": "x", "params": {"grammar": {"regex": "a("}}}': "expected one that xgrammar takes: Regex parsing error",
    '{"prompt": "x", "params": {"top_p": 2}}': "top_p=2, expected a number above 0 and at most 1",
    '{"prompt": "x", "params": {"temperature": NaN}}': "temperature=nan, expected a number from 0",
    '{"prompt": "x", "params": {"logit_bias": {"a": 1}}}': "params.logit_bias={'a': 1}, expected token ids as keys",
    '{"prompt": "x", "id": [1]}': "id=[1], expected a string or an integer",
    '{"prompt": "x", "id": "\\ud800"}': "expected text that UTF-8 can hold",
    '{"prompt": "x", "id": "story"}': "id='story', expected one that line 1 hasn't",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_named_before_anything_is_loaded(tmp_path, capsys, no_loading, bad):
    given, out = arguments(tmp_path, lines=[LINES[0], "", bad, LINES[1]])
    capsys.readouterr()  # what making the target said, if no test before has made it
    assert command.main(given) == command.BAD_ARGUMENTS
    shown = capsys.readouterr().err
    assert f"{tmp_path / 'prompts.jsonl'}, line 3: " in shown
    assert BAD_LINES[bad] in shown
    assert shown.count("line 3") == shown.count("\n") == 1
    assert not out.exists()


def test_bad_lines_for_one_reason_are_named_together(tmp_path):
    lines = [{"prompt": 1}, {"prompt": "x", "params": {"max_tokens": 5}}, {"prompt": "x"}, {"prompt": [2.5]}]
    path = write(tmp_path / "bad.jsonl", [*lines, *({"prompt": i} for i in range(25)), {"prompt": "x", "id": [3]}])
    with pytest.raises(InvalidRequest) as refusal:
        read_prompts(path, SamplingParams())
    numbers = ", ".join(map(str, [4, *range(5, 23)]))
    assert str(refusal.value).split("\n") == [
        f"{path}, line 1: prompt=1, expected a string with at least one character; and 26 more such lines: "
        f"{numbers}, ...",
        f"{path}, line 2: params.max_tokens=5, expected a sampling parameter; did you mean max_new_tokens?",
        f"{path}, line 30: id=[3], expected a string or an integer",
    ]


def test_bad_lines_of_many_kinds_are_counted(tmp_path):
    path = write(tmp_path / "bad.jsonl", [{"prompt": "x", "a" * (1 + i): i} for i in range(25)])
    with pytest.raises(InvalidRequest, match=r"line 20: a{20}=19, .*\nand 5 more bad lines$") as refusal:
        read_prompts(path, SamplingParams())
    assert str(refusal.value).count("\n") == 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("-inf"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("3"), inner, max_size=3),
    max_leaves=5,
)


@fuzz
@given_any(
    key=st.sampled_from([*(one.name for one in fields(SamplingParams)), "id", "prompt", "params", "messages", "other"]),
    value=json_values,
)
def test_whatever_a_line_holds_it_is_taken_or_refused(tmp_path_factory, key, value):
    line = {"prompt": "x"}
    if key in SamplingParams.__dataclass_fields__:
        line["params"] = {key: value}
    else:
        line[key] = value
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", [line])
    with contextlib.suppress(InvalidRequest):
        (found,) = read_prompts(path, SamplingParams())
        assert isinstance(found, PromptLine)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-p", "2"], "top_p=2.0, expected a number above 0 and at most 1"),
        (["--max-batch", "0"], "max_batch=0, expected an integer of at least 1"),
        (["--filter-order", "none"], 'filter_order=\'none\', expected "top_k_first" or "joint"'),
        (["--shard-size", "0"], "shard_size=0, expected an integer of at least 1"),
        (["--prompts", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        (["--out", "setup.cfg"], "Not a directory: 'setup.cfg'"),
        (["--out", "tests"], "out='tests', expected an empty folder, a name for a new one, or a job's: it holds "),
    ],
)
def test_bad_arguments(tmp_path, capsys, no_loading, monkeypatch, more, message):
    monkeypatch.chdir(ROOT)
    assert command.main([*arguments(tmp_path)[0], *more]) == command.BAD_ARGUMENTS
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "notebooks"], "notebooks: "),
        (["--dtype", "int3"], "dtype='int3', expected 'auto', 'float32'"),
        (["--device", "gnu"], "device='gnu', expected 'auto', 'cpu'"),
    ],
)
def test_models_that_do_not_load(tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.chdir(ROOT)
    assert command.main([*arguments(tmp_path)[0], *more]) == command.BAD_ARGUMENTS
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad",
    [
        ["--top-k", "many"],
        ["--sampling-logprobs", "all"],
        ["--draft-lengths", "1.5"],
        ["--draft-lengths", "fast"],
        ["--nonsense"],
        ["--top", "3"],
    ],
)
def test_what_argparse_refuses(tmp_path, capsys, bad):
    with pytest.raises(SystemExit) as end:
        command.main([*arguments(tmp_path)[0], *bad])
    assert end.value.code == command.BAD_ARGUMENTS
    assert "error: " in capsys.readouterr().err


def test_an_empty_file(tmp_path, capsys, no_loading):
    assert command.main(arguments(tmp_path, lines=["", ""])[0]) == command.BAD_ARGUMENTS
    assert "expected at least one line with a prompt" in capsys.readouterr().err


# --- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SamplingParams, Options])
def test_every_field_is_an_option_with_help(cls, capsys):
    helps = field_help(cls)
    with pytest.raises(SystemExit):
        command.main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for one in fields(cls):
        option = "--" + one.name.replace("_", "-")
        assert helps[one.name]
        assert (f"{option} " in shown) == (one.name not in NO_TEXT_FORM)


def parsed(*lines):
    return command.make_parser().parse_args(" ".join(["generate --target t --prompts p --out o", *lines]).split())


def test_the_options_read_every_type():
    options = parsed(
        "--temperature 0.5 --top-k 7 --logit-bias 5=-inf 9=1.5 --logit-bias 3=-2 --stop a --stop b c",
        "--stop-token-ids 4 5 --ignore-eos --no-return-logprobs --record audit --seed 18446744073709551615",
        "--presence-penalty -0.5 --allow-unbounded-support --filter-order joint --proposal sample --draft-lengths 0.25",
    )
    assert SamplingParams(**given(options, SamplingParams)) == SamplingParams(
        temperature=0.5,
        top_k=7,
        logit_bias={5: -np.inf, 9: 1.5, 3: -2},
        stop=["a", "b", "c"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        return_logprobs=False,
        record="audit",
        seed=2**64 - 1,
        presence_penalty=-0.5,
    )
    assert Options(**given(options, Options)) == Options(
        allow_unbounded_support=True,
        filter_order="joint",
        proposal="sample",
        draft_lengths=ConfidenceThreshold(0.25),
    )
    assert given(parsed("--draft-lengths none"), Options) == {"draft_lengths": None}
    assert given(parsed(), SamplingParams) == given(parsed(), Options) == {}
    assert given(parsed("--top-k none --record none"), SamplingParams) == {"top_k": None, "record": None}


def test_a_line_s_parameters_come_back_from_what_provenance_writes(tmp_path):
    params = SamplingParams(temperature=0.3, logit_bias={3: -np.inf, 4: 2.0}, stop=["x"], top_k=9, seed=1, n=3)
    written = {name: value for name, value in params.to_dict().items() if name not in NO_TEXT_FORM}
    path = write(tmp_path / "p.jsonl", [{"prompt": "x", "params": written}])
    (line,) = read_prompts(path, SamplingParams())
    assert line == PromptLine(1, "x", params, None)


def test_slots_are_refilled_from_a_short_queue():
    pipe = pipes.pipe(False, max_batch=2)
    longest = []
    pipe.observe("admit", lambda record: longest.append(len(pipe.state.waiting)))
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    lines = [PromptLine(i, [i], replace(params, max_new_tokens=1 + i % 5)) for i in range(30)]
    done = list(run(pipe, lines))
    assert sorted(line.number for line, _ in done) == list(range(30))
    assert max(longest) <= 2
    assert not pipe.has_work


def test_ending_the_iteration_empties_the_pipeline():
    pipe = pipes.pipe(False, max_batch=2)
    lines = [PromptLine(i, [i], SamplingParams(max_new_tokens=4 + i, ignore_eos=True)) for i in range(9)]
    running = run(pipe, lines)
    next(running)
    running.close()
    assert not pipe.has_work


def test_a_busy_pipeline_is_left_alone():
    pipe = pipes.pipe(False)
    pipe.submit([1], SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="has_work=True, expected an idle pipeline"):
        next(run(pipe, [PromptLine(1, [1], SamplingParams())]))
    assert len(list(pipe.stream())) == 1


def test_the_summary_counts():
    mask_params = SamplingParams(top_k=20, return_sampling_mask=True, max_new_tokens=8, ignore_eos=True, n=4, seed=1)
    rollouts = pipes.pipe().generate([[1, 2], [3]], mask_params)
    summary = Summary()
    summary.add(rollouts[:4], "a")
    summary.add(rollouts[4:], "b")
    sizes = np.sort(np.concatenate([r.sampling_mask.sizes for r in rollouts]))
    assert summary.support_quantiles(0.5, 0.99, 1.0) == [
        np.quantile(sizes, q, method="inverted_cdf") for q in (0.5, 0.99, 1.0)
    ]
    assert summary.num_tokens == 64
    rounds = sum(r.num_rounds - 1 for r in rollouts)
    assert summary.tokens_a_round == (64 - 8) / rounds
    assert np.isnan(Summary().tokens_a_round)
    for name in "abcdefg":
        summary.add(Rollout.refused("too long", 0, 2, 0), name)
    assert summary.num_failed == 14
    assert summary.lines(1.0)[-1] == "failed          14 (a, b, c, d, e, ...), the first: too long"
    assert Summary().lines(2.0) == [
        "requests        0, of which 0 done and 0 refused or aborted",
        "tokens          0 in 2.0 s, 0.0 tokens/s",
    ]


@pytest.mark.parametrize(("option", "hint"), [("--max-bacth", "; did you mean --max-batch?"), ("--zzz", "")])
def test_an_unknown_option_is_named_with_the_nearest(tmp_path, capsys, option, hint):
    given, _ = arguments(tmp_path)
    with pytest.raises(SystemExit) as raised:
        command.main([*given, option, "3"])
    assert raised.value.code == 2
    shown = capsys.readouterr().err
    assert shown.endswith(f": error: {option}, expected an option of python -m pipeline generate{hint}\n")
    assert shown.startswith("usage: python -m pipeline generate ")
