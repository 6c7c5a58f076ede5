"""The pipeline: ten stages from prompts to rollouts.

A round (`SpeculativePipeline.step`) runs these, each a small object in `pipeline.stages` that takes and returns a
record of `pipeline.records`:

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

import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

import gpu
from model_loaders import load_draft, load_target
from pipeline import stages as library
from pipeline.arrays import torchs_stream
from pipeline.contract import Capabilities, check_request, check_thresholds
from pipeline.engine import make_engine
from pipeline.engine.buckets import KV_STEP
from pipeline.engine.memory import fit_device
from pipeline.errors import InvalidRequest
from pipeline.grammars.compiler import Compiler
from pipeline.grammars.grammar import Grammar
from pipeline.grammars.walk import Walk
from pipeline.host_threads import threads_for
from pipeline.ngram import NgramProposer
from pipeline.params import SamplingParams
from pipeline.prompts import Prompted, token_ids_of
from pipeline.proposer import Proposer
from pipeline.provenance import describe
from pipeline.records import Block, Round, Settled
from pipeline.request import Prompt, Request
from pipeline.rollout import Rollout
from pipeline.rollouts import Rollouts
from pipeline.slot_limit import is_out_of_memory
from pipeline.stages.finish import make_rollout
from pipeline.state import Options, State
from pipeline.stopping import StopScanner

ENGINE_RUNS = ("admit", "finish")
"""The stages that the engine calls; the others' work is one piece on the device."""

STAGES = ("admit", "prefill", "draft", "forward", "adjust", "verify", "capture", "commit", "pack", "finish")

MOST_CONTAINED = 8
"""Requests in a row that exceptions of stages may end before the exception is raised."""


class SpeculativePipeline:
    """Generates in batches from a target, speculatively with a draft, and records how every token was drawn.

    Args:
        target: `model_loaders.Target`.
        draft: A `model_loaders.drafts.BlockDraft`, or a `pipeline.proposer.Proposer`; None: ordinary decoding.
        options: See `pipeline.state.Options`, as keywords.

    Attributes:
        stages: The ten stages by name; a user may put another object in a stage's place.
        seconds: Time spent in every stage so far, by name.
    """

    def __init__(self, target: Any, draft: Any = None, **options: Any) -> None:
        checked = Options.checked(options).within(target, draft)
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
        self.stages: dict[str, Any] = {name: getattr(library, name.capitalize())() for name in STAGES}
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._observers: dict[str, list[Callable[[Any], None]]] = {name: [] for name in STAGES}
        self._engine = make_engine(self.state, self._run)
        self._stages_of_engine = {name: stage for name, stage in self.stages.items() if name not in ENGINE_RUNS}
        self._grammars = Compiler(target)
        self._num_tickets = 0
        self._unclaimed: deque[Rollout] = deque()
        self._to_cancel: deque[int] = deque()
        self._taken_out: list[tuple[Request, Rollout]] = []
        self._contained, self._tried = 0, False

    @classmethod
    def from_pretrained(
        cls,
        target: str = "demo",
        draft: str | Proposer | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> SpeculativePipeline:
        """Load a pair and build the pipeline.

        Args:
            target: "demo", a hub name, a local folder (safetensors or GGUF) or a GGUF file.
            draft: "demo", "demo-dspark", a hub name or a local folder of a draft for this target; "ngram": prompt
                lookup (`pipeline.ngram.NgramProposer`), for a target without a draft; a proposer of your own; None:
                ordinary decoding.
            device: "auto" (CUDA if there is one), "cpu" or "cuda".
            dtype: "auto" (bfloat16 on CUDA, float32 on the CPU), or a name of torch's.
            options: `max_batch`, `max_length`, `filter_order`, `max_support`, `allow_unbounded_support`,
                `prefill_chunk`, `proposal`, `draft_lengths`; see `pipeline.state.Options`.

        Raises:
            model_loaders.CheckpointError: A checkpoint that doesn't load, or a draft for another target.
            InvalidRequest: An option out of range.
        """
        Options.checked(options)
        loaded = load_target(target, device=device, dtype=dtype)
        if draft == "ngram":
            draft = NgramProposer()
        return cls(loaded, load_draft(draft, loaded) if isinstance(draft, str) else draft, **options)

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
            or aborted is a rollout with `error` set and no tokens; the others are not affected.

        Raises:
            InvalidRequest: `params` and `prompts` don't match.
        """
        policies = self._policies(prompts, params)
        distinct = list({id(policy): policy for policy in policies}.values())
        numbers = {id(policy): number for number, policy in enumerate(distinct)}
        results: dict[int, list[Rollout]] = {}
        try:
            for index, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):
                ticket = self._ticket()
                try:
                    token_ids = self._admissible(prompt, policy)
                except InvalidRequest as refusal:
                    results[ticket] = Rollout.refused(str(refusal), index, policy.n, numbers[id(policy)])
                else:
                    results[ticket] = []
                    self._enqueue(ticket, token_ids, policy, index, numbers[id(policy)])
            self._collect(results, progress)
        finally:
            # What an interrupted call left; the pipeline goes on without it.
            self.state.abandon(results)
            self._taken_out = [pair for pair in self._taken_out if pair[0].prompt.ticket not in results]
        rollouts = [r for found in results.values() for r in sorted(found, key=lambda r: r.sample_index)]
        result = Rollouts(rollouts, describe(self.state, self.capabilities, distinct))
        if result.failed:
            first = result.failed[0]
            warnings.warn(
                f"{len(result.failed)} of {len(result)} samples were refused or aborted; the first, of prompt "
                f"{first.prompt_index}: {first.error}",
                stacklevel=2,
            )
        return result

    def submit(self, prompt: Prompted, params: SamplingParams | None = None) -> int:
        """Queue one prompt; its samples come out of `step` and `stream`.

        Returns:
            A ticket; its rollouts carry it as `prompt_index`.

        Raises:
            InvalidRequest: The request can't be served exactly as asked.
        """
        params = params or SamplingParams()
        token_ids = self._admissible(prompt, params)
        ticket = self._ticket()
        self._enqueue(ticket, token_ids, params, ticket, 0)
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
                its reason, and the others go on. It is raised all the same if `MOST_CONTAINED` requests in a row fail:
                then the fault isn't theirs.
        """
        while True:
            self._take_out_cancelled()
            go_back = self.state.save()
            try:
                with threads_for(self._most_logits()):
                    done = self._round()
            except Exception as error:
                self._undo(go_back, error)
                scarce = is_out_of_memory(error)
                if not (scarce or contain) or self._contained >= MOST_CONTAINED:
                    self._contained = 0
                    raise
                if self._tried:
                    self._give_way(error, scarce)
                elif scarce and self.state.target.device.type == "cuda":
                    torch.cuda.empty_cache()
                    gpu.release_memory()
                self._tried = True  # until a round comes to tokens: an engine's fails only when it is read
            except BaseException as error:
                self._undo(go_back, error)
                raise
            else:
                if done.num_tokens:
                    self.state.slot_limit.succeed()
                    self._contained, self._tried = 0, False
                taken_out, self._taken_out = self._taken_out, []
                return replace(done, taken_out=taken_out)

    def _most_logits(self) -> int:
        """Of what waits and runs, in one round."""
        state = self.state
        batch = min(len(state.waiting) + len(state.running), state.options.max_batch)
        return batch * state.block_size * state.target.vocab_size

    def _undo(self, go_back: Callable[[], None], error: BaseException) -> None:
        go_back()
        if self._engine is not None:
            self._engine.forget(error)

    def _give_way(self, error: Exception, scarce: bool) -> None:
        """After a round that failed twice: fewer requests at once, or the end of the one at fault."""
        culprit = self.state.make_room()
        if culprit is None:
            return
        reason = "out of memory alone in the batch" if scarce else "a stage failed"
        self._abort(culprit, f"{reason}: {type(error).__name__}: {error}")
        if not scarce:
            self._contained += 1
            self.state.slot_limit.reset()

    def _abort(self, request: Request, reason: str) -> None:
        """End a request between rounds; the next round hands it out."""
        self.state.remove(request)
        request.fail(reason)
        request.finish_reason = "abort"
        self._taken_out.append((request, make_rollout(request, self.state.target.tokenizer)))

    def _round(self) -> Round:
        delivered = []
        if self._engine is not None:
            if self._looked_into() or not self._engine.takes():
                delivered = self._engine.drain()
            else:
                admitted, delivered = self._engine.step()
                return Round(admitted, None, None, delivered)
        with torchs_stream(self.state.target.device):
            self.state.clean()
            admitted = self._run("admit")
            prefill = decode = None
            if admitted.requests:
                prefill = self._settle(self._run("prefill", admitted))
            self.state.close_holes()
            if self.state.active:
                decode = self._settle(self._run("forward", self._run("draft")))
            return Round(admitted, prefill, decode, delivered)

    def _looked_into(self) -> bool:
        """Whether somebody watches or has replaced a stage whose work the engine does in one piece."""
        return any(
            self.stages[name] is not stage or self._observers[name] for name, stage in self._stages_of_engine.items()
        )

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
        return bool(self.state.waiting or self.state.running or self._unclaimed or self._to_cancel or self._taken_out)

    def cancel(self, ticket: int) -> None:
        """End the samples of a ticket (`submit`'s, or `request.prompt.ticket` of a record) before the next round.

        They come out of the next `step`, `stream` or running `generate`: with finish_reason "cancelled" and what they
        had committed, every record cut at the same token; or, without a token yet, as an error. With an engine a round
        that is on its way is dropped. One that has ended already stays as it is. May be called from an observer and
        from another thread.

        Raises:
            InvalidRequest: No ticket of this pipeline.
        """
        if isinstance(ticket, bool) or not isinstance(ticket, Integral) or not 0 <= ticket < self._num_tickets:
            raise InvalidRequest(f"ticket={ticket!r}, expected one that submit returned")
        self._to_cancel.append(int(ticket))

    # --- looking in and changing ------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded pair can do under the pipeline's options, thresholds and stages."""
        state, options = self.state, self.state.options
        return Capabilities(
            method=None if state.draft is None else state.draft.method,
            block_size=state.block_size,
            sampling_verify_available=getattr(state.draft, "sampling_verify_available", True),
            mask_contract=state.draft is None or getattr(state.draft, "mask_contract", False),
            law_preserved=getattr(self.stages["verify"], "preserves_law", False),
            threshold_single=state.threshold_single,
            threshold_acc=state.threshold_acc,
            filter_order=options.filter_order,
            max_support=options.max_support,
            allow_unbounded_support=options.allow_unbounded_support,
            max_length=options.max_length,
            vocab_size=state.target.vocab_size,
            has_tokenizer=state.target.tokenizer is not None,
            captured=self._engine is not None and self._engine.rounds.graphs is not None,
        )

    def observe(self, stage: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback` with every record that a stage returns; the result, called, ends it.

        Raises:
            InvalidRequest: No stage of that name.
        """
        if stage not in self._observers:
            raise InvalidRequest(f"stage={stage!r}, expected one of {', '.join(STAGES)}")
        observers = self._observers[stage]
        observers.append(callback)

        def leave() -> None:
            if callback in observers:
                observers.remove(callback)

        return leave

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
            InvalidRequest: Requests are waiting or running: their cached keys and values are of the old weights.
            model_loaders.CheckpointError: A name or shape that the target doesn't have; nothing is changed then.
        """
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

    def _run(self, name: str, *records: Any) -> Any:
        started = time.perf_counter()
        record = self.stages[name](self.state, *records)
        self.seconds[name] += time.perf_counter() - started
        for callback in list(self._observers[name]):
            callback(record)
        return record

    def _take_out_cancelled(self) -> None:
        tickets = set()
        while self._to_cancel:
            tickets.add(self._to_cancel.popleft())
        for request in self.state.abandon(tickets):
            if request.num_generated:
                request.finish_reason = "cancelled"
            else:
                request.fail("cancelled before its first token")
            self._taken_out.append((request, make_rollout(request, self.state.target.tokenizer)))

    def _settle(self, block: Block) -> Settled:
        self._refuse_masks_without_law(block)
        adjusted = self._run("adjust", block)
        verified = self._run("verify", adjusted)
        captured = self._run("capture", verified)
        committed = self._run("commit", captured)
        packed = self._run("pack", committed)
        return Settled(block, adjusted, verified, captured, committed, packed, self._run("finish", packed))

    def _refuse_masks_without_law(self, block: Block) -> None:
        # The stage may have been replaced since the request was checked.
        can = self.capabilities
        if not can.law_preserved:
            for request in block.proposal.requests:
                if request.params.keeps_supports:
                    try:
                        check_request(request.prompt.token_ids, request.params, can)
                    except InvalidRequest as refusal:
                        request.fail(str(refusal))

    @staticmethod
    def _policies(prompts: Sequence[Prompted], params: Any) -> list[SamplingParams]:
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise InvalidRequest(f"prompts={prompts!r}, expected a list of prompts: put a single one in a list")
        if params is None:
            params = SamplingParams()
        if not isinstance(params, (SamplingParams, Sequence)):
            raise InvalidRequest(f"params={params!r}, expected SamplingParams, or a list of them")
        policies = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(policies) != len(prompts):
            raise InvalidRequest(f"{len(policies)} params for {len(prompts)} prompts, expected one for all or one each")
        for policy in policies:
            if not isinstance(policy, SamplingParams):
                raise InvalidRequest(f"params={policy!r}, expected SamplingParams")
        return policies

    def _ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets - 1

    def _admissible(self, prompt: Prompted, params: SamplingParams) -> np.ndarray:
        token_ids = token_ids_of(prompt, self.state.target)
        check_request(token_ids, params, self.capabilities)
        if isinstance(params.grammar, Grammar):
            self._grammars.compile(params.grammar)
        return token_ids

    def _enqueue(self, ticket: int, token_ids: np.ndarray, params: SamplingParams, index: int, number: int) -> None:
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        prompt = Prompt(token_ids, ticket, index, unstarted=set(range(params.n)))
        target, walk = self.state.target, self._walks(params)
        self.state.waiting.extend(
            Request(
                prompt=prompt,
                sample_index=i,
                params=params,
                params_index=number,
                seed=sample_seed,
                scanner=StopScanner(params, target.eos_token_ids, target.tokenizer),
                grammar=walk(),
            )
            for i, sample_seed in enumerate(gpu.sample_seeds(seed, params.n))
        )

    def _walks(self, params: SamplingParams) -> Callable[[], Walk | None]:
        """What makes a sample's way through its grammar, None without one; the grammar is compiled once."""
        if not isinstance(params.grammar, Grammar):
            return lambda: None
        target, compiled = self.state.target, self._grammars.compile(params.grammar)
        endings = () if params.ignore_eos else target.eos_token_ids
        return lambda: Walk(compiled, target.vocab_size, endings)

    def _collect(self, results: dict[int, list[Rollout]], progress: bool) -> None:
        open_samples = sum(request.prompt.ticket in results for request in self.state.waiting)
        tokens, started = 0, time.perf_counter()
        with tqdm(total=open_samples, disable=not progress, unit="sample") as bar:
            while open_samples:
                step = self.step()
                self._unclaimed += [rollout for request, rollout in step.ended if request.prompt.ticket not in results]
                for request, rollout in step.ended:
                    if request.prompt.ticket in results:
                        results[request.prompt.ticket].append(rollout)
                        open_samples -= 1
                        bar.update()
                tokens += step.num_tokens
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
