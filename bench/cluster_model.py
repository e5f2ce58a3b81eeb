"""What the published cluster would do with our overheads: a small discrete-event model of decoding.

One coordinator (one or two cards) and its expert workers; every lane goes through the layers one
after the other and waits for its experts, while the other lane computes. Workers answer one frame
at a time. Constants are the published ones unless marked as ours; `bench/README.md` says what the
result is worth.

    python bench/cluster_model.py [--exchange-us 20] [--host-ms 1.3] [--out FILE]
"""

import argparse
import heapq
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, CHOICES, ROWS = 40, 384, 6, 6
DENSE_BYTES = 8e9  # of a step, read once whatever its rows
CARD_BANDWIDTH = 1.2e12  # published prior of an RTX PRO 6000
SECOND_CARD = 1.35  # published two-card target-only steps against one, beside fewer remote layers
WORKER_FLOOR, WORKER_EXPERT = (
    160e-6,
    22e-6,
)  # a frame; a distinct expert's TP4 slice, a 16-row group
LOCAL_FLOOR, LOCAL_EXPERT, LOCAL_ROW = 160e-6, 36e-6, 6.6e-6
EMITTED = 5.6  # tokens a round; counting accepts nearly every draft (assumed)
DRAFT = 7.36e-3 / 2  # a round's drafting; the published profile is from before it was halved
WIRE = 25e9  # bytes a second a rank: 200 Gbit/s
OUT_BYTES, BACK_BYTES = 5392, 10240

PUBLISHED = {  # counting, tokens/s of all requests at concurrency 1, 2, 4, 8, 16
    ("TP4EP1", 2): (229.9, 345.6, 532.1, 814.4, 1272.0),
    ("TP2EP2", 2): (229.3, 347.4, 516.5, 794.2, 1231.6),
    ("TP3EP2", 2): (245.7, 359.0, 588.5, 954.0, 1410.7),
    ("TP2EP3", 2): (241.5, 393.3, 614.9, 909.5, 1407.4),
    ("TP3EP2", 1): (161.6, 288.9, 484.5, 732.3, 1200.5),
}
LOCAL_LAYERS = {1: 5, 2: 20}
CONCURRENCY = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """TP ranks in each of EP groups, with one or two cards before them."""

    tp: int
    ep: int
    cards: int


@dataclass(frozen=True)
class Ours:
    """What we measured: one exchange without compute, and the host's part of a round of 16."""

    exchange: float
    host: float


def distinct(rows: int, spread: float) -> float:
    """Experts that a layer's rows choose: all alike at spread 0, all different at 1."""
    return min(float(EXPERTS), CHOICES * rows**spread)


def worker_seconds(rows: int, layout: Layout, spread: float) -> float:
    """A rank's compute for a frame: its share of the columns, its group's share of the experts."""
    experts = distinct(rows, spread)
    tiles = max(1.0, rows * CHOICES / experts / 16)  # of 16 rows, each reads the weights again
    return WORKER_FLOOR + WORKER_EXPERT * 4 / layout.tp * experts / layout.ep * tiles


def wire_seconds(rows: int) -> float:
    return rows * (OUT_BYTES + BACK_BYTES) / WIRE


def local_seconds(rows: int, layout: Layout, spread: float) -> float:
    moved = LOCAL_EXPERT * distinct(rows, spread) + LOCAL_ROW * rows
    return LOCAL_FLOOR + moved / layout.cards


def round_seconds(requests: int, layout: Layout, ours: Ours, spread: float) -> float:
    """A verification round of ROWS rows a request, in one lane or two."""
    lanes = [requests] if requests == 1 else [requests - requests // 2, requests // 2]
    dense = DENSE_BYTES / CARD_BANDWIDTH / LAYERS
    if layout.cards == 2:
        dense /= SECOND_CARD
    first = LOCAL_LAYERS[layout.cards]
    free_card = free_workers = 0.0
    ready = [(0.0, lane, 0) for lane in range(len(lanes))]
    heapq.heapify(ready)
    end = 0.0
    while ready:
        at, lane, layer = heapq.heappop(ready)
        rows = ROWS * lanes[lane]
        start = max(at, free_card)
        free_card = start + dense
        if layer < first:
            free_card += local_seconds(rows, layout, spread)
            done = free_card
        else:
            sent = max(free_card, free_workers)
            free_workers = sent + worker_seconds(rows, layout, spread)
            done = free_workers + wire_seconds(rows) + ours.exchange
        end = max(end, done)
        if layer + 1 < LAYERS:
            heapq.heappush(ready, (done, lane, layer + 1))
    return end + DRAFT + ours.host * requests / 16


def fitted_spread(ours: Ours) -> float:
    """By bisection: rounds get slower as rows choose more different experts."""
    low, high = 0.0, 1.0
    wanted = EMITTED / PUBLISHED["TP4EP1", 2][0]
    for _ in range(50):
        middle = (low + high) / 2
        slow = round_seconds(1, Layout(4, 1, 2), ours, middle) > wanted
        low, high = (low, middle) if slow else (middle, high)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchange-us", type=float, default=20.0, help="ours, compute excluded")
    parser.add_argument("--host-ms", type=float, default=1.3, help="ours, a round of 16 requests")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ours = Ours(args.exchange_us * 1e-6, args.host_ms * 1e-3)
    spread = fitted_spread(ours)
    print(f"spread of the routes, so that TP4EP1 with two cards meets its C1: {spread:.3f}")
    print(f"{'layout':<10}{'cards':>6}" + "".join(f"{f'C{c}':>18}" for c in CONCURRENCY))
    records: list[dict[str, Any]] = []
    for (name, cards), published in PUBLISHED.items():
        layout = Layout(int(name[2]), int(name[5]), cards)
        made = [c * EMITTED / round_seconds(c, layout, ours, spread) for c in CONCURRENCY]
        cells = [f"{m:8.0f} ({p:6.0f})" for m, p in zip(made, published, strict=True)]
        print(f"{name:<10}{cards:>6}" + "".join(f"{cell:>18}" for cell in cells))
        records.append({"layout": name, "cards": cards, "model": made, "published": published})
    if args.out:
        facts = {"spread": spread, "emitted": EMITTED, "ours": asdict(ours), "records": records}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
