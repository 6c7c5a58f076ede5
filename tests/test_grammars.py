"""Grammars: every row's mask along its own drafts, ends, refusals, and nothing outside the grammar ever committed."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PrefixConstrainedLogitsProcessor

from model_loaders import load_target
from pipeline import Grammar, InvalidRequest, NgramProposer, SamplingParams, SpeculativePipeline
from pipeline.audit import audit
from pipeline.cli import command
from pipeline.cli.arguments import given as given_options
from pipeline.grammars.compiler import Compiler
from pipeline.grammars.walk import Walk
from tests import pipes
from tests.naive_grammar import Language
from tests.strategies import fuzz
from tests.test_command import read_prompts
from tests.test_masks import PROMPTS
from tests.test_stopping import EOS, EOS_ID, TOKENIZER, ForcedDrafts

PATHS = {
    "ordinary": lambda **options: pipes.pipe(False, **options),
    "dflash": pipes.pipe,
    "dspark": lambda **options: pipes.pipe_of_kind("dspark vanilla", **options),
    "ngram": lambda **options: SpeculativePipeline(
        pipes.target(), NgramProposer(3, min_ngram=1), **({"max_batch": 4, "max_length": 128} | options)
    ),
}
LETTERS = {TOKENIZER.encode(letter, add_special_tokens=False)[0]: letter for letter in "ab"}
COMPILER = Compiler(pipes.target())


def walk(pattern, endings=EOS):
    return Walk(COMPILER.compile(Grammar("regex", pattern)), 320, endings)


def tokens_of(bits):
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


# --- masks ----------------------------------------------------------------------------------------------------------

expressions = st.recursive(
    st.sampled_from(["a", "b", "ab"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        inner.map(lambda x: f"({x})*"),
        inner.map(lambda x: f"({x})?"),
    ),
    max_leaves=4,
)
letters = st.sampled_from([*LETTERS, EOS_ID, 5])


@fuzz
@given(
    pattern=expressions,
    committed=st.lists(st.sampled_from([*LETTERS]), max_size=4),
    drafts=st.lists(letters, max_size=4),
    other=st.lists(letters, max_size=2),
    early=st.integers(0, 3),
    ignore_eos=st.booleans(),
)
def test_masks_follow_the_drafts_and_the_walk_goes_back(pattern, committed, drafts, other, early, ignore_eos):
    """Rows against every string of the language; a second look, after other drafts, sees the same."""
    language = Language(pattern, LETTERS, reach=8)
    endings = frozenset() if ignore_eos else EOS
    one, prefix = walk(pattern, endings), []
    for token in committed:
        if token in language.allowed(tuple(prefix)):
            ended = one.push(token)
            prefix.append(token)
            assert ended == (ignore_eos and not language.allowed(tuple(prefix)))
    made = one.masks(drafts, early, EOS)
    here = tuple(prefix)
    for i, row in enumerate(made):
        allowed = language.allowed(here) | (endings if language.holds(here) else set())
        if i < early and allowed - EOS:
            allowed -= EOS
        assert tokens_of(row) == allowed
        if i < len(made) - 1:
            here = (*here, drafts[i])
    # The rows end where the drafts do, or at a draft that can't be passed, or behind an ending.
    last = len(made) - 1
    assert last == len(drafts) or drafts[last] not in allowed or drafts[last] in EOS
    one.masks(other)
    again = walk(pattern, endings)
    again.go_back(prefix)
    for twin in (one, again):
        np.testing.assert_array_equal(twin.masks(drafts, early, EOS), made)
    one.go_back([])
    np.testing.assert_array_equal(one.masks([]), walk(pattern, endings).masks([]))


def test_special_tokens_are_no_text():
    """Not even where their names would match."""
    anything = tokens_of(walk(".*").masks([])[0])
    assert anything & set(range(256, 259)) == EOS
    assert len(anything) > 200
    spelled = tokens_of(walk(r"<\|im_start\|>x").masks([])[0])
    assert spelled == set(TOKENIZER.encode("<", add_special_tokens=False))


def test_a_committed_token_outside_the_grammar_is_an_error():
    with pytest.raises(ValueError, match="grammar: token=5 was committed, expected one that the grammar allows"):
        walk("ab").push(5)


# --- end to end -----------------------------------------------------------------------------------------------------

PATTERN = "(a|b)(aa|bb)?(a|ba)*b"
LANGUAGE = Language(PATTERN, LETTERS, reach=6)
CONSTRAINED = SamplingParams(
    temperature=1.5,
    grammar={"regex": PATTERN},
    top_k=20,
    max_new_tokens=12,
    seed=4,
    return_sampling_mask=True,
    sampling_logprobs="support",
    record="audit",
)


def test_the_same_as_transformers_prefix_constraint(path):
    """Same seeds, same tokens and supports, whether a mask or a processor forbids what isn't allowed."""

    def allowed(batch, input_ids):
        prefix = tuple(input_ids.tolist()[len(PROMPTS[0]) :])
        if not prefix or set(prefix) <= set(LETTERS):
            return sorted(LANGUAGE.allowed(prefix) | (EOS if LANGUAGE.holds(prefix) else set())) or [EOS_ID]
        return [EOS_ID]  # behind a draft that isn't allowed

    processor = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
    by_processor = replace(CONSTRAINED, grammar=None, logits_processors=[processor], n=4)
    pipe = PATHS[path]()
    ours = pipe.generate([PROMPTS[0]], replace(CONSTRAINED, n=4))
    theirs = pipe.generate([PROMPTS[0]], by_processor)
    for a, b in zip(ours, theirs, strict=True):
        assert a.ok, a.error
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        assert a.sampling_mask.token_ids.tolist() == b.sampling_mask.token_ids.tolist()
        np.testing.assert_array_equal(a.sampling_mask.logprobs, b.sampling_mask.logprobs)
        assert audit(a).ok


def test_outputs_are_in_the_language_and_supports_in_its_tokens(path):
    rollouts = PATHS[path]().generate(PROMPTS, replace(CONSTRAINED, n=3))
    for rollout in rollouts:
        assert rollout.ok, rollout.error
        tokens = rollout.token_ids.tolist()
        if rollout.finish_reason == "eos":
            assert tokens.pop() == EOS_ID
            assert re.fullmatch(PATTERN, rollout.text)
        else:
            assert (rollout.finish_reason, len(tokens)) == ("length", 12)
            assert LANGUAGE.viable(tuple(tokens))
        for i, support in enumerate(rollout.sampling_mask):
            here = tuple(rollout.token_ids[:i].tolist())
            assert set(support.tolist()) <= LANGUAGE.allowed(here) | (EOS if LANGUAGE.holds(here) else set())
    assert {"eos"} <= {rollout.finish_reason for rollout in rollouts}


def test_json_schemas_give_json(path):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["x", "yy"]}, "many": {"type": "boolean"}},
        "required": ["name", "many"],
        "additionalProperties": False,
    }
    bias = dict.fromkeys(TOKENIZER.encode(" \n\t\r", add_special_tokens=False), -np.inf)
    params = SamplingParams(grammar={"json_schema": schema}, logit_bias=bias, seed=1, max_new_tokens=60, n=2)
    for rollout in PATHS[path]().generate(PROMPTS[:2], params):
        assert rollout.finish_reason == "eos"
        held = json.loads(rollout.text)
        assert held["name"] in ("x", "yy")
        assert isinstance(held["many"], bool)


def test_company_and_recording_change_nothing(path):
    plain = replace(CONSTRAINED, return_sampling_mask=False, record=None, sampling_logprobs="selected")
    each = [CONSTRAINED, replace(CONSTRAINED, grammar=None, seed=1), replace(CONSTRAINED, temperature=0.0)]
    together = PATHS[path]().generate(PROMPTS, each)
    for prompt, params, rollout in zip(PROMPTS, each, together, strict=True):
        bare = replace(plain, grammar=params.grammar, seed=params.seed, temperature=params.temperature)
        alone = PATHS[path]().generate([prompt], bare)[0]
        assert alone.token_ids.tolist() == rollout.token_ids.tolist()


def test_drafts_inside_are_kept_and_drafts_outside_never_committed():
    params = replace(CONSTRAINED, grammar={"regex": "abababab"}, max_new_tokens=20)
    inside, outside = pipes.pipe(block_size=8), pipes.pipe(block_size=8)
    inside.stages["draft"], outside.stages["draft"] = ForcedDrafts("abababab"), ForcedDrafts("aaaaaaaa")
    for pipe in (inside, outside):
        rollout = pipe.generate([PROMPTS[0]], params)[0]
        assert (rollout.text, rollout.finish_reason) == ("abababab", "eos")
        assert rollout.sampling_mask.sizes.tolist() == [1] * 9
    assert inside.generate([PROMPTS[0]], params)[0].num_rounds == 2
    assert outside.generate([PROMPTS[0]], params)[0].num_accepted.sum() <= 4


def test_bfloat16_rows_are_restricted_as_they_are():
    """No float32 copy where nothing but grammars adjust."""
    pipe = SpeculativePipeline(load_target(pipes.target_folder(), device="cpu", dtype="bfloat16"), max_length=64)
    seen = []
    pipe.observe("adjust", lambda adjusted: seen.append(adjusted.logits) or 1 / 0)
    pipe.submit(PROMPTS[0], CONSTRAINED)
    with pytest.raises(ZeroDivisionError):
        pipe.step()
    assert seen[0].dtype == np.uint16
    assert set(np.flatnonzero(seen[0][0, 0] != 0xFF80).tolist()) == LANGUAGE.allowed(())


def test_the_models_own_logits_stay_in_the_record():
    pipe = pipes.pipe()
    blocks, adjusted = [], []
    pipe.observe("forward", blocks.append)
    pipe.observe("adjust", adjusted.append)
    pipe.generate([PROMPTS[0]], CONSTRAINED)
    assert all(np.isfinite(block.logits.numpy()).all() for block in blocks)
    assert all(np.isneginf(one.logits[0, 0]).sum() > 300 for one in adjusted)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_without_an_ending_token_the_output_ends_where_nothing_can_follow(path):
    rollouts = PATHS[path]().generate(PROMPTS, replace(CONSTRAINED, ignore_eos=True, grammar={"regex": "(a|b)(ab|b)"}))
    for rollout in rollouts:
        assert rollout.finish_reason == "stop"
        assert re.fullmatch("(a|b)(ab|b)", rollout.text)
        assert EOS_ID not in rollout.token_ids
        assert len(rollout.sampling_mask) == len(rollout.audit) == len(rollout.token_ids) == len(rollout.text)


def test_stop_tokens_and_stop_strings_end_inside_a_grammar():
    b = max(LETTERS)
    params = replace(CONSTRAINED, grammar={"regex": "aaabaaaa"})
    by_token = pipes.pipe().generate([PROMPTS[0]], replace(params, stop_token_ids=[b]))[0]
    by_string = pipes.pipe().generate([PROMPTS[0]], replace(params, stop="ab"))[0]
    assert (by_token.text, by_token.finish_reason) == ("aaab", "stop")
    assert (by_string.text, by_string.finish_reason, len(by_string.token_ids)) == ("aa", "stop", 4)


def test_min_new_tokens_yields_to_the_grammars_end():
    params = replace(CONSTRAINED, grammar={"regex": "a*"}, min_new_tokens=5, logit_bias={EOS_ID: 50.0})
    rollout = pipes.pipe().generate([PROMPTS[0]], params)[0]
    assert (rollout.text, rollout.finish_reason) == ("aaaaa", "eos")
    short = pipes.pipe().generate([PROMPTS[0]], replace(params, grammar={"regex": "aa"}))[0]
    assert (short.text, short.finish_reason) == ("aa", "eos")


# --- refusals -------------------------------------------------------------------------------------------------------

BAD = {
    "a regex": ({"regex": "a("}, "grammar={'regex': 'a('}, expected one that xgrammar takes: Regex parsing error"),
    "a type": ({"json_schema": {"type": "nope"}}, "expected one that xgrammar takes: Unsupported type"),
    "no JSON": ({"json_schema": "{"}, "expected one that xgrammar takes: "),
    "a rule": ({"ebnf": 'root ::= x "a"'}, "expected one that xgrammar takes: EBNF parser error at line 1"),
    "no root": ({"ebnf": 'start ::= "a"'}, 'The root rule with name "root" is not found'),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_grammar_is_a_bad_line_of_a_prompts_file(tmp_path, bad):
    grammar, message = BAD[bad]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n' + json.dumps({"prompt": "x", "params": {"grammar": grammar}}))
    for params, begin in ((SamplingParams(), f"{path}, line 2: "), (SamplingParams(grammar=grammar), "")):
        with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
            read_prompts(path, params)
        assert str(caught.value).startswith(f"{begin}grammar=")
        assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_grammar_refuses_its_request_only(bad):
    grammar, message = BAD[bad]
    pipe = pipes.pipe()
    params = replace(CONSTRAINED, grammar=grammar)
    with pytest.raises(InvalidRequest) as refused:
        pipe.submit(PROMPTS[0], params)
    assert message in str(refused.value)
    with pytest.warns(UserWarning, match="1 of 2 samples were refused or aborted: prompt 0: grammar="):
        rollouts = pipe.generate(PROMPTS[:2], [params, CONSTRAINED])
    assert message in rollouts[0].error
    assert rollouts[1].ok


def test_one_warning_names_every_request_of_a_bad_grammar():
    bad, other = (replace(CONSTRAINED, grammar=BAD[name][0], n=2) for name in sorted(BAD)[:2])
    with pytest.warns(UserWarning, match="8 of 10 samples") as caught:
        rollouts = pipes.pipe().generate([PROMPTS[0]] * 6, [CONSTRAINED, bad, other, CONSTRAINED, bad, bad])
    assert [r.ok for r in rollouts] == [True, *[False] * 4, True, *[False] * 4]
    assert len(caught) == 1
    assert str(caught[0].message).split("\n", 2) == [
        "8 of 10 samples were refused or aborted:",
        f"prompts 1, 4 and 5: {rollouts[1].error}",
        f"prompt 2: {rollouts[3].error}",
    ]


@pytest.mark.parametrize(
    "value", ["a", {}, {"regex": "a", "ebnf": "b"}, {"lark": "a"}, {"regex": 3}, {"json_schema": {"a": {1, 2}}}, [1]]
)
def test_values_that_are_no_grammar(value):
    with pytest.raises(InvalidRequest, match=r"^grammar=.*, expected"):
        SamplingParams(grammar=value)


def test_a_grammar_that_allows_nothing_ends_its_request_only():
    dead = replace(CONSTRAINED, grammar={"ebnf": 'root ::= "a" x\nx ::= "b" x'}, max_new_tokens=30)
    stuck = replace(CONSTRAINED, grammar={"ebnf": "root ::= root"})
    with pytest.warns(UserWarning, match="1 of 3"):
        rollouts = pipes.pipe().generate(PROMPTS, [dead, stuck, CONSTRAINED])
    assert rollouts[0].text.startswith("abbb")  # an endless one is cut by its limit
    assert rollouts[1].error.startswith("grammar: it allows no token of the vocabulary at output token 0, expected")
    assert rollouts[2].ok


def test_without_a_tokenizer_or_xgrammar(monkeypatch):
    bare = SpeculativePipeline(load_target(pipes.target_folder(64, tokenizer=False), device="cpu"))
    with pytest.raises(InvalidRequest, match="expected None: the target has no tokenizer"):
        bare.submit([1], CONSTRAINED)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(InvalidRequest, match=r"xgrammar isn't usable .*pip install 'specmask\[grammar\]'"):
        pipes.pipe().submit([1], CONSTRAINED)


def test_a_round_that_failed_is_run_again_from_the_same_state():
    pipe = pipes.pipe()
    whole = pipe.generate([PROMPTS[0]], CONSTRAINED)[0]
    pipe.submit(PROMPTS[0], CONSTRAINED)
    for stage in ("adjust", "verify", "finish", "finish"):
        leave = pipe.observe(stage, lambda record: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.step()
        leave()
        pipe.step()
    [again] = pipe.stream()
    assert again.token_ids.tolist() == whole.token_ids.tolist()


def test_grammars_in_parameters():
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    params = SamplingParams(grammar={"json_schema": schema})
    assert params.grammar == Grammar("json_schema", json.dumps(schema))
    assert SamplingParams(**params.to_dict()) == params
    assert hash(params) == hash(SamplingParams(grammar=params.grammar))
    assert replace(params, seed=1).grammar == params.grammar
    assert SamplingParams(grammar={"json_schema": True}).grammar.source == "true"


def test_grammars_on_the_command_line_and_in_a_prompts_file(tmp_path, capsys):
    common = ["generate", "--target", "t", "--prompts", "p", "--out", "o"]
    options = command.make_parser().parse_args([*common, "--grammar", "regex=a=b"])
    assert SamplingParams(**given_options(options, SamplingParams)).grammar == Grammar("regex", "a=b")
    none = command.make_parser().parse_args([*common, "--grammar", "none"])
    assert SamplingParams(**given_options(none, SamplingParams)).grammar is None
    with pytest.raises(SystemExit):
        command.make_parser().parse_args([*common, "--grammar", "lark=x"])
    assert "grammar={'lark': 'x'}, expected None, or a mapping with one of" in capsys.readouterr().err
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x", "params": {"grammar": {"json_schema": {"type": "null"}}}}))
    [line] = read_prompts(path, SamplingParams())
    assert line.params.grammar == Grammar("json_schema", '{"type": "null"}')
