"""The oracle: slow, obvious, float64, written from the definitions. It shares no code with the library.

Where a float64 mass lies within BORDER of its threshold, the library's own rounding may decide otherwise; the
oracle says so (`borderline`), and tests then leave that comparison out.
"""

import math
from dataclasses import dataclass, field

import numpy as np

BORDER = 1e-6
OK, OVERFLOW, INVALID = 0, 1, 2


def decode(logits):
    """float64 values of float32, float16 or bfloat16 (as uint16 bits) logits."""
    if logits.dtype == np.uint16:
        return (logits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return logits.astype(np.float64)


@dataclass
class Policy:
    valid: bool
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # bool [V]
    probs: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [V]
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [V], -inf outside
    greedy: bool = False
    borderline: bool = False


def policy(logits, temperature, top_k, top_p, min_p=0.0, filter_order="top_k_first"):
    """The final policy of one row of float64 logits."""
    if np.isnan(logits).any() or (logits == np.inf).any() or not np.isfinite(logits).any():
        return Policy(False)
    size = logits.size
    if np.float32(temperature) < np.float32(1e-5) or top_k == 1:
        kept = np.arange(size) == np.flatnonzero(logits == logits.max())[0]
        return Policy(True, kept, kept.astype(float), np.where(kept, 0.0, -np.inf), True)
    scaled = (logits - logits.max()) / float(temperature)
    mass = np.exp(scaled)
    values, where = np.unique(logits, return_inverse=True)  # ascending; -0.0 and 0.0 are one value
    count = np.bincount(where, minlength=values.size)
    count_above = np.append(np.cumsum(count[::-1])[::-1][1:], 0)
    kept_value = values > -np.inf
    if 0 < top_k < size:
        kept_value &= count_above < top_k
    mass_of_value = np.bincount(where, weights=mass, minlength=values.size)
    mass_above = np.append(np.cumsum(mass_of_value[::-1])[::-1][1:], 0.0)
    borderline = False
    if top_p < 1:
        whole = mass_of_value[kept_value].sum() if filter_order == "top_k_first" else mass_of_value.sum()
        distance = (mass_above - float(top_p) * whole) / whole
        borderline |= bool((np.abs(distance[kept_value]) < BORDER).any())
        kept_value &= distance < 0
    if min_p > 0:
        least = logits.max() + float(temperature) * math.log(float(min_p))
        kept_value &= values >= least
        borderline |= bool((np.abs(values - least) <= BORDER * max(1e-30, abs(least))).any())
    kept = kept_value[where]
    total = mass[kept].sum()
    return Policy(
        True,
        kept,
        np.where(kept, mass / total, 0.0),
        np.where(kept, scaled - math.log(total), -np.inf),
        False,
        borderline,
    )


def draw(mass, uniform):
    """(token, borderline): the first id whose cumulative mass exceeds uniform * total, of positive mass."""
    cdf = np.cumsum(mass)
    target = uniform * cdf[-1]
    found = np.flatnonzero((cdf > target) & (mass > 0))
    token = found[0] if found.size else np.flatnonzero(mass > 0)[-1]
    return int(token), bool((np.abs(cdf - target)[mass > 0] < BORDER * cdf[-1]).any())


@dataclass
class Verdict:
    tokens: list
    num_accepted: int
    status: int = OK
    error_row: int = -1
    borderline: bool = False


def verify(policies, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs=None):
    """One request: policies of its rows, and what it commits. Drafts with laws are a block."""
    if draft_probs is not None and len(draft_tokens):
        return verify_block(policies, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs)
    tokens, borderline = [], False
    for i in range(num_drafts + 1):
        row = policies[i]
        if not row.valid:
            return Verdict(tokens, len(tokens), INVALID, i, borderline)
        borderline |= row.borderline
        if i == num_drafts:
            token, close = draw(row.probs, draw_uniforms[i])
            return Verdict([*tokens, token], len(tokens), OK, -1, borderline | (close and not row.greedy))
        draft = draft_tokens[i]
        if not 0 <= draft < row.probs.size:
            return Verdict(tokens, len(tokens), INVALID, i, borderline)
        kept = row.probs[draft]
        borderline |= bool(kept > 0 and abs(accept_uniforms[i] - kept) < BORDER)
        if accept_uniforms[i] < kept:
            tokens.append(int(draft))
            continue
        if row.greedy:
            return Verdict([*tokens, int(row.probs.argmax())], len(tokens), OK, -1, borderline)
        residual = np.where(np.arange(row.probs.size) == draft, 0, row.probs)
        if residual.sum() < 100 * BORDER:
            borderline = True  # little more than rounding is left
        token, close = draw(residual if residual.sum() > 0 else row.probs, draw_uniforms[i])
        return Verdict([*tokens, token], len(tokens), OK, -1, borderline | close)
    raise AssertionError("unreachable")


def verify_block(policies, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs):
    """Sun et al. 2024, algorithm 2, for one request; a row that can't be used is the last."""
    scale, borderline = 1.0, False
    for i in range(num_drafts + 1):
        row, usable = policies[i], policies[i].valid
        borderline |= row.borderline
        coin = accept_uniforms[i - 1] if i else 0.0
        tested = usable and i < num_drafts
        if tested:
            draft, law = draft_tokens[i], draft_probs[i].astype(float)
            usable = tested = 0 <= draft < law.size and 0 < law[draft] < np.inf
        left, bound, sound = (row.probs if usable else None), scale, usable
        if tested:
            sound = bool((law[row.kept] >= 0).all())
            left = np.where(row.kept, np.maximum(scale * row.probs - np.where(row.kept, law, 0.0), 0.0), 0.0)
            chance = left.sum() + (1 - scale)
            if sound and scale < 1:
                bound = left.sum() / chance
                borderline |= bool(abs(coin - bound) < BORDER * (1 + 1 / max(chance, BORDER)))
        borderline |= bool(0 < scale < 1 and abs(coin - scale) < BORDER)
        if coin < bound or i == 0:
            accepted, from_row, of_row, good = i, left, row, sound
        if not usable:
            break
        if tested:
            scale = min(1.0, scale * row.probs[draft] / law[draft])
    tokens = [int(token) for token in draft_tokens[:accepted]]
    if not good:
        return Verdict(tokens, accepted, INVALID, accepted, borderline)
    borderline |= bool(from_row.sum() < 100 * BORDER and not of_row.greedy)
    token, close = draw(from_row if from_row.sum() > 0 else of_row.probs, draw_uniforms[accepted])
    return Verdict([*tokens, token], accepted, OK, -1, borderline | (close and not of_row.greedy))


def capture(policies, num_committed, status, max_support):
    """One wanted request: (status, failed row or -1, [(ids, logprobs)] of its committed rows before that)."""
    masks = []
    for i in range(num_committed):
        ids = np.flatnonzero(policies[i].kept)
        if ids.size > max_support:
            return OVERFLOW, i, masks
        masks.append((ids, policies[i].logprobs[ids]))
    return (INVALID, num_committed, masks) if status == INVALID else (OK, -1, masks)


def top_logprobs(row, logits, k):
    """Ids and log-probabilities of the k most probable tokens: logit descending, id ascending."""
    ids = [i for i in np.lexsort((np.arange(logits.size), -logits)) if row.kept[i]][:k]
    pad = k - len(ids)
    return np.array(ids + [-1] * pad), np.array([row.logprobs[i] for i in ids] + [-np.inf] * pad)


def adjust(logits, prompt, output, repetition, frequency, presence, bias, banned=()):
    """Penalties, bias and banned tokens of one row, in float32 like the library; prompt and output are token lists."""
    adjusted = logits.copy()
    for token in sorted(set(prompt) | set(output)):
        count = output.count(token)
        x = adjusted[token]
        if repetition != 1:
            x = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
        if count:
            x = np.float32(x - np.float32(np.float32(frequency) * np.float32(count)))
            x = np.float32(x - np.float32(presence))
        adjusted[token] = x
    for token, value in bias:
        with np.errstate(invalid="ignore"):  # inf - inf
            adjusted[token] = np.float32(adjusted[token] + np.float32(value))
    for token in banned:
        if not np.isnan(adjusted[token]) and adjusted[token] != np.inf:
            adjusted[token] = -np.inf
    return adjusted


def restrict(logits, mask):
    """A row with -inf where bit t % 32 of word t // 32 of the mask is 0, but for NaN and +inf."""
    restricted = logits.copy()
    for token in range(logits.size):
        word = int(mask[token // 32]) & 0xFFFFFFFF
        if not word >> (token % 32) & 1 and not np.isnan(logits[token]) and logits[token] != np.inf:
            restricted[token] = -np.inf
    return restricted


def lookup(tokens, num_drafts, max_ngram, min_ngram):
    """Drafts by what followed the longest, then latest, earlier occurrence of the last tokens; [] without one."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):  # ends before `end`; the last tokens themselves don't count
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                drafts = list(tokens[end:])
                while len(drafts) < num_drafts:  # the period goes on
                    drafts.append(drafts[len(drafts) - (len(tokens) - end)])
                return drafts[:num_drafts]
    return []


def philox(counter, key):
    """Philox4x32-10 on Python integers."""
    mask = 0xFFFFFFFF
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & mask, (first >> 32) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def uniform(seed, position, purpose, place=0):
    words = philox([position & 0xFFFFFFFF, position >> 32, purpose, place], [seed & 0xFFFFFFFF, seed >> 32])
    return (words[0] + 0.5) / 2**32
