"""Verification of drafts as a block: the law by enumeration, of the rule and of what the kernels make of it.

Trees of 2 tokens and 3 drafts, every shape of them: where a node is the last row depends on the drafts before it.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from gpu import ACCEPT, ACCEPT_BLOCK, DRAW, accept_purpose, uniforms
from model_loaders.training.acceptance import accept_block
from tests import naive, naive_lengths
from tests.backends import HOST
from tests.test_gpu_verify import select
from tests.test_lengths import Pair

SIZE, DRAFTS = 2, 3
NEARLY_1 = 1 - 2**-53


def shapes(depth=0):
    """Every tree as a dictionary from tokens to trees; {} for a node that tests no draft."""
    if depth == DRAFTS:
        return [{}]
    deeper = shapes(depth + 1)
    return [{}, *({0: a, 1: b} for a in deeper for b in deeper)]


def length_in(shape):
    """How many of a tuple of drafts a tree verifies."""

    def length_of(drafts):
        node, length = shape, 0
        while node:
            node, length = node[drafts[length]], length + 1
        return length

    return length_of


class Binary(Pair):
    """Random laws over two tokens, some of them near each other, some certain."""

    def law(self, who, prefix):
        numbers = np.random.default_rng([self.seed, len(prefix), *prefix])
        kind, own, other = numbers.integers(4), numbers.random(2), numbers.random(2)
        if who == 2:
            own = {0: own, 1: own * [1, 1 + 0.05 * other[0]], 2: other, 3: other}[int(kind)]
        elif kind == 2:
            own = np.array([1.0, 0.0])
        return own / own.sum()


def test_the_law_of_every_tree():
    trees = shapes()
    assert len(trees) == 26
    for tree, seed in itertools.product(trees, range(6)):
        pair = Binary(seed)
        law = naive_lengths.committed_law(
            pair.target, pair.draft, length_in(tree), DRAFTS, SIZE, naive_lengths.as_block
        )
        assert np.abs(law - naive_lengths.target_law(pair.target, DRAFTS + 1, SIZE)).max() < 1e-12


def test_a_block_keeps_at_least_as_many():
    """In expectation, and more wherever a draft can make up for another."""
    more = 0
    for seed, (size, kind) in itertools.product(range(20), [(2, Binary), (3, Pair)]):
        pair = kind(seed)
        by_draft, block = (
            naive_lengths.expected_kept(pair.target, pair.draft, DRAFTS, size, rule)
            for rule in (naive_lengths.draft_by_draft, naive_lengths.as_block)
        )
        assert block > by_draft - 1e-12
        more += block > by_draft + 1e-3
    assert more > 20


def block_of(pair, drafts):
    """Logits [N, W, V] and laws [N, W - 1, V] of rows along each of the N tuples of drafts, float32."""
    with np.errstate(divide="ignore"):
        logits = np.log([[pair.target(row[:k]) for k in range(DRAFTS + 1)] for row in drafts])
    laws = [[pair.draft(row[:k]) for k in range(DRAFTS)] for row in drafts]
    return logits.astype(np.float32), np.array(laws, np.float32)


@pytest.mark.parametrize(("kind", "size", "seed"), [(Binary, 2, 0), (Binary, 2, 1), (Binary, 2, 2), (Pair, 3, 3)])
def test_the_law_of_what_the_kernels_commit(backend, kind, size, seed):
    """Bounds as they are, and draws by a grid of coins, along every chain of drafts and at every length."""
    pair, grid = kind(seed), 200
    drafts = list(itertools.product(range(size), repeat=DRAFTS))
    logits, laws = block_of(pair, drafts)
    draw = (np.arange(grid) + 0.5) / grid
    for length in range(1, DRAFTS + 1):
        rows = len(drafts) * (length + 1) * grid
        each = np.repeat(np.arange(len(drafts)), (length + 1) * grid)
        kept = np.tile(np.repeat(np.arange(length + 1), grid), len(drafts))
        accept = np.where(np.arange(DRAFTS + 1) < kept[:, None], 0.0, NEARLY_1)  # coin k - 1 is that of k drafts
        coins = accept, np.tile(draw, rows // grid)[:, None].repeat(DRAFTS + 1, 1)
        num = np.full(rows, length, np.int32)
        support = select(backend, logits[each])
        tokens = np.array(drafts, np.int32)[each]
        verdict = backend.verify_chain(logits[each], support, tokens, num, *coins, laws[each])
        bounds = np.array([verdict.bounds[each == n].min(0) for n in range(len(drafts))])  # of coins of 0
        for n, chain in enumerate(drafts):
            outcomes = naive_lengths.as_block(pair.target, pair.draft, chain[:length])
            for k, want in enumerate(outcomes):
                own = (each == n) & (kept == k) & (verdict.num_accepted == k)
                chance = bounds[n, k] * np.prod(1 - bounds[n, k + 1 : length + 1])
                assert abs(chance - want.sum()) < 2e-6
                if own.any() and want.sum() > 1e-6:
                    share = np.bincount(verdict.tokens[own, k], minlength=size) / own.sum()
                    assert np.abs(share - want / want.sum()).max() < 1.01 / grid
                    assert (verdict.tokens[own, :k] == chain[:k]).all()


def test_blocks_near_their_policies_are_the_oracles(backend):
    """Where a coin is often between a bound and a scale, and a draw between two scales."""
    blocks, size = 1000, 5
    rng = np.random.default_rng(19)
    target, law = (rng.dirichlet(np.ones(size), (blocks, DRAFTS + 1)) for _ in range(2))
    logits = np.log(target).astype(np.float32)
    laws = (0.6 * target + 0.4 * law)[:, :-1].astype(np.float32)
    drafts = (laws.cumsum(-1) < rng.random((blocks, DRAFTS, 1))).sum(-1).clip(max=size - 1).astype(np.int32)
    coins = rng.random((2, blocks, DRAFTS + 1))
    num = rng.integers(0, DRAFTS + 1, blocks).astype(np.int32)
    verdict = backend.verify_chain(logits, select(backend, logits), drafts, num, *coins, laws)
    compared = 0
    for b in range(blocks):
        policies = [naive.policy(row, 1.0, 0, 1.0) for row in logits[b].astype(float)]
        want = naive.verify(policies, drafts[b], num[b], coins[0][b], coins[1][b], laws[b])
        compared += not want.borderline
        assert want.borderline or verdict.tokens[b, : verdict.num_committed[b]].tolist() == want.tokens
    assert compared > 0.9 * blocks


def test_the_purpose_of_the_coins_is_that_of_the_rule():
    assert accept_purpose(None) == ACCEPT
    assert accept_purpose(np.zeros((1, 1, 2), np.float32)) == ACCEPT_BLOCK
    assert accept_purpose(np.zeros((1, 1, 2), np.float32), threshold_acc=0.9) == ACCEPT


TRIALS, FALSE_ALARM = 40_000, 1e-6


class Tables:
    """The laws of a pair after every prefix of up to DRAFTS tokens, by the prefix's number; 0 is the empty one."""

    def __init__(self, pair, size):
        prefixes = [p for k in range(DRAFTS + 1) for p in itertools.product(range(size), repeat=k)]
        place = {prefix: n for n, prefix in enumerate(prefixes)}
        self.after = np.array([[place.get((*p, token), 0) for token in range(size)] for p in prefixes])  # beyond: any
        self.target, self.draft = (
            np.array([law(p) for p in prefixes], np.float32) for law in (pair.target, pair.draft)
        )

    def propose(self, nodes, rng):
        """Drafts int32 [n, DRAFTS] behind prefixes [n], and the prefixes of their rows [n, DRAFTS + 1]."""
        drafts, rows = [], [nodes]
        for _ in range(DRAFTS):
            law = self.draft[rows[-1]]
            drafts.append((law.cumsum(-1) < rng.random((len(nodes), 1))).sum(-1).clip(max=law.shape[1] - 1))
            rows.append(self.after[rows[-1], drafts[-1]])
        return np.stack(drafts, 1).astype(np.int32), np.stack(rows, 1)


def outputs(purpose):
    """Counts of what rounds of 3 drafts make of TRIALS seeds, DRAFTS + 1 tokens of 3, and their law.

    The accept coins are of this purpose.
    """
    pair, size = Pair(8), 3
    tables, shape = Tables(pair, size), (size,) * (DRAFTS + 1)
    seeds, rng = np.arange(TRIALS, dtype=np.uint64), np.random.default_rng(17)
    tokens, lengths = np.zeros((TRIALS, 2 * DRAFTS + 2), np.int32), np.zeros(TRIALS, np.int64)
    nodes = np.zeros(TRIALS, np.int64)
    while (running := np.flatnonzero(lengths <= DRAFTS)).size:
        drafts, rows = tables.propose(nodes[running], rng)
        coins = (uniforms(seeds[running], lengths[running], DRAFTS + 1, which) for which in (purpose, DRAW))
        logits, num = np.log(tables.target[rows]), np.full(running.size, DRAFTS, np.int32)
        verdict = HOST.verify_chain(logits, select(HOST, logits), drafts, num, *coins, tables.draft[rows[:, :-1]])
        for k in range(DRAFTS + 1):
            some = running[verdict.num_committed > k]
            token = verdict.tokens[verdict.num_committed > k, k]
            tokens[some, lengths[some]] = token
            nodes[some] = tables.after[nodes[some], token]
            lengths[some] += 1
    counts = np.bincount(np.ravel_multi_index(tokens[:, : DRAFTS + 1].T, shape), minlength=size ** (DRAFTS + 1))
    return counts, naive_lengths.target_law(pair.target, DRAFTS + 1, size).ravel()


def test_a_coin_must_not_be_tossed_twice():
    """With a coin a position, a round would test drafts by coins that the round before has seen: the law is off.

    Chi-square at a fixed seed; a sound one fails with probability 1e-6 under another.
    """
    for purpose, sound in ((ACCEPT_BLOCK, True), (ACCEPT, False)):
        counts, law = outputs(purpose)
        assert (law * TRIALS).min() > 1
        assert (stats.chisquare(counts, law * TRIALS).pvalue > FALSE_ALARM) == sound


def test_the_trainers_report_counts_what_a_block_keeps():
    """Its own verification, in torch: the mean of drafts kept within 5 standard deviations, one in a million."""
    pair, rng = Pair(6), np.random.default_rng(18)
    tables = Tables(pair, 3)
    drafts, rows = tables.propose(np.zeros(TRIALS, np.int64), rng)
    p, q = tables.target[rows], tables.draft[rows[:, :-1]]
    ratios = np.take_along_axis(p[:, :-1] / q, drafts[..., None].astype(np.int64), -1)[..., 0]
    arrays = p, q, ratios, rng.random((TRIALS, DRAFTS)).astype(np.float32)
    kept, scale = (tensor.numpy() for tensor in accept_block(*map(torch.from_numpy, arrays)))
    by_draft, block = (
        naive_lengths.expected_kept(pair.target, pair.draft, DRAFTS, 3, rule)
        for rule in (naive_lengths.draft_by_draft, naive_lengths.as_block)
    )
    tolerance = 5 * kept.std() / TRIALS**0.5
    assert block - by_draft > 2 * tolerance
    assert abs(kept.mean() - block) < tolerance
    want = np.ones(TRIALS, np.float32)
    for k in range(DRAFTS):
        want = np.where(k < kept, np.minimum(1, want * ratios[:, k]), want)
    np.testing.assert_allclose(scale[:, 0], want, rtol=1e-6)
