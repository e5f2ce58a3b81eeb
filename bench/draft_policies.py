"""Draft policies in the simulator: tokens per second, acceptance, and the cost of a decision.

    python bench/draft_policies.py [--rounds 400] [--output bench/results/draft_policies.json]

Prints tables and writes JSON. Speeds are simulated from published latencies (see
`ds41jax/drafting/costs.py`), not measured; only the microseconds per decision are this machine's.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from ds41jax.drafting import RequestDraft, RequestOutcome, RoundOutcome, expert_groups, make_policy
from ds41jax.drafting.content import published_contents
from ds41jax.drafting.costs import RoundCost, one_coordinator, single_device, two_devices
from ds41jax.drafting.policy import Policy
from ds41jax.drafting.simulator import simulate

REQUESTS = 16


def policies(cost: RoundCost) -> dict[str, Policy]:
    """The arms of the comparison, fresh."""
    placement = cost.placement
    return {
        "fixed 3": make_policy("fixed", limit=3),
        "fixed 5": make_policy("fixed", limit=5),
        "threshold": make_policy("threshold", limit=5),
        "suffix": make_policy("suffix", limit=5),
        "balance": make_policy("balance", placement=placement),
        "balance, probing": make_policy("balance", placement=placement, probe_rounds=64),
    }


def compare(cost: RoundCost, rounds: int) -> list[dict]:
    """One row per content (alone, and several at once) and policy.

    Rounds of many requests say more, so fewer of them are run.
    """
    by_name = {c.name: c for c in published_contents()}
    cells = [(name, [content]) for name, content in by_name.items()]
    cells += [(f"{name} x4", [by_name[name]] * 4) for name in ("code", "topic")]
    cells += [("topic x16", [by_name["topic"]] * 16)]
    cells += [("mixed x16", list(by_name.values())[:8] * 2)]
    rows = []
    for name, served in cells:
        for label, policy in policies(cost).items():
            result = simulate(policy, cost, served, rounds=rounds // min(len(served), 4))
            rows.append(
                {
                    "deployment": cost.name,
                    "content": name,
                    "concurrency": len(served),
                    "policy": label,
                    "tokens_per_second": round(result.tokens_per_second, 1),
                    "acceptance_percent": round(100 * result.acceptance, 2),
                    "tokens_per_round": round(result.tokens_per_round, 3),
                    "drafts_per_round": round(result.drafts_per_round, 3),
                    "prediction": policy.stats().get("prediction"),
                }
            )
    return rows


def print_table(rows: list[dict]) -> None:
    labels = list(dict.fromkeys(r["policy"] for r in rows))
    print(f"\n{rows[0]['deployment']}: simulated tok/s (accepted %; drafts verified a round)")
    print(f"{'content':16}" + "".join(f"{label:>22}" for label in labels))
    for content in dict.fromkeys(r["content"] for r in rows):
        line = f"{content:16}"
        for r in rows:
            if r["content"] == content:
                line += (
                    f"{r['tokens_per_second']:10.1f} ({r['acceptance_percent']:4.1f};"
                    f"{r['drafts_per_round']:4.2f})"
                )
        print(line)


def routed(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return rng.integers(384, size=(tokens, 40, 6))


def decision_costs(repeats: int = 60) -> dict[str, dict[str, float]]:
    """Median microseconds of `choose` and `observe` for 16 requests with 5 drafts each."""
    rng = np.random.default_rng(0)
    placed = two_devices()
    arms = {
        "fixed": (make_policy("fixed", limit=5), False),
        "threshold": (make_policy("threshold", limit=5), False),
        "suffix": (make_policy("suffix", limit=5), False),
        "balance, whole rounds": (make_policy("balance"), False),
        "balance, layers and routes": (make_policy("balance", placement=placed.placement), True),
    }
    costs = {}
    for name, (policy, layered) in arms.items():
        chosen, observed = [], []
        for _ in range(repeats):
            lane = [
                RequestDraft(n, 5, tuple(rng.normal(1, 2, 5)), routed(rng, 24) if layered else None)
                for n in range(REQUESTS)
            ]
            start = time.perf_counter()
            lengths = policy.choose(lane)
            chosen.append(time.perf_counter() - start)
            outcome = made_up_round(lane, lengths, rng, layered)
            start = time.perf_counter()
            policy.observe(outcome)
            observed.append(time.perf_counter() - start)
        half = repeats // 2  # the balance policy is warm by then
        costs[name] = {
            "choose_us": round(1e6 * statistics.median(chosen[half:]), 1),
            "observe_us": round(1e6 * statistics.median(observed[half:]), 1),
        }
    return costs


def made_up_round(
    lane: list[RequestDraft], lengths: list[int], rng: np.random.Generator, layered: bool
) -> RoundOutcome:
    """A round in which about half of the drafts are right."""
    requests = tuple(
        RequestOutcome(
            draft, k, int(rng.integers(k + 1)), routes=routed(rng, 1 + k) if layered else None
        )
        for draft, k in zip(lane, lengths, strict=True)
    )
    rows = len(lane) + sum(lengths)
    if not layered:
        return RoundOutcome(requests, 20_000.0 + 2500 * rows)
    groups = expert_groups(np.concatenate([r.routes for r in requests]), 384)
    layer_us = tuple(260.0 + 4 * rows + 22.0 * g for g in groups)
    return RoundOutcome(requests, 4000.0 + sum(layer_us), False, layer_us, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400, help="measured rounds of one request")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "draft_policies.json"
    )
    options = parser.parse_args()
    tables = []
    deployments = (one_coordinator(), two_devices(), single_device())
    with ProcessPoolExecutor(2) as pool:
        for rows in pool.map(compare, deployments, [options.rounds] * len(deployments)):
            print_table(rows)
            tables += rows
    costs = decision_costs()
    print(f"\nmicroseconds a round for {REQUESTS} requests with 5 drafts (choose, observe)")
    for name, row in costs.items():
        print(f"{name:28}{row['choose_us']:10.1f}{row['observe_us']:10.1f}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"simulated": True, "rounds": options.rounds, "cells": tables, "decision": costs}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
