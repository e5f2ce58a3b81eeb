"""Policies by name."""

import inspect
from typing import Any

from ds41jax.drafting.balance import BalancePolicy
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.drafting.policy import Policy
from ds41jax.drafting.suffix import SuffixPolicy
from ds41jax.drafting.threshold import ThresholdPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FixedPolicy, ThresholdPolicy, SuffixPolicy, BalancePolicy)
}


def make_policy(name: str, **options: Any) -> Policy:
    """A fresh policy: "fixed", "threshold", "suffix" or "balance".

    Args:
      options: as its class takes them: `limit` (1 to 7) for all; `threshold`, `mode`; `costs_us`;
        `placement`, `select_width`, `round_prior`, `probe_rounds`.

    Raises:
      ValueError: for an unknown name or option, or a value out of range.
    """
    if name not in POLICIES:
        raise ValueError(f"draft policy {name!r}: expected one of {', '.join(POLICIES)}")
    known = list(inspect.signature(POLICIES[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"draft policy {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}"
        )
    policy: Policy = POLICIES[name](**options)
    return policy
