"""Penalties and bias, each row on its own prefix.

Row i of request b has the request's prompt and output plus drafts 0..i-1, counted as output. For a token with
`count` occurrences in the output (in_prompt: whether it's in the prompt), in float32, in this order:

    repetition   x = x / r if x > 0 else x * r           where count > 0 or in_prompt
    frequency    x = x - frequency * count
    presence     x = x - presence                        where count > 0
    bias         x = x + bias
    ban          x = -inf                                where it ends the output and generated + i < min_new_tokens

Definitions: repetition from Keskar et al. 2019, as in transformers and vLLM; frequency and presence from
OpenAI, output tokens only, as in vLLM. Requests with neutral parameters keep their bits. A ban leaves NaN and +inf as
they are, because a row that has one has no policy.

What has been seen comes in one of two forms. A `History` and a `LogitBias` list tokens (CSR): they are made for a call,
and cost what they list. A `SlotHistory` has a word and a bias for every token: it grows where it is, and it alone has
the ban.
"""

from gpu.adjust import host, slots_host
from gpu.adjust.record import History, LogitBias, SlotHistory
from gpu.arrays import Array, on_device


def adjust_logits(
    logits: Array,
    draft_tokens: Array,
    num_drafts: Array,
    *,
    history: History | SlotHistory | None = None,
    repetition_penalty: Array | None = None,
    frequency_penalty: Array | None = None,
    presence_penalty: Array | None = None,
    logit_bias: LogitBias | None = None,
    out: Array | None = None,
) -> None:
    """Adjust logits [B, W, V]; rows past num_drafts stay as they are.

    draft_tokens int32 [B, W-1], num_drafts int32 [B] in 0..W-1. Penalties float32 [B]: repetition > 0
    (1: neutral), frequency and presence finite (0: neutral); None is neutral for all. The history is read
    where a penalty isn't neutral; None is an empty one. ValueError for wrong shapes, dtypes or ranges.

    Logits are float32 and changed in place, or with a SlotHistory also float16 or bfloat16 (ml_dtypes', or its bits as
    uint16), with `out`, float32 [B, W, V]: there all rows are written, and the logits are only read. A SlotHistory has
    biases of its own, so it comes without a logit_bias; its words and biases aren't checked.

    On a device all arrays are CuPy's, and their values aren't read before the one launch: token ids outside 0..V-1 are
    skipped, and offsets past the end of the ids are cut to it, so ids and values may be longer than they are filled.
    """
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    if isinstance(history, SlotHistory):
        if logit_bias is not None:
            raise ValueError("logit_bias=LogitBias, expected None with a SlotHistory, which has the biases")
        _adjust_slots(logits, draft_tokens, num_drafts, history, penalties, out)
        return
    if out is not None:
        raise ValueError(f"out={type(out).__name__}, expected None without a SlotHistory: logits are changed in place")
    if on_device(logits):
        from gpu.adjust import device

        device.adjust(logits, draft_tokens, num_drafts, history, *penalties, logit_bias)
    else:
        host.adjust(logits, draft_tokens, num_drafts, history, *penalties, logit_bias)


def _adjust_slots(
    logits: Array,
    draft_tokens: Array,
    num_drafts: Array,
    history: SlotHistory,
    penalties: tuple[Array | None, Array | None, Array | None],
    out: Array | None,
) -> None:
    if out is None:
        dtype = getattr(logits, "dtype", None)
        if dtype != "float32":
            raise ValueError(f"logits.dtype={dtype}, expected float32, or float32 memory in out")
        out = logits
    if on_device(logits):
        from gpu.adjust import slots_device

        slots_device.adjust(logits, draft_tokens, num_drafts, history, *penalties, out)
    else:
        slots_host.adjust(logits, draft_tokens, num_drafts, history, *penalties, out)
