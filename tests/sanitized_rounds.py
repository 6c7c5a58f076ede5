"""A round of each kind, small, for whatever watches the kernels: `tests.sanitize` on a device, the simulator in CI."""

from typing import NamedTuple

from tests.backends import HOST
from tests.laws import PLACES, law_of, make_drafting
from tests.rounds import make_proposal, make_round, run_round


class Sizes(NamedTuple):
    """What a round is of."""

    batch: int
    width: int
    vocabulary: int
    dtype: str
    of_proposal: str
    order: str
    capacity: int


def run_kinds(backend, seed, sizes):
    """Its drafts without laws, with dense ones, and drawn with laws in one of their places."""
    batch, width, size, dtype, of_proposal, order, capacity = sizes
    round_ = make_round(seed, batch, width, size, dtype, num_poisoned=2)
    exact = HOST.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=size)
    for proposal in (None, make_proposal(seed, round_, exact, of_proposal)):
        run_round(backend, round_, order, capacity, 1 + size // 2, proposal)
    if width > 1:
        places = PLACES[seed % len(PLACES)]
        drafting = make_drafting(seed, batch, width - 1, size if places == "by token" else 1 + size // 2, of_proposal)
        drawn = backend.draw_drafts(
            drafting.logits, drafting.parameters, drafting.uniforms, in_turn=seed % 2 == 0, filter_order=order
        )
        run_round(backend, round_, order, capacity, 1 + size // 2, law_of(drafting, drawn, places, size))
