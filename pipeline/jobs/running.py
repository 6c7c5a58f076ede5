"""Many prompts through a pipeline; a fault of one ends that one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from pipeline.errors import InvalidRequest
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.prompt_file import PromptLine
from pipeline.results.rollout import Rollout


@dataclass
class _Open:
    index: int
    line: PromptLine
    rollouts: list[Rollout]


def run(
    pipe: SpeculativePipeline,
    lines: Iterable[PromptLine],
    *,
    first: int = 0,
    seeded: Callable[[SamplingParams, int], SamplingParams] = lambda params, index: params,
) -> Iterator[tuple[PromptLine, list[Rollout]]]:
    """Generate for all lines; yields a line with its `n` rollouts when the last of them is finished.

    Requests are queued a batch ahead, so slots are refilled while a long output runs on. A rollout's `prompt_index` is
    `first` and the line's place in `lines`, its `prompt_id` the line's id; `params_index` is 0. A refused request, and
    one that alone makes a stage fail, comes out with `error` set. Ending the iteration early takes what is open out of
    the pipeline.

    Args:
        seeded: Gives a prompt's parameters, by its index, the seed that they don't have.

    Raises:
        InvalidRequest: The pipeline has other work.
        Exception: What a stage raises for one request after the other (`SpeculativePipeline.step`).
    """
    if pipe.has_work:
        raise InvalidRequest("pipe.has_work=True, expected an idle pipeline: finish what was submitted first")
    pipe.state.slot_limit.reset()
    left = enumerate(lines, first)
    following = next(left, None)
    running: dict[int, _Open] = {}
    try:
        while following is not None or running:
            while following is not None and len(pipe.state.waiting) < pipe.state.options.max_batch:
                index, line = following
                following = next(left, None)
                try:
                    ticket = pipe.submit(line.prompt, seeded(line.params, index))
                    running[ticket] = _Open(index, line, [])
                except InvalidRequest as refusal:
                    refused = Rollout.refused(str(refusal), index, line.params.n, 0)
                    yield line, [replace(rollout, prompt_id=line.id) for rollout in refused]
            if not running:
                continue
            for rollout in pipe.step(contain=True).rollouts:
                ticket = rollout.prompt_index
                if ticket in running:
                    one = running[ticket]
                    one.rollouts.append(replace(rollout, prompt_index=one.index, prompt_id=one.line.id))
                    if len(one.rollouts) == one.line.params.n:
                        del running[ticket]
                        yield one.line, sorted(one.rollouts, key=lambda r: r.sample_index)
    finally:
        pipe.state.abandon(running)
