"""advance on any device backend: bit for bit its host twin. `up` makes an array the device's, `down` brings it back."""

import dataclasses

import numpy as np

from gpu import DECODING, FIRST, IDLE, INVALID, OK, Progress, Verdict, advance, append_tokens


def make(seed, batch, width):
    """A batch of slots in all phases, and what a round came to."""
    rng = np.random.default_rng(seed)
    longs = [rng.integers(0, 2**40, batch) for _ in range(3)]
    progress = Progress(
        phase=rng.choice([IDLE, FIRST, DECODING], batch).astype(np.int32),
        anchor=longs[0],
        start=longs[1],
        generated=longs[2],
        remaining=rng.integers(1, 2 * width + 2, batch),
        num_drafts=rng.integers(0, width, batch).astype(np.int32),
    )
    committed = rng.integers(0, width + 1, batch).astype(np.int32)
    status = np.where(committed == 0, INVALID, rng.choice([OK, OK, OK, INVALID], batch)).astype(np.uint8)
    tokens = rng.integers(0, 2**18, (batch, width)).astype(np.int32)
    tokens[np.arange(width) >= committed[:, None]] = -1
    verdict = Verdict(
        num_accepted=np.maximum(committed - 1, 0),
        num_committed=committed,
        tokens=tokens,
        logprobs=np.zeros((batch, width), np.float32),
        status=status,
        error_row=np.full(batch, -1, np.int32),
    )
    return progress, verdict


def mapped(record, change):
    """A record with every array changed."""
    return type(record)(
        **{
            field.name: change(np.array(getattr(record, field.name)))
            for field in dataclasses.fields(record)
            if getattr(record, field.name) is not None
        }
    )


def check_advance(up, down, batch=70, width=5, seed=0):
    """Every phase, and a round after the round."""
    progress, verdict = make(seed, batch, width)
    own = mapped(progress, up)
    for phase, max_drafts in ((FIRST, width - 1), (DECODING, width - 1), (DECODING, 0)):
        advance(own, mapped(verdict, up), phase, max_drafts)
        advance(progress, verdict, phase, max_drafts)
        for name, want in progress.fields().items():
            np.testing.assert_array_equal(down(getattr(own, name)), want, err_msg=name)


def make_tokens(seed, batch, width, longest):
    """make, with starts that lie in rows of so many tokens or past them, and such rows."""
    progress, verdict = make(seed, batch, width)
    rng = np.random.default_rng(seed)
    progress = dataclasses.replace(progress, start=rng.integers(-1, longest + 2, batch))
    return rng.integers(0, 9, (batch, longest)).astype(np.int32), progress, verdict


def check_append(up, down, batch=70, width=5, longest=23, seed=0):
    """Every phase."""
    tokens, progress, verdict = make_tokens(seed, batch, width, longest)
    own = up(tokens)
    for phase in (FIRST, DECODING):
        append_tokens(own, mapped(progress, up), mapped(verdict, up), phase)
        append_tokens(tokens, progress, verdict, phase)
        np.testing.assert_array_equal(down(own), tokens)
