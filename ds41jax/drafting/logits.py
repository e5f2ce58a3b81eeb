"""Logits and probabilities of drafts, kept away from 0 and 1."""

import itertools
import math
import operator
from collections.abc import Iterable

MAX_LOGIT = math.log((1 - 1e-6) / 1e-6)  # probabilities stay within [1e-6, 1 - 1e-6]


def clamp_logit(logit: float) -> float:
    """A logit of a probability within [1e-6, 1 - 1e-6]; not-a-number counts as no confidence."""
    if -MAX_LOGIT <= logit <= MAX_LOGIT:
        return logit
    return MAX_LOGIT if logit > 0 else -MAX_LOGIT


def sigmoid(logit: float) -> float:
    """The probability of a logit, within [1e-6, 1 - 1e-6]."""
    return 1.0 / (1.0 + math.exp(-clamp_logit(logit)))


def running_products(acceptances: Iterable[float]) -> list[float]:
    """Tokens that each draft of a request adds on average: the product of the conditional
    acceptances up to it (dSpark policy, objective)."""
    return list(itertools.accumulate(acceptances, operator.mul))
