"""The trainer's oracle: dense over the vocabulary, in extended precision, ratios and all, from the definitions.

It shares no code with the library. Extended precision (np.longdouble) because 1 - mass, at a mass near one, has few
digits left in float64; on a machine without it, it is float64.
"""

import numpy as np

FLOOR = 1e-6


def log_softmax(logits, temperature, support=None):
    """Log-probabilities [V] of one row of logits, renormalised over `support` (ids) if given; -inf outside."""
    scores = np.asarray(logits, np.longdouble)
    if support is not None:
        kept = np.zeros(scores.size, bool)
        kept[support] = True
        scores = np.where(kept, scores, -np.inf)
    # Divided last: logits of 1e30 over T would lose more digits than the differences have.
    scores = (scores - scores.max()) / np.longdouble(temperature)
    return scores - np.log(np.exp(scores).sum())


def entropy(logits, temperature, support):
    """In nats, over the support."""
    logprobs = log_softmax(logits, temperature, support)[support]
    return -(np.exp(logprobs) * logprobs).sum()


def token_gradient(logits, temperature, support, token):
    """The gradient of the token's log-probability by the logits [V]."""
    probs = np.exp(log_softmax(logits, temperature, support))
    return ((np.arange(probs.size) == token) - probs) / np.longdouble(temperature)


def entropy_gradient(logits, temperature, support):
    """The gradient of the entropy by the logits [V]: dH/ds_v = -prob_v (log prob_v + H)."""
    logprobs = log_softmax(logits, temperature, support)
    probs = np.exp(logprobs)
    finite = np.where(probs > 0, logprobs, 0)
    return -probs * (finite + entropy(logits, temperature, support)) / np.longdouble(temperature)


def weight_function(name, *bounds):
    """f of a ratio: "none", "tis" with (clip), "mis" with (low, high)."""
    if name == "none":
        return lambda ratio: np.ones_like(ratio)
    if name == "tis":
        return lambda ratio: np.minimum(ratio, np.longdouble(bounds[0]))
    low, high = bounds
    return lambda ratio: np.where((ratio >= low) & (ratio <= high), ratio, 0)


def centered(logits, temperature, token, advantage, head, head_logprobs, token_logprob, f, complete):
    """(loss, gradient [V], f(r) of the token, mass of the head under the trainer) of one token.

    head: ids; head_logprobs: the rollout's, as recorded; complete: the head is the whole support.
    """
    temperature = np.longdouble(temperature)
    trainer_logprobs = log_softmax(logits, temperature, head if complete else None)
    trainer = np.exp(trainer_logprobs)
    rollout = np.zeros(trainer.size, np.longdouble)
    rollout[head] = np.exp(np.asarray(head_logprobs, np.longdouble))
    outside = np.ones(trainer.size, bool)
    outside[head] = False
    if complete:
        rho = np.longdouble(1)  # nothing outside under either policy: both are at the floor
    else:
        rollout_tail = max(1 - rollout.sum(), np.longdouble(FLOOR))
        rho = rollout_tail / max(trainer[outside].sum(), np.longdouble(FLOOR))
    alpha = rho * f(1 / rho)
    center = np.zeros(trainer.size, np.longdouble)
    center[head] = rollout[head] * f(trainer[head] / rollout[head]) - alpha * trainer[head]
    weight = f(trainer[token] / np.exp(np.longdouble(token_logprob)))
    coefficients = weight * (np.arange(trainer.size) == token) - center
    gradient = -advantage * (coefficients - coefficients.sum() * trainer) / temperature
    used = coefficients != 0
    loss = -advantage * (coefficients[used] * trainer_logprobs[used]).sum()
    return loss, gradient, weight, trainer[head].sum()
