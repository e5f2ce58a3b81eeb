"""The bandwidth-balance policy: as many tokens per time as the fitted costs promise (dSpark
policy).

Maximises expected tokens over predicted time of the round. The time model, the calibration of the
drafter's confidence and the novelty of experts are all learnt while it runs; until its time model
is warm it verifies everything, which is what warms it.

What it is told decides how finely it prices a row. With layer times, groups and routes, a draft
that reuses the experts of other rows is cheaper than one that does not. Without them (an engine
whose round is one device program: `Placement()`) the round's regression on rows and requests stands
alone: every row costs the same, so lengths follow confidence and the row price only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds41jax.drafting.calibration import PlattScale, acceptances, lane_acceptances
from ds41jax.drafting.logits import running_products
from ds41jax.drafting.placement import Placement
from ds41jax.drafting.policy import (
    MAX_DRAFTS,
    Policy,
    PolicyState,
    RequestDraft,
    RequestId,
    RequestOutcome,
    RoundOutcome,
)
from ds41jax.drafting.probe import ProbeState
from ds41jax.drafting.search import Shape, best_even_shape, best_shape
from ds41jax.drafting.time_model import ROUND_PRIOR, PredictionStats, TimeModel, new_time_model
from ds41jax.drafting.traffic import NOVELTY_START, LaneTraffic, update_novelty
from ds41jax.drafting.width import NARROW, WIDE, WidthState


@dataclass
class BalanceState(PolicyState):
    """Everything learnt. `solo` and `shared` are the regimes of a lane alone and beside another."""

    solo: TimeModel = field(default_factory=lambda: new_time_model(Placement()))
    shared: TimeModel = field(default_factory=lambda: new_time_model(Placement()))
    calibration: list[PlattScale] = field(
        default_factory=lambda: [PlattScale() for _ in range(MAX_DRAFTS)]
    )
    calibrated_confidence: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFTS)
    novelty: list[float] = field(default_factory=list)
    width: WidthState = field(default_factory=WidthState)
    probe: ProbeState = field(default_factory=ProbeState)
    prediction: PredictionStats = field(default_factory=PredictionStats)
    selected_rounds: int = 0


class BalancePolicy(Policy):
    """See the module."""

    name = "balance"
    state: BalanceState

    def __init__(
        self,
        limit: int = NARROW,
        placement: Placement | None = None,
        *,
        select_width: bool = False,
        round_prior: tuple[float, float, float] = ROUND_PRIOR,
        probe_rounds: int = 0,
    ):
        """
        Args:
          limit: most drafts of a request, 1 to 7.
          placement: the timed layers; without it only whole rounds are.
          select_width: choose 5 or 7 drafts each round; needs limit 7 and measured draft times.
          round_prior: microseconds per round, row and request, before anything is measured.
          probe_rounds: verify a position again that was declined for so many rounds; 0, as
            published, never does.
        """
        if select_width and limit != WIDE:
            raise ValueError(f"width selection needs draft limit {WIDE}, not {limit}")
        if probe_rounds < 0 or len(round_prior) != 3 or min(round_prior) < 0:
            raise ValueError(f"probe_rounds {probe_rounds}, round_prior {round_prior}: negative")
        self.placement = placement or Placement()
        self.probe_rounds = probe_rounds
        self.select_width = select_width
        models = [new_time_model(self.placement, round_prior) for _ in range(2)]
        novelty = [NOVELTY_START] * (max(self.placement.layers, default=-1) + 1)
        super().__init__(limit, BalanceState(solo=models[0], shared=models[1], novelty=novelty))

    def choose_width(self, lane: Sequence[RequestDraft], *, shared: bool = False) -> int:
        if not self.select_width:
            return self.limit
        model, state = self._model(shared), self.state.width
        due = state.due(warm=model is not None)
        if due is not None or model is None or not lane:
            return due or NARROW
        narrow, wide = (
            self._search(
                model,
                lane,
                [running_products(state.guess(r.request_id)[: min(r.available, w)]) for r in lane],
                w,
            )
            for w in (NARROW, WIDE)
        )
        return WIDE if wide.rate > narrow.rate else NARROW

    def _choose(self, lane: Sequence[RequestDraft], shared: bool) -> list[int]:
        counts = [min(r.available, self.limit) for r in lane]
        model = self._model(shared)
        if model is None:
            return counts
        gains = self._gains(lane, counts)
        width = max(len(r.confidence_logits) for r in lane)
        lengths = list(self._search(model, lane, gains, width).lengths)
        if self.probe_rounds:
            return self.state.probe.extend(lengths, gains, self.probe_rounds)
        return lengths

    def predict_us(
        self,
        lane: Sequence[RequestDraft],
        lengths: Sequence[int],
        *,
        shared: bool = False,
        width: int = 0,
    ) -> float | None:
        """Predicted time of a round of that shape, draft included; None until warm."""
        model = self._model(shared)
        if model is None:
            return None
        rows = sum(lengths) * model.row_us(self.placement)
        total = self._base_us(model, len(lane), width) + rows
        if not self.placement.classes:
            return total
        traffic = self._traffic(model, lane, lengths)
        for request, length in enumerate(lengths):
            for _ in range(length):
                traffic.add(request)
        return total + traffic.total_us

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns from a finished round.

        Raises:
          ValueError: if width selection is on and the drafter's time is missing, or a layer of the
            placement has no entry.
        """
        self._check(outcome)
        super().observe(outcome)
        self._judge_prediction(outcome)
        self._learn_times(outcome)
        self.state.probe.add(outcome)
        for request in outcome.requests:
            self._learn_acceptance(request)
            if self.state.novelty and request.routes is not None:
                committed = request.routes[: 1 + request.accepted]
                update_novelty(self.state.novelty, request.draft.routes, committed)

    def forget(self, request_id: RequestId) -> None:
        self.state.width.requests.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        state = self.state
        common = super().stats()
        for row, scale, total in zip(
            common["confidence_reliability"],
            state.calibration,
            state.calibrated_confidence,
            strict=True,
        ):
            row["mean_confidence"] = total / row["reached"] if row["reached"] else None
            row["logit_slope"], row["logit_offset"] = scale.slope, scale.offset
        classes = {c.name: c for c in self.placement.classes}
        local, remote = classes.get("local"), classes.get("remote")
        return {
            **common,
            "local_layers": len(local.layers) if local else 0,
            "remote_expert_bytes": remote.expert_bytes if remote else None,
            "selected_rounds": state.selected_rounds,
            "draft_widths": [NARROW, WIDE] if self.select_width else [self.limit],
            "time_bias_us": {"solo": state.solo.bias_us, "shared": state.shared.bias_us},
            "prediction": state.prediction.stats(),
            "solo": state.solo.stats(self.placement),
            "shared": state.shared.stats(self.placement),
        }

    def _model(self, shared: bool) -> TimeModel | None:
        """The regime's model if warm, else the other's if warm."""
        own, other = self.state.solo, self.state.shared
        if shared:
            own, other = other, own
        return own if own.warm else other if other.warm else None

    def _base_us(self, model: TimeModel, requests: int, width: int) -> float:
        draft_us = model.draft_us(requests, width == WIDE) if self.select_width and width else 0.0
        return model.base_us(requests, self.placement) + draft_us

    def _traffic(
        self, model: TimeModel, lane: Sequence[RequestDraft], lengths: Sequence[int]
    ) -> LaneTraffic:
        return LaneTraffic(lane, lengths, self.placement, model.us_per_mb, self.state.novelty)

    def _search(
        self,
        model: TimeModel,
        lane: Sequence[RequestDraft],
        gains: Sequence[Sequence[float]],
        width: int,
    ) -> Shape:
        """The best shape given the expected tokens that each request's drafts add."""
        base_us = self._base_us(model, len(lane), width)
        row_us = model.row_us(self.placement)
        if not self.placement.classes:
            return best_even_shape(gains, base_us, row_us)
        traffic = self._traffic(model, lane, [len(g) for g in gains])
        return best_shape(gains, base_us, row_us, traffic)

    def _gains(self, lane: Sequence[RequestDraft], counts: Sequence[int]) -> list[list[float]]:
        """Expected tokens of each draft by its calibrated acceptance; beyond the trained block by
        counts where they exist."""
        logits = [r.logits(k) for r, k in zip(lane, counts, strict=True)]
        believed = lane_acceptances(self.state.calibration, logits)
        if self.select_width:
            for request, own in zip(lane, believed, strict=True):
                late = own[NARROW:]
                late[:] = self.state.width.beyond(request.request_id)[: len(late)]
        gains: list[list[float]] = np.cumprod(believed, axis=1).tolist()
        return [own[:k] for own, k in zip(gains, counts, strict=True)]

    def _check(self, outcome: RoundOutcome) -> None:
        if self.select_width and outcome.width and outcome.draft_us is None:
            raise ValueError("width selection needs draft_us of every drafted round")
        timed = None if outcome.layer_us is None else len(outcome.layer_us)
        if timed is not None and timed <= max(self.placement.layers, default=-1):
            raise ValueError(f"layer_us has {timed} entries, the placement names further layers")

    def _judge_prediction(self, outcome: RoundOutcome) -> None:
        """Compares the round with what the model, as it was, makes of its shape."""
        lane = [r.draft for r in outcome.requests]
        model = self._model(outcome.shared)
        if model is None or not lane:
            return
        self.state.selected_rounds += 1
        lengths = [r.length for r in outcome.requests]
        predicted = self.predict_us(lane, lengths, shared=outcome.shared, width=outcome.width)
        if predicted is None or not outcome.total_us:
            return
        self.state.prediction.add(outcome.total_us, predicted)
        # A prediction borrowed from the other regime does not contain this one's bias.
        if model is (self.state.shared if outcome.shared else self.state.solo):
            model.correct(outcome.total_us, predicted)

    def _learn_times(self, outcome: RoundOutcome) -> None:
        model = self.state.shared if outcome.shared else self.state.solo
        if self.select_width and outcome.width and outcome.draft_us is not None:
            self.state.width.used(outcome.width)
            model.observe_draft(len(outcome.requests), outcome.width == WIDE, outcome.draft_us)
            model.observe(outcome, self.placement, apart_us=outcome.draft_us)
        else:
            model.observe(outcome, self.placement)

    def _learn_acceptance(self, request: RequestOutcome) -> None:
        state, logits = self.state, request.draft.confidence_logits
        if not logits:
            return
        needed = request.draft.available if self.select_width else request.reached
        believed = acceptances(state.calibration, logits[:needed])
        if self.select_width:
            state.width.add(request, believed)
        for n in range(request.reached):
            state.calibrated_confidence[n] += believed[n]
            state.calibration[n].update(logits[n], n < request.accepted)
