"""The pipeline: ten stages from prompts to rollouts.

A round (`SpeculativePipeline.step`) runs these, each a small object in `pipeline.stages` that takes and returns a
record of `pipeline.batch.records`:

    1  admit     waiting requests get free slots
    2  prefill   their prompts go through the target, once a prompt       -> a block of one row a request
    3  draft     the draft proposes tokens after every anchor
    4  forward   the target runs over anchor and drafts                   -> a block of `block_size` rows
    5  adjust    penalties, bias, processors and grammars, each row with its own prefix
    6  verify    every row's policy, the accepted drafts, the next token
    7  capture   supports and log-probabilities of committed rows, where asked for
    8  commit    requests move on in cache and random stream
    9  pack      the block's arrays are taken apart by request
    10 finish    ends are found, everything is cut there, slots are freed -> rollouts

The block of a prefill and the block of a round both go through 5 to 10: the first token is verified and recorded like
any other.

On CUDA `pipeline.engine` does 2 to 8 in one piece on the device, a round ahead of the host, as long as nobody needs the
records in between: no observer, no stage in a stage's place, no request whose policy is Python. Stage by stage, 5 to 7
work where the logits are, on the device too.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

import torch
from tqdm.auto import tqdm

from model_loaders import FoundDraft, load_draft, load_target
from pipeline.batch.records import Round
from pipeline.batch.state import State
from pipeline.drafting.draft_choice import check_draft, named_draft
from pipeline.drafting.proposer import Proposer
from pipeline.engine import make_engine
from pipeline.engine.buckets import KV_STEP
from pipeline.engine.memory import fit_device
from pipeline.errors import InvalidRequest
from pipeline.options import Options
from pipeline.policy.contract import Capabilities, check_thresholds
from pipeline.policy.names import unknown_name
from pipeline.policy.params import SamplingParams
from pipeline.prompts import Prompted
from pipeline.results.failures import failures_of
from pipeline.results.rollout import Rollout
from pipeline.results.rollouts import Rollouts
from pipeline.running.call import Call
from pipeline.running.intake import Intake
from pipeline.running.operators import use_kernels
from pipeline.running.provenance import describe
from pipeline.running.stage_runner import StageRunner
from pipeline.running.stepping import Stepper
from pipeline.stages.finish import make_rollout

_OPTIONS = [field.name for field in fields(Options)]
_LOADED = ["target", "draft", "device", "dtype"]  # what `from_pretrained` takes beside them


class SpeculativePipeline:
    """Generates in batches from a target, speculatively with a draft, and records how every token was drawn.

    Args:
        target: `model_loaders.Target`.
        draft: A `model_loaders.drafts.BlockDraft`, or a `pipeline.drafting.proposer.Proposer`; None: ordinary decoding.
        options: See `pipeline.options.Options`, as keywords.

    Raises:
        InvalidRequest: An option out of range, or a draft that proposes nothing.
    """

    def __init__(self, target: Any, draft: Any = None, **options: Any) -> None:
        check_draft(draft)
        checked = Options(**options).within(target, draft)
        # A block is written to the cache whole, so its last rows may lie beyond max_length; in whole blocks of keys.
        room = checked.max_length + (1 if draft is None else 1 + draft.num_drafts)
        room += -room % KV_STEP
        checked = fit_device(checked, target, draft, room)
        self.state = State(
            target=target,
            draft=draft,
            target_cache=target.new_cache(checked.max_batch, room),
            draft_cache=None if draft is None else draft.new_cache(checked.max_batch, room),
            options=checked,
        )
        use_kernels(target, draft)
        self._runner = StageRunner(self.state)
        self._engine = make_engine(self.state, self._runner.run)
        self._stepper = Stepper(self.state, self._runner, self._engine)
        self._intake = Intake(self.state)
        self._unclaimed: deque[Rollout] = deque()

    @classmethod
    def from_pretrained(
        cls,
        target: str = "demo",
        draft: str | os.PathLike[str] | Proposer | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> SpeculativePipeline:
        """Load a pair and build the pipeline.

        Args:
            target: "demo", a hub name, a local folder (safetensors or GGUF) or a GGUF file.
            draft: "demo" (DSpark), "demo-dflash" or "demo-dflash2" for the target "demo"; a hub name or a local folder
                of a draft for this target; "ngram": prompt lookup (`NgramProposer`), for a target without a draft; a
                proposer of your own; None: ordinary decoding.
            device: "auto" (CUDA if there is one), "cpu" or "cuda".
            dtype: "auto" (bfloat16 on CUDA, float32 on the CPU), or a name of torch's.
            options: `max_batch`, `max_length`, `filter_order`, `max_support`, `allow_unbounded_support`,
                `prefill_chunk`, `proposal`, `draft_lengths`; see `pipeline.options.Options`.

        Raises:
            model_loaders.CheckpointError: A checkpoint that doesn't load, or a draft for another target. A draft that
                isn't there, or is no draft, is found before the target is loaded.
            InvalidRequest: An option out of range, or another kind of draft.
        """
        for name in options:
            if name not in _OPTIONS:
                raise unknown_name(Options, name, options[name], known=[*_LOADED, *_OPTIONS])
        Options(**options)
        found = named_draft(draft)  # a target takes long: what is wrong with the draft alone is said before
        loaded = load_target(target, device=device, dtype=dtype)
        return cls(loaded, load_draft(found, loaded) if isinstance(found, FoundDraft) else found, **options)

    # --- generating -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompted],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Rollouts:
        """Generate for a batch of prompts.

        Args:
            prompts: Strings, chat message lists or token id lists.
            params: One for all, or one a prompt. None: the defaults of `SamplingParams`.
            progress: Show a bar of finished samples with the token rate.

        Returns:
            The rollouts in the order of the prompts, `n` samples of a prompt side by side. A request that is refused
            or aborted is a rollout with `error` set and no tokens; the others are not affected. One warning names
            their prompts by reason.

        Raises:
            InvalidRequest: `params` and `prompts` don't match.
        """
        call = Call(self._intake, prompts, params)
        try:
            self._run(call, progress)
        finally:
            # What an interrupted call left; the pipeline goes on without it.
            self.state.abandon(call.tickets)
            self._stepper.forget(call.tickets)
        result = Rollouts(call.rollouts(), describe(self.state, self.capabilities, call.distinct))
        if failures := failures_of(result):
            warnings.warn(failures, stacklevel=2)
        return result

    def submit(self, prompt: Prompted, params: SamplingParams | None = None) -> int:
        """Queue one prompt; its samples come out of `step` and `stream`.

        Returns:
            A ticket; its rollouts carry it as `prompt_index`.

        Raises:
            InvalidRequest: The request can't be served exactly as asked.
        """
        params = params or SamplingParams()
        token_ids = self._intake.encode(prompt)
        self._intake.check(token_ids, params, self.capabilities)
        ticket = self._intake.ticket()
        self._intake.enqueue(ticket, token_ids, params, ticket, 0)
        return ticket

    def step(self, *, contain: bool = False) -> Round:
        """Run one round: admit and prefill, then draft, forward and settle. Returns all its records.

        With an engine (`capabilities.captured`, or the option `engine`) it launches a round, and returns what the ones
        before came to; build the pipeline with ``engine="eager"``, or observe a stage, for the records in between.

        A round is whole or hasn't happened: an exception (an observer's, a stage's, Ctrl-C) leaves every request where
        it was before, and the next call runs the round again.

        A round that runs out of memory is tried once more, then with half as many requests, and so on; those left out
        wait and start again with their own seeds. A request that is too large by itself is aborted.

        Args:
            contain: Treat every exception like that. Whoever makes a round fail alone is aborted with the exception as
                its reason, and the others go on. It is raised all the same if `running.stepping.MOST_CONTAINED`
                requests in a row fail: then the fault isn't theirs.
        """
        return self._stepper.step(contain)

    def stream(self) -> Iterator[Rollout]:
        """Step until nothing is left and yield rollouts as they finish."""
        while self.has_work:
            if not self._unclaimed:
                self._unclaimed.extend(self.step().rollouts)
            if self._unclaimed:
                yield self._unclaimed.popleft()

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs, or has finished unseen while `generate` ran."""
        return bool(self.state.waiting or self.state.running or self._unclaimed or self._stepper.has_ends)

    def cancel(self, ticket: int) -> None:
        """End the samples of a ticket (`submit`'s, or `request.prompt.ticket` of a record) before the next round.

        They come out of the next `step`, `stream` or running `generate`: with finish_reason "cancelled" and what they
        had committed, every record cut at the same token; or, without a token yet, as an error. With an engine a round
        that is on its way is dropped. One that has ended already stays as it is. May be called from an observer and
        from another thread.

        Raises:
            InvalidRequest: No ticket of this pipeline.
        """
        if isinstance(ticket, bool) or not isinstance(ticket, Integral) or not 0 <= ticket < self._intake.num_tickets:
            raise InvalidRequest(f"ticket={ticket!r}, expected one that submit returned")
        self._stepper.cancel(int(ticket))

    # --- looking in and changing ------------------------------------------------------------------------------------

    @property
    def stages(self) -> dict[str, Any]:
        """The ten stages by name; a user may put another object in a stage's place."""
        return self._runner.stages

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent in every stage so far, by name."""
        return self._runner.seconds

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded pair can do under the pipeline's options, thresholds and stages."""
        return self._stepper.capabilities

    def observe(self, stage: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback` with every record that a stage returns; the result, called, ends it.

        Raises:
            InvalidRequest: No stage of that name.
        """
        return self._runner.observe(stage, callback)

    def set_accept_thresholds(self, single: float = 1.0, acc: float = 1.0) -> None:
        """Accept a draft whose probability is at least `single`, or with probability ``p / acc`` instead of p.

        Below 1.0 committed tokens no longer follow the target's policy, so mask requests are refused meanwhile.

        Raises:
            InvalidRequest: A threshold outside (0, 1], or mask requests queued or running.
        """
        check_thresholds(single, acc)
        masked = [r for r in (*self.state.waiting, *self.state.running) if r.params.keeps_supports]
        if masked:
            raise InvalidRequest(
                f"single={single!r}, acc={acc!r}, expected no change while {len(masked)} mask requests are queued or "
                "running; let them finish first"
            )
        self.state.threshold_single, self.state.threshold_acc = float(single), float(acc)

    def update_target_weights(self, tensors: Mapping[str, torch.Tensor], *, abort: bool = False) -> None:
        """Copy new values into the target's weights, in place; the draft's own weights stay.

        Args:
            tensors: By the names of the model's state_dict; any part of it.
            abort: End the requests that wait or run, instead of refusing.

        Raises:
            InvalidRequest: Requests are waiting or running: their cached keys and values are of the old weights. Not a
                mapping.
            model_loaders.CheckpointError: A name or shape that the target doesn't have; nothing is changed then.
        """
        if not isinstance(tensors, Mapping):
            raise InvalidRequest(
                f"tensors={type(tensors).__name__}, expected a mapping of names to tensors: pass model.state_dict()"
            )
        requests = [*self.state.waiting, *self.state.running]
        if requests and not abort:
            raise InvalidRequest(
                f"{len(requests)} requests are waiting or running, expected none while weights change: let them "
                "finish, or pass abort=True"
            )
        self.state.target.load_weights(tensors)
        for request in requests:
            request.fail("aborted: the target's weights were updated")
            request.finish_reason = "abort"
            self._unclaimed.append(make_rollout(request, self.state.target.tokenizer))
        self.state.abandon({request.prompt.ticket for request in requests})

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run(self, call: Call, progress: bool) -> None:
        most, tokens, started, due = self.state.options.max_batch, 0, time.perf_counter(), 0
        with tqdm(total=call.num_open, disable=not progress, unit="sample") as bar:
            while call.num_open:
                for _ in range(min(due, call.num_coming) if self.state.running else call.num_coming):
                    if len(self.state.waiting) >= most:
                        break
                    call.queue(self.capabilities)
                if not self.has_work:  # all that were left are refused
                    break
                step = self._stepper.step(False, call.encode_next)
                others = [r for request, r in step.ended if not call.take(request.prompt.ticket, r)]
                self._unclaimed.extend(others)
                due = max(1, len(step.ended))  # so that those who wait don't become fewer
                tokens += step.num_tokens
                bar.update(bar.total - call.num_open - bar.n)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
