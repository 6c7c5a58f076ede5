"""What a call's warning says of the samples that failed."""

from pipeline.results.failures import failures_of
from pipeline.results.rollout import Rollout
from tests import pipes


def refused(index, reason, n=1):
    return Rollout.refused(reason, index, n, 0)


def test_nothing_failed():
    assert failures_of([]) == ""
    assert failures_of(pipes.pipe().generate([[1, 2]])) == ""


def test_one_reason():
    assert failures_of(refused(3, "why not", n=2)) == "2 of 2 samples were refused or aborted: prompt 3: why not"


def test_prompts_by_reason():
    """A reason's value may differ: the first is shown, and that it is the first."""
    rollouts = [
        *refused(1, "x=9, expected 1"), *refused(2, "why not"), *refused(4, "x=8, expected 1", n=2),
        *refused(5, "why not"), *refused(7, "x=9, expected 1"),
    ]  # fmt: skip
    assert failures_of(rollouts).split("\n") == [
        "6 of 6 samples were refused or aborted:",
        "prompts 1, 4 and 7, the first: x=9, expected 1",
        "prompts 2 and 5: why not",
    ]


def test_many_prompts_and_reasons():
    alike = [rollout for index in range(20) for rollout in refused(index, "why not", n=3)]
    assert failures_of(alike) == (
        "60 of 60 samples were refused or aborted: prompts 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: why not"
    )
    letters = "abcdefghijk"
    lines = failures_of([rollout for letter in letters for rollout in refused(0, f"why {letter}")]).split("\n")
    assert lines[1:] == [
        *(f"prompt 0: why {letter}" for letter in letters[:8]), "and 3 more samples for other reasons: see their error"
    ]  # fmt: skip
