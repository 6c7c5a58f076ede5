"""Verification: which drafts are kept, and the token that follows them.

Row i of a request with drafts x_0..x_{D-1} has the policy behind the drafts before x_i: weights w_i, total_i their sum;
q_i is the law that x_i was drawn from. Products and quotients are in float64, in the order written, each rounded: no
fused multiply-add.

**Draft by draft**, where the drafts were chosen (no laws: each counts as one-hot), and wherever a threshold is below 1.
Row i tests x_i, until the first that isn't kept:

    x_i was chosen       accept iff u_i * total_i < w_i[x_i]; else draw from w_i without x_i
    x_i was drawn        accept iff u_i * q_i[x_i] * total_i < w_i[x_i]; else draw from
                         trunc(max(0, w_i - q_i * total_i))

Row D, reached when all are accepted, draws the bonus token from w_D. u_i is accept_uniforms[i].
Source: Leviathan et al. 2023, algorithm 1.

**As a block**, where the drafts have laws. A draft more likely under its policy than under its law makes up for one
before it that was less likely:

    s_0 = 1,  s_{i+1} = min(1, s_i * (w_i[x_i] / (q_i[x_i] * total_i)))              the scale of row i
    r_i = trunc(max(0, s_i * w_i - q_i * total_i)),  R_i its sum                     what is left of row i
    h_0 = 1,  h_i = min(s_i, R_i / (R_i + (1 - s_i) * total_i)),  h_D = s_D          the bound of row i

The largest i with u_i < h_i is how many drafts are accepted; u_i is accept_uniforms[i-1], of the row that tests
x_{i-1}. The token behind them is drawn from r_i if i < D, from w_D if i = D. A bound isn't computed where u_i isn't
below s_i, which is the larger. Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2. In expectation it accepts at
least as many drafts as the other rule.

Either way a residual that sums to 0 (by rounding only) draws from w, and the claim is the same: **given the tokens
before it, the next committed token has the law w_i / total_i**, accepted and drawn ones pooled, so its log-probability
is that policy's. For blocks (after their appendix), up to the rounding of weights and of R to integers: let A_i be the
event that x_0..x_{i-1} were drawn and at least i drafts are accepted. P(A_i | x_0..x_{i-1} drawn) = s_i, from the last
row to the first: it is h_D = s_D at row D. Before that, i + 1 or more are accepted with probability
sum_x q_i[x] * s_{i+1}(x) = sum_x min(q_i[x], s_i * p_i[x]) = s_i - R_i / total_i, where p_i = w_i / total_i; else the
coin decides, which adds (1 - s_i + R_i / total_i) * h_i = R_i / total_i. And of A_i the part whose next token is y is
min(q_i[y], s_i * p_i[y]), accepted, plus max(0, s_i * p_i[y] - q_i[y]), drawn: s_i * p_i[y]. Nothing in it asks for
rows of one depth: where row i is the last one (h_i = s_i, drawn from w_i) may depend on the drafts before x_i, and on
whatever doesn't depend on x_i and later drafts.

It does ask for coins that nothing has looked at: bounds of rows that aren't reached have been held against theirs, so
the next round must toss others. `gpu.accept_purpose` says which coins a call takes.
"""

from gpu.arrays import Array, on_device
from gpu.proposal.record import LogitsLaw
from gpu.random.parameters import ACCEPT, ACCEPT_BLOCK
from gpu.support import Support
from gpu.verification import host
from gpu.verification.record import Verdict
from gpu.verification.rule import verifies_block


def accept_purpose(
    draft_probs: Array | LogitsLaw | None, *, threshold_single: float = 1.0, threshold_acc: float = 1.0
) -> int:
    """The purpose of the accept_uniforms that verify_chain takes with these arguments: it is that of the rule.

    ACCEPT: draft by draft, a coin a position. ACCEPT_BLOCK: as a block, coins of the round.
    """
    return ACCEPT_BLOCK if verifies_block(draft_probs, threshold_single, threshold_acc) else ACCEPT


def verify_chain(
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    draft_probs: Array | LogitsLaw | None = None,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    out: Verdict | None = None,
) -> Verdict:
    """Verify up to W-1 drafts a request against the supports of its W rows: as a block if they have laws.

    logits [B, W, V]: what select_support was given as [B*W, V]. draft_tokens int32 [B, W-1]. num_drafts
    int32 [B], 0..W-1: row i tests draft i, row num_drafts draws the bonus token, later rows are never read.
    accept_uniforms, draw_uniforms float64 [B, W] in [0, 1): `gpu.uniforms` with the purposes accept_purpose(...) and
    DRAW. draft_probs [B, W-1, V] (float32, float16 or bfloat16 as logits): the law each draft was drawn from; None for
    drafts that were chosen, not drawn.
    W = 1 with num_drafts 0 is ordinary decoding. threshold_single, threshold_acc: in (0, 1]; a draft is also
    accepted where its probability is at least threshold_single, and its coin counts threshold_acc times; below 1
    drafts are verified one by one, and the committed tokens no longer follow the policies (SGLang's acceptance
    thresholds).
    out: a Verdict of an earlier call of the same shapes, whose memory is used again. ValueError for wrong shapes,
    dtypes or ranges; the values of CuPy arrays aren't read: a num_drafts out of range makes its
    request INVALID, and a uniform out of range counts as the nearest in it.

    A request ends INVALID at a row that is INVALID, at a draft outside the vocabulary, and, with draft_probs,
    at a draft whose draft_prob isn't positive and finite or a residual over a negative or NaN draft_prob; the drafts
    before it are committed if they are accepted. To a block such a row j is the last one: its bound is s_j. A law that
    only the residual finds bad has that bound too, but ends the request only if a token would be drawn from it.
    """
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value}, expected a number above 0 and at most 1")
    arguments = (
        logits, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs,
        float(threshold_single), float(threshold_acc),
    )  # fmt: skip
    if on_device(logits):
        from gpu.verification import device

        return device.verify(*arguments, out)
    return host.verify(*arguments, out)
