"""Which prompts of a call failed, and why, for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.policy.reasons import kind_of
from pipeline.results.rollout import Rollout

MOST_NAMES = 8
"""Prompts that are named beside a reason."""
MOST_REASONS = 8
"""Kinds of reasons that are shown."""


def failures_of(rollouts: Sequence[Rollout]) -> str:
    """How many samples failed, and the prompts by reason, in the order in which they first occur; "" if none did.

    Reasons of one kind (`pipeline.policy.reasons`) stand together, as the first of them says it.
    """
    failed = [rollout for rollout in rollouts if not rollout.ok]
    if not failed:
        return ""
    kinds: dict[str, list[Rollout]] = {}
    for rollout in failed:
        kinds.setdefault(kind_of(rollout.error or ""), []).append(rollout)
    shown = list(kinds.values())[:MOST_REASONS]
    lines = [_line(alike) for alike in shown]
    if others := len(failed) - sum(map(len, shown)):
        lines.append(f"and {others} more samples for other reasons: see their error")
    head = f"{len(failed)} of {len(rollouts)} samples were refused or aborted:"
    return f"{head} {lines[0]}" if len(lines) == 1 else "\n".join([head, *lines])


def _line(failed: list[Rollout]) -> str:
    """Those that failed alike: their prompts and the first one's reason, which says so if others differ."""
    prompts = list(dict.fromkeys(rollout.prompt_index for rollout in failed))
    names = [str(index) for index in prompts[:MOST_NAMES]]
    if more := len(prompts) - len(names):
        names.append(f"{more} more")
    named = f"prompt {names[0]}" if len(names) == 1 else f"prompts {', '.join(names[:-1])} and {names[-1]}"
    first = "" if len({rollout.error for rollout in failed}) == 1 else ", the first"
    return f"{named}{first}: {failed[0].error}"
