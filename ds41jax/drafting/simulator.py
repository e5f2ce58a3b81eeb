"""Rounds of requests on a made-up machine, to compare policies where no machine is.

Lanes are processes that take turns on two things, the coordinator and the workers, so that two
lanes overlap as they do in the real system. Requests never end: results are those of a steady
state, counted after a warm-up.
"""

import heapq
import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds41jax.drafting.content import Content, RouteWalk
from ds41jax.drafting.costs import LayerCost, RoundCost
from ds41jax.drafting.policy import Policy, RequestDraft, RequestId, RequestOutcome, RoundOutcome
from ds41jax.drafting.trace import TraceWriter
from ds41jax.drafting.traffic import expert_groups, push_routes

LANE_REQUESTS = 8
COORDINATOR, WORKERS = 0, 1

Turns = Generator[tuple[int, float], float, None]  # (whose turn, its time) -> when it ended


@dataclass
class SimRequest:
    """A request that goes on for ever."""

    request_id: RequestId
    content: Content
    walk: RouteWalk
    history: np.ndarray | None = None


@dataclass
class SimResult:
    """Totals after the warm-up.

    Attributes:
      time_us: simulated time; tokens: emitted in it.
      lengths: how often 0, 1, ... 7 drafts were verified.
    """

    time_us: float = 0.0
    tokens: int = 0
    request_rounds: int = 0
    verified: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * 8)

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * self.tokens / self.time_us

    @property
    def acceptance(self) -> float:
        """Accepted per verified draft."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted per request and round."""
        return self.tokens / self.request_rounds

    @property
    def drafts_per_round(self) -> float:
        """Verified per request and round."""
        return self.verified / self.request_rounds

    def add(self, outcome: RoundOutcome) -> None:
        for request in outcome.requests:
            self.tokens += 1 + request.accepted
            self.request_rounds += 1
            self.verified += request.length
            self.accepted += request.accepted
            self.lengths[request.length] += 1


class Simulation:
    """One policy serving requests on one deployment."""

    def __init__(
        self,
        policy: Policy,
        cost: RoundCost,
        contents: Sequence[Content],
        *,
        seed: int = 0,
        trace: TraceWriter | None = None,
    ):
        """
        Args:
          contents: one per concurrent request; more than one request make two lanes.
          trace: takes every round.
        """
        self.policy, self.cost, self.trace = policy, cost, trace
        seeds = np.random.SeedSequence(seed).spawn(len(contents) + 1)
        self._rng = np.random.default_rng(seeds[-1])
        requests = [
            SimRequest(n, content, RouteWalk(np.random.default_rng(seeds[n]), len(cost.layers)))
            for n, content in enumerate(contents)
        ]
        count = 1 if len(requests) == 1 else 2
        self._lanes = [requests[n::count] for n in range(count)]
        if max(map(len, self._lanes)) > LANE_REQUESTS:
            raise ValueError(f"{len(contents)} requests: at most {LANE_REQUESTS} a lane")
        self._finished: list[tuple[float, RoundOutcome]] = []

    def run(self, rounds: int, warmup: int = 60) -> SimResult:
        """Runs until the lanes together have done `warmup` and then `rounds` rounds."""
        free = [0.0, 0.0]
        order = itertools.count()
        waiting: list[tuple[float, int, Turns, tuple[int, float]]] = []
        for lane in self._lanes:
            turns = self._lane(lane)
            heapq.heappush(waiting, (0.0, next(order), turns, next(turns)))
        while len(self._finished) < warmup + rounds:
            ready, _, turns, (whose, us) = heapq.heappop(waiting)
            free[whose] = max(ready, free[whose]) + us
            heapq.heappush(waiting, (free[whose], next(order), turns, turns.send(free[whose])))
        return self._result(warmup)

    def _result(self, warmup: int) -> SimResult:
        result = SimResult()
        for _, outcome in self._finished[warmup:]:
            result.add(outcome)
        start = self._finished[warmup - 1][0] if warmup else 0.0
        result.time_us = self._finished[-1][0] - start
        return result

    def _lane(self, lane: Sequence[SimRequest]) -> Turns:
        """One lane's rounds, one after another."""
        shared = len(self._lanes) > 1
        now = 0.0
        while True:
            start = now
            hopes = [RequestDraft(r.request_id, self.policy.limit, (), r.history) for r in lane]
            width = self.policy.choose_width(hopes, shared=shared)
            blocks = [r.content.draft(self._rng, width) for r in lane]
            drafts = [
                RequestDraft(r.request_id, width, logits, r.history)
                for r, (logits, _) in zip(lane, blocks, strict=True)
            ]
            drafted = yield COORDINATOR, self.cost.draft_us(width)
            lengths = self.policy.choose(drafts, shared=shared)
            routes = [r.walk.step(1 + k) for r, k in zip(lane, lengths, strict=True)]
            groups = expert_groups(np.concatenate(routes), lane[0].walk.num_experts)
            rows = len(lane) + sum(lengths)
            layer_us, now = yield from self._target(drafted, groups, rows)
            now = yield COORDINATOR, self._residual(len(lane), sum(lengths))
            requests = tuple(
                _verify(request, draft, length, right, used, self.cost.timed)
                for request, draft, length, (_, right), used in zip(
                    lane, drafts, lengths, blocks, routes, strict=True
                )
            )
            outcome = RoundOutcome(
                requests,
                total_us=now - start,
                shared=shared,
                layer_us=layer_us if self.cost.timed else None,
                layer_groups=groups if self.cost.timed else None,
                width=width,
                draft_us=drafted - start,
            )
            self._finish(now, outcome)

    def _target(
        self, now: float, groups: Sequence[int], rows: int
    ) -> Generator[tuple[int, float], float, tuple[tuple[float, ...], float]]:
        """The layers of a pass; returns the time of each and when the last ended."""
        times = []
        fixed, per_row = self.cost.attention
        for layer, count in zip(self.cost.layers, groups, strict=True):
            before = now
            yield COORDINATOR, fixed + per_row * rows
            now = yield WORKERS if layer.remote else COORDINATOR, self._noisy(layer, count, rows)
            times.append(now - before)
        return tuple(times), now

    def _noisy(self, layer: LayerCost, groups: int, rows: int) -> float:
        factor = 1 + self.cost.jitter * self._rng.standard_normal()
        return layer.us(groups, rows) * max(factor, 0.5)

    def _residual(self, requests: int, drafts: int) -> float:
        fixed, per_row, per_request = self.cost.round
        stall = self.cost.stall_us if self._rng.random() < self.cost.stalls else 0.0
        return fixed + per_row * (requests + drafts) + per_request * requests + stall

    def _finish(self, now: float, outcome: RoundOutcome) -> None:
        self.policy.observe(outcome)
        if self.trace is not None:
            self.trace.write(outcome)
        self._finished.append((now, outcome))


def _verify(
    request: SimRequest,
    draft: RequestDraft,
    length: int,
    right: Sequence[bool],
    rows: np.ndarray,
    routes_seen: bool,
) -> RequestOutcome:
    """Accepts drafts up to the first wrong one and moves the request on."""
    accepted = next((n for n in range(length) if not right[n]), length)
    request.walk.commit(rows[accepted])
    if routes_seen:
        request.history = push_routes(request.history, rows, 1 + accepted)
    return RequestOutcome(draft, length, accepted, routes=rows if routes_seen else None)


def simulate(
    policy: Policy,
    cost: RoundCost,
    contents: Sequence[Content],
    *,
    rounds: int = 400,
    warmup: int = 60,
    seed: int = 0,
) -> SimResult:
    """Serves one request per content for some rounds; the policy learns while it runs."""
    return Simulation(policy, cost, contents, seed=seed).run(rounds, warmup)
