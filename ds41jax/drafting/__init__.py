"""How many drafts to verify: policies, their estimators, traces and a simulator. No device code."""

from ds41jax.drafting.placement import (
    LayerClass,
    Placement,
    expert_bytes,
    local_layers,
    remote_layers,
)
from ds41jax.drafting.policy import Policy, RequestDraft, RequestOutcome, RoundOutcome
from ds41jax.drafting.registry import make_policy
from ds41jax.drafting.trace import TraceWriter, read_meta, read_rounds, replay
from ds41jax.drafting.traffic import expert_groups, push_routes

__all__ = [
    "LayerClass",
    "Placement",
    "Policy",
    "RequestDraft",
    "RequestOutcome",
    "RoundOutcome",
    "TraceWriter",
    "expert_bytes",
    "expert_groups",
    "local_layers",
    "make_policy",
    "push_routes",
    "read_meta",
    "read_rounds",
    "remote_layers",
    "replay",
]
