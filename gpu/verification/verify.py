"""Chain verification: which drafts are kept, and the token that follows them.

Row i of a request tests draft x_i, with w the weights of the row's policy, total their sum:

    target-only (x is one-hot)         accept iff u * total < w[x]; else draw from w without x
    with draft_probs (the law of x)    accept iff u * draft_probs[x] * total < w[x];
                                       else draw from trunc(max(0, w - draft_probs * total))

Row num_drafts, reached when all are accepted, draws the bonus token from w. A residual that sums to 0 (by
rounding only) draws from w. Each committed token is a sample of its row's policy, so its log-probability is
that policy's. Products are in float64, in the order written, each rounded: no fused multiply-add.
Source: Leviathan et al. 2023, algorithm 1.
"""

from gpu.arrays import Array, on_device
from gpu.support import Support
from gpu.verification import host
from gpu.verification.record import Verdict


def verify_chain(
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    draft_probs: Array | None = None,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    out: Verdict | None = None,
) -> Verdict:
    """Verify up to W-1 drafts a request against the supports of its W rows.

    logits [B, W, V]: what select_support was given as [B*W, V]. draft_tokens int32 [B, W-1]. num_drafts
    int32 [B], 0..W-1: row i tests draft i, row num_drafts draws the bonus token, later rows are never read.
    accept_uniforms, draw_uniforms float64 [B, W] in [0, 1). draft_probs [B, W-1, V] (float32, float16 or
    bfloat16 as logits): the law each draft was drawn from; None for drafts that were chosen, not drawn.
    W = 1 with num_drafts 0 is ordinary decoding. threshold_single, threshold_acc: in (0, 1]; a draft is also
    accepted where its probability is at least threshold_single, and its coin counts threshold_acc times; below 1
    the committed tokens no longer follow the policies (SGLang's acceptance thresholds).
    out: a Verdict of an earlier call of the same shapes, whose memory is used again. ValueError for wrong shapes,
    dtypes or ranges; the values of CuPy arrays aren't read: a num_drafts out of range makes its
    request INVALID, and a uniform out of range counts as the nearest in it.

    A request ends INVALID at a row that is INVALID, at a draft outside the vocabulary, and, with draft_probs,
    at a draft whose draft_prob isn't positive and finite or a residual over a negative or NaN draft_prob.
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
