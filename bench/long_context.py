"""A prompt of 64K tokens through the engine on this machine: prefill, decode, resume.

    python bench/long_context.py [--tokens 65536]

The tiny checkpoint of the tests. Checks that resuming the prompt from its snapshot gives the same
tokens, and that a longer prompt resumes where the first ended. Prints a table and writes
bench/results/long_context.json.
"""

import argparse
import json
import platform
import resource
import time
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from ds41jax import load_model
from ds41jax.cache.radix import Reuse
from ds41jax.engine.core import EngineCore
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Request, Started, Token

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "long_context.json"
TINY = HERE.parent / "tests" / "golden" / "tiny"


def serve(core, ids, tokens, bar=None):
    """Seconds to the first token, seconds of decoding, cached tokens, and the tokens."""
    events = []
    sequence = core.preparer.sequence(Request(tuple(ids), tokens, ignore_eos=True), events.append)
    core.add(sequence)
    start = time.perf_counter()
    while not any(isinstance(e, Token) for e in events):
        core.step()
        if bar is not None:
            bar.update(sequence.length - bar.n)
    first = time.perf_counter()
    while core.step():
        pass
    made = [e.token_id for e in events if isinstance(e, Token)]
    cached = next(e.cached_tokens for e in events if isinstance(e, Started))
    return first - start, time.perf_counter() - first, cached, made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--answer", type=int, default=16)
    args = parser.parse_args()
    model = load_model(TINY)
    room = 256
    core = EngineCore(
        model,
        EngineOptions(
            max_active=1,
            context=args.tokens + room,
            pool_tokens=3 * (args.tokens + room),
            retained=2,
            reuse=Reuse.EXACT,
            snapshot_every=args.tokens,
        ),
    )
    ids = np.random.default_rng(0).integers(10, 500, args.tokens).tolist()
    with tqdm(total=args.tokens, unit="token", desc="prefill") as bar:
        prefill, decode, _, answer = serve(core, ids, args.answer, bar)
    again = serve(core, ids, args.answer)
    assert again[2] == args.tokens and again[3] == answer, "resuming changed the tokens"
    longer = serve(core, [*ids, *answer, 11, 12, 13], args.answer)
    assert longer[2] >= args.tokens, "a longer prompt did not resume"
    core.check()
    report = {
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}",
        "prompt_tokens": args.tokens,
        "prefill_tokens_per_second": args.tokens / prefill,
        "decode_tokens_per_second": (args.answer - 1) / decode,
        "resumed_first_token_seconds": again[0],
        "longer_prompt_first_token_seconds": longer[0],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "note": "compilation included in the first prefill and decode",
    }
    print(json.dumps(report, indent=1))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
