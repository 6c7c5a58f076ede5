"""Penalties and bias, in place, each row on its own prefix.

Row i of request b has the request's prompt and output plus drafts 0..i-1, counted as output. For a token with
`count` occurrences in the output (in_prompt: whether it's in the prompt), in float32, in this order:

    repetition   x = x / r if x > 0 else x * r           where count > 0 or in_prompt
    frequency    x = x - frequency * count
    presence     x = x - presence                        where count > 0
    bias         x = x + bias

Definitions: repetition from Keskar et al. 2019, as in transformers and vLLM; frequency and presence from
OpenAI, output tokens only, as in vLLM. Requests with neutral parameters keep their bits.
"""

from gpu.adjust import host
from gpu.adjust.record import History, LogitBias
from gpu.arrays import Array, on_device


def adjust_logits(
    logits: Array,
    draft_tokens: Array,
    num_drafts: Array,
    *,
    history: History | None = None,
    repetition_penalty: Array | None = None,
    frequency_penalty: Array | None = None,
    presence_penalty: Array | None = None,
    logit_bias: LogitBias | None = None,
) -> None:
    """Adjust logits float32 [B, W, V] in place; rows past num_drafts are left alone.

    draft_tokens int32 [B, W-1], num_drafts int32 [B] in 0..W-1. Penalties float32 [B]: repetition > 0
    (1: neutral), frequency and presence finite (0: neutral); None is neutral for all. The history is read
    where a penalty isn't neutral; None is an empty one. ValueError for wrong shapes, dtypes or ranges.

    On a device all arrays are CuPy's, and their values aren't read before the launch: token ids outside 0..V-1 are
    skipped, and offsets past the end of the ids are cut to it, so ids and values may be longer than they are filled.
    """
    arguments = (
        logits, draft_tokens, num_drafts, history, repetition_penalty, frequency_penalty, presence_penalty, logit_bias
    )  # fmt: skip
    if on_device(logits):
        from gpu.adjust import device

        device.adjust(*arguments)
    else:
        host.adjust(*arguments)
