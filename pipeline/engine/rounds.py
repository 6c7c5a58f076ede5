"""The device work of a round, from the draft's forward to where the next round starts. Nothing in it waits.

A round with a grammar among its requests is three such pieces: the host waits for the drafts, and makes the masks of
the rows behind them while the target runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import gpu
from model_loaders.drafts.proposal import ProposalLaw
from pipeline.arrays import array_of
from pipeline.batch.state import State
from pipeline.drafting.drawing import Drawing
from pipeline.drafting.proposer import Proposer
from pipeline.engine.adjusting import Adjusting
from pipeline.engine.branch import Branch
from pipeline.engine.features import Features
from pipeline.engine.graphs import Graphs
from pipeline.engine.histories import Histories
from pipeline.engine.outbox import DeviceOutbox, HostOutbox, Outbox, Results
from pipeline.engine.restriction import Restriction
from pipeline.engine.slots import Slots
from pipeline.stages.verify import WORKING_SUPPORT

Allowed = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Of drafts int32 [B, W - 1] and their numbers int32 [B], the masks int32 [N, ceil(V / 32)] and rows int32 [B, W] that
`gpu.restrict_logits` takes."""


@dataclass(frozen=True)
class Shape:
    """What makes two rounds the same graph.

    Attributes:
        phase: `gpu.FIRST`: the first tokens, from the logits of prefills; `gpu.DECODING`: a block a slot.
        batch: Slots 0..batch-1.
        kv_length: Keys that are read; 0 for first tokens.
        features: The parts in use.
    """

    phase: int
    batch: int
    kv_length: int
    features: Features


@dataclass
class _Workspace:
    """The memory of rounds of one phase, batch, set of records and dtype of logits."""

    drafts: torch.Tensor  # int32 [B, W - 1]
    num_drafts: torch.Tensor  # int32 [B]: how many of them are verified; zeros for first tokens
    nobody: torch.Tensor  # bool [B]: False
    accept: torch.Tensor  # float64 [B, W]
    draw: torch.Tensor
    rows: torch.Tensor  # int64 [B * W]: 0, 1, ...
    outbox: Outbox
    drawing: Drawing  # used where drafts are drawn
    restriction: Restriction | None  # where rows have masks
    support: Any = None
    next_place: int = 0


@dataclass(frozen=True)
class _Block:
    """A target's forward over anchors and drafts."""

    logits: torch.Tensor  # [B, W, V]
    features: torch.Tensor | None  # [B, W, taps * hidden]
    positions: torch.Tensor  # int64 [B, W]


@dataclass(frozen=True)
class Ticket:
    """A round on its way."""

    outbox: Outbox
    place: int

    def receive(self) -> Results:
        """Its results; waits for them, and for no later round."""
        return self.outbox.receive(self.place)


@dataclass
class Rounds:
    """Launches rounds over the slots of one pipeline.

    Attributes:
        state: The pipeline's.
        slots: Where they stand.
        first_logits: [S, 1, V]: what each slot's first token is drawn from.
        graphs: None: every round is launched piece by piece.
        adjusting: Made when the first request needs it.
        histories: The slots' tokens, for a draft that is a proposer.
    """

    state: State
    slots: Slots
    first_logits: torch.Tensor
    graphs: Graphs | None
    adjusting: Adjusting | None = None
    histories: Histories | None = field(init=False, default=None)
    _workspaces: dict[Any, _Workspace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._branch = Branch(self.slots.device)
        if isinstance(self.state.draft, Proposer):
            room = self.state.target_cache.max_length
            self.histories = Histories(self.slots.num_slots, room, self.slots.device)

    def launch(self, shape: Shape, allowed: Allowed | None = None) -> Ticket:
        """Queue a round and its way to the host.

        Args:
            shape: See there.
            allowed: Where the round is restricted: what its rows may be, asked with the drafts int32 [B, W - 1] and
                their numbers int32 [B] while the target runs.
        """
        workspace = self._workspace(shape)
        if workspace.restriction is None:
            self._run(shape, lambda: self._body(shape, workspace))
        else:
            assert allowed is not None
            self._restricted(shape, workspace, workspace.restriction, allowed)
        place, workspace.next_place = workspace.next_place, 1 - workspace.next_place
        workspace.outbox.send(place)
        return Ticket(workspace.outbox, place)

    def clear(self) -> None:
        """Give up the memory of all rounds, when no graph works in it any more."""
        if self.slots.device.type == "cuda":
            torch.cuda.synchronize(self.slots.device)  # a copy to the host may be under way
        self._workspaces.clear()

    def _run(self, key: Hashable, body: Callable[[], None]) -> None:
        if self.graphs is None:
            body()
        else:
            self.graphs.run(key, body)

    def make_adjusting(self) -> None:
        """Have memory for rounds that adjust."""
        if self.adjusting is None:
            with torch.inference_mode(False):
                self.adjusting = Adjusting(self.slots.num_slots, self.state.target.vocab_size, self.slots.device)

    def _body(self, shape: Shape, workspace: _Workspace) -> None:
        if shape.phase == gpu.FIRST:
            self._settle(shape, workspace, self.first_logits[: shape.batch], None)
        else:
            law = self._propose(shape, workspace)
            block = self._forward(shape, workspace)
            with self._branch.beside():
                self._extend(shape, block)
            self._settle(shape, workspace, block.logits, law)
            self._branch.join()

    def _restricted(self, shape: Shape, workspace: _Workspace, between: Restriction, allowed: Allowed) -> None:
        """A round in three pieces: the masks follow the drafts, and are made while the target runs."""
        if shape.phase == gpu.FIRST:
            between.logits.copy_(self.first_logits[: shape.batch])
        else:
            self._run((shape, "propose"), lambda: between.keep_law(self._propose(shape, workspace)))
            between.fetch(workspace.drafts, workspace.num_drafts)
            self._run((shape, "forward"), lambda: between.keep_logits(self._extended(shape, workspace)))
        between.put(*allowed(*between.drafts()))
        law = between.law if shape.features.draws else None
        self._run((shape, "settle"), lambda: self._settle(shape, workspace, between.logits, law))

    def _propose(self, shape: Shape, workspace: _Workspace) -> ProposalLaw | None:
        """Drafts to the workspace; what they were drawn from, or None."""
        state, batch, law = self.state, shape.batch, None
        anchors, starts = self.slots.anchors(batch), self.slots.starts(batch)
        workspace.num_drafts.copy_(self.slots.num_drafts(batch))
        if self.histories is not None:
            drafts, counts = state.draft.propose_captured(self.histories.of(batch), (starts + 1).int())
            workspace.drafts.copy_(drafts)
            torch.minimum(workspace.num_drafts, counts, out=workspace.num_drafts)
        elif state.draft is not None:
            drafted = state.draft.propose(
                anchors, starts, state.draft_cache, kv_length=shape.kv_length, draw=self._drawing(shape, workspace)
            )
            workspace.drafts.copy_(drafted.tokens)
            law = drafted.law
        return law

    def _forward(self, shape: Shape, workspace: _Workspace) -> _Block:
        """The target over anchors and drafts."""
        state, starts = self.state, self.slots.starts(shape.batch)
        ids = torch.cat((self.slots.anchors(shape.batch)[:, None], workspace.drafts.long()), dim=1)
        positions = starts[:, None] + torch.arange(ids.shape[1], device=starts.device)
        state.tap()
        output = state.target.forward(
            ids, positions, state.target_cache, kv_length=shape.kv_length, compiled=state.options.compile
        )
        return _Block(output.logits.contiguous(), output.features, positions)

    def _extend(self, shape: Shape, block: _Block) -> None:
        """What the draft takes in of a block."""
        if self.state.draft is not None:
            self.state.draft.extend(block.features, block.positions, self.state.draft_cache, kv_length=shape.kv_length)

    def _extended(self, shape: Shape, workspace: _Workspace) -> torch.Tensor:
        """Both in one piece; the logits."""
        block = self._forward(shape, workspace)
        self._extend(shape, block)
        return block.logits

    def _drawing(self, shape: Shape, workspace: _Workspace) -> Drawing | None:
        if not shape.features.draws:
            return None
        # A coin for each draft of each round, as in `pipeline.stages.draft`.
        coins, drawing = array_of(workspace.drawing.uniforms), workspace.drawing
        positions = self.slots.generated(shape.batch) * coins.shape[1]
        seeds = array_of(self.slots.seeds(shape.batch)).view("uint64")
        gpu.uniforms(seeds, array_of(positions), coins.shape[1], gpu.PROPOSAL, out=coins)
        drawing.whole_rows = shape.features.whole_rows
        return drawing

    def _settle(self, shape: Shape, workspace: _Workspace, logits: torch.Tensor, law: ProposalLaw | None) -> None:
        """Adjust, verify, capture and move on."""
        state, slots, features, outbox = self.state, self.slots, shape.features, workspace.outbox
        batch, width, vocabulary = logits.shape
        adjusting = self.adjusting if features.adjusts else None
        assert adjusting is not None or not features.adjusts
        if adjusting is not None:
            logits = adjusting.apply(logits, workspace.drafts, workspace.num_drafts, slots.generated(batch))
        seeds, positions = array_of(slots.seeds(batch)).view("uint64"), array_of(slots.generated(batch))
        accept, draw = array_of(workspace.accept), array_of(workspace.draw)
        laws = None if law is None else workspace.drawing.law(law, vocabulary)
        single, acc = features.threshold_single, features.threshold_acc
        purpose = gpu.accept_purpose(laws, threshold_single=single, threshold_acc=acc)
        gpu.uniforms(seeds, positions, width, purpose, out=accept)
        gpu.uniforms(seeds, positions, width, gpu.DRAW, out=draw)
        array = array_of(logits)
        if workspace.restriction is not None:
            workspace.restriction.restrict(array)
        temperature, top_k, top_p, min_p = map(array_of, slots.policy(batch, width))
        support, verdict, capture = gpu.run_round(
            array,
            temperature,
            top_k,
            top_p,
            min_p,
            array_of(workspace.drafts),
            array_of(workspace.num_drafts),
            accept,
            draw,
            array_of(slots.wanted(batch) if features.masks else workspace.nobody),
            state.options.max_support,
            laws,
            filter_order=state.options.filter_order,
            capacity=min(vocabulary, state.options.max_support if features.masks else WORKING_SUPPORT),
            threshold_single=single,
            threshold_acc=acc,
            whole_rows=features.whole_rows,
            out=None if outbox.records is None else (workspace.support, *outbox.records),
        )
        if outbox.records is not None:
            workspace.support = support
        top = None
        if features.top:
            rows = array_of(workspace.rows)
            top = gpu.top_logprobs(array, support, features.top, rows, out=outbox.top)
        if adjusting is not None:
            adjusting.count(verdict, slots.phases(batch), shape.phase)
        if self.histories is not None:
            histories = array_of(self.histories.of(batch))
            gpu.append_tokens(histories, slots.progress(batch), verdict, shape.phase)
        gpu.advance(slots.progress(batch), verdict, shape.phase, slots.width - 1)
        outbox.keep(verdict, capture if features.masks else None, top)

    def _workspace(self, shape: Shape) -> _Workspace:
        features = shape.features
        # Adjusted logits are float32, whatever the model's: another walk of the filter.
        key = shape.phase, shape.batch, features.masks, features.top, features.adjusts, features.restricts
        if key not in self._workspaces:
            self._workspaces[key] = self._make_workspace(shape)
        return self._workspaces[key]

    def _make_workspace(self, shape: Shape) -> _Workspace:
        batch, width, device = shape.batch, 1 if shape.phase == gpu.FIRST else self.slots.width, self.slots.device
        masks, top, target = shape.features.masks, shape.features.top, self.state.target
        room = batch * width * min(self.state.options.max_support, target.vocab_size)
        outbox: Outbox = HostOutbox() if device.type == "cpu" else DeviceOutbox(batch, width, room, top, masks)
        # Outside inference mode, so that any mode may write to them.
        with torch.inference_mode(False):
            return _Workspace(
                drafts=torch.zeros(batch, width - 1, dtype=torch.int32, device=device),
                num_drafts=torch.zeros(batch, dtype=torch.int32, device=device),
                nobody=torch.zeros(batch, dtype=torch.bool, device=device),
                accept=torch.zeros(batch, width, dtype=torch.float64, device=device),
                draw=torch.zeros(batch, width, dtype=torch.float64, device=device),
                rows=torch.arange(batch * width, device=device),
                outbox=outbox,
                drawing=Drawing(
                    lambda rows: [array_of(values) for values in self.slots.policy(batch, rows)],
                    torch.zeros(batch, width - 1, dtype=torch.float64, device=device),
                    self.state.options.filter_order,
                ),
                restriction=(
                    Restriction(batch, width, target.vocab_size, target.logits_dtype, device)
                    if shape.features.restricts
                    else None
                ),
            )
