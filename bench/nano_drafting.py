"""Drafts of the nano model by kind of text: acceptance, confidence, and what they are worth.

    python bench/nano_drafting.py [--model DIR] [--requests 4] [--tokens 48] [--repeats 3]

Questions are held-out ones of each kind, greedy, new ones in every repeat. All ways of drafting
serve the same requests, one at a time and then all at once; the ways take turns, so that other work
on the machine slows all of them alike. Speeds are medians, ratios medians of each repeat's own, and
acceptance is that of all repeats. Prints tables and writes bench/results/nano_drafting.json.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
from pathlib import Path

import deepseek_recipe as recipe
import jax
import numpy as np

import ds41jax
from ds41jax import load_model
from ds41jax.cache.radix import Reuse
from ds41jax.drafting import make_policy
from ds41jax.engine.core import EngineCore
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Request
from ds41jax.serving.conversation import ConversationInput, render
from ds41jax.training.tasks import draw

HERE = Path(__file__).parent
NANO = Path(ds41jax.__file__).parent / "nano"
KINDS = {
    "counting": "counting",
    "JSON": "json",
    "code": "code",
    "small talk": "chat",
    "tools": "tools",
    "retrieval": "retrieval",
}
WAYS = {
    "none": None,
    "fixed 5": ("fixed", 5),
    "threshold": ("threshold", 5),
}
LONGEST_PROMPT = 900


class Way:
    """An engine with one policy, and what it was seen to do."""

    def __init__(self, model, policy, requests):
        options = EngineOptions(
            max_active=requests,
            context=1024,
            pool_tokens=1024 * requests,
            prefill_chunk=1024,
            reuse=Reuse.OFF,
        )
        if policy is None:
            options = dataclasses.replace(options, dspark=False)
        else:
            options = dataclasses.replace(options, policy=make_policy(policy[0], limit=policy[1]))
        self.core = EngineCore(model, options)
        self.core.device.warm_up(True, True)
        self.core.watched.observer = self
        self._start()
        learning = self.core.speculation.policy
        self._learn, learning.observe = learning.observe, self._observe

    def _start(self):
        self.outcomes, self.seconds, self.tokens, self.rounds = [], 0.0, 0, 0
        self._mixed = False

    def _observe(self, outcome):
        self.outcomes += outcome.requests
        self._learn(outcome)

    def prefilled(self, step):
        """The round of the same step waits for the prompt's rows too: it is not timed."""
        self._mixed = True

    def decoded(self, round):
        """Adds a round's time and tokens."""
        mixed, self._mixed = self._mixed, False
        if mixed:
            return
        self.seconds += round.times.total
        self.tokens += sum(len(request.emitted) for request in round.requests)
        self.rounds += len(round.requests)

    def serve(self, prompts, tokens, together):
        """Serves the prompts; (decode tokens/s, tokens a request and round, outcomes)."""
        self._start()
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            for ids in batch:
                request = Request(ids, tokens)
                self.core.add(self.core.preparer.sequence(request, lambda event: None))
            while self.core.step():
                pass
        return self.tokens / self.seconds, self.tokens / self.rounds, self.outcomes


def prompts(tokenizer, task, count):
    """Token ids of the prompts of held-out examples whose answers are not too short to draft."""
    found, index = [], 0
    while len(found) < count:
        example = draw("held-out", task, index)
        index += 1
        body = {
            "model": "DeepSeek-V4.1-Flash",
            "messages": example.prompt,
            "thinking": {"type": "enabled" if example.thinking else "disabled"},
        }
        body |= {"tools": example.tools} if example.tools else {}
        body |= {"response_format": example.response_format} if example.response_format else {}
        ids = render(ConversationInput(recipe.ChatCompletionRequest, body)).encode(tokenizer)
        if len(ids) <= LONGEST_PROMPT and len(json.dumps(example.answer)) > 60:
            found.append(tuple(ids))
    return found


def acceptance(outcomes):
    """Shares of verified drafts accepted, and by position beside the confidence in them."""
    verified = sum(o.length for o in outcomes)
    positions = []
    for place in range(max((o.length for o in outcomes), default=0)):
        reached = [o for o in outcomes if o.reached > place]
        sure = [1 / (1 + np.exp(-o.draft.confidence_logits[place])) for o in reached]
        met = [o.accepted > place for o in reached]
        positions.append(
            {
                "reached": len(reached),
                "accepted": round(float(np.mean(met)), 4),
                "confidence": round(float(np.mean(sure)), 4),
            }
        )
    accepted = sum(o.accepted for o in outcomes)
    share = round(accepted / verified, 4) if verified else None
    return {"verified": verified, "accepted": accepted, "share": share, "positions": positions}


def measure(ways, asked, args):
    """Rows by kind, number at once and way, and each way's acceptance over all kinds."""
    rows, whole = [], {name: [] for name in ways}
    for kind, ids in asked.items():
        for together in (False, True):
            seen = {name: [] for name in ways}
            for repeat in range(args.repeats):
                served = ids[repeat * args.requests : (repeat + 1) * args.requests]
                for name, way in ways.items():
                    seen[name].append(way.serve(served, args.tokens, together))
            plain = [rate for rate, _, _ in seen["none"]]
            here = []
            for name, runs in seen.items():
                rates = [rate for rate, _, _ in runs]
                ratios = [rate / base for rate, base in zip(rates, plain, strict=True)]
                here.append(
                    {
                        "kind": kind,
                        "at_once": args.requests if together else 1,
                        "way": name,
                        "tokens_per_second": round(statistics.median(rates), 1),
                        "runs": [round(rate, 1) for rate in rates],
                        "ratio": round(statistics.median(ratios), 3),
                        "tokens_per_round": round(statistics.mean(each for _, each, _ in runs), 3),
                        **acceptance([o for _, _, outcomes in runs for o in outcomes]),
                    }
                )
                if not together:
                    whole[name] += [o for _, _, outcomes in runs for o in outcomes]
            print_rows(here)
            rows += here
    return rows, {name: acceptance(outcomes) for name, outcomes in whole.items() if outcomes}


def print_rows(rows):
    """One line a way: speed, and acceptance by position beside the confidence."""
    print(f"\n{rows[0]['kind']}, {rows[0]['at_once']} at once")
    for row in rows:
        places = "  ".join(f"{p['accepted']:.2f} ({p['confidence']:.2f})" for p in row["positions"])
        share = "" if row["share"] is None else f"{row['share']:6.1%}"
        print(
            f"{row['way']:10}{row['tokens_per_second']:9.1f} tok/s{row['ratio']:7.2f}x"
            f"{row['tokens_per_round']:6.2f} tok/round {share:>7}  {places}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--requests", type=int, default=4, help="at once")
    parser.add_argument("--tokens", type=int, default=48, help="most of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "nano_drafting.json")
    args = parser.parse_args()
    began = os.getloadavg()[0]
    model = load_model(args.model)
    asked = {
        kind: prompts(model.tokenizer, task, args.requests * args.repeats)
        for kind, task in KINDS.items()
    }
    ways = {name: Way(model, policy, args.requests) for name, policy in WAYS.items()}
    rows, whole = measure(ways, asked, args)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": args.model.name,
        "requests_of_a_kind": args.requests * args.repeats,
        "tokens_at_most": args.tokens,
        "median_of": args.repeats,
        "load_average": [round(began, 1), round(os.getloadavg()[0], 1)],
        "all_kinds": whole,
        "rows": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
