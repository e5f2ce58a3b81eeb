"""Generation: drafts change nothing, seeds repeat, faults are one clear message."""

import dataclasses

import numpy as np
import pytest
from oracle import recorded

import ds41jax.engine.generate as loop
from ds41jax import GenerateOptions, SamplingParams, generate, stream_text
from ds41jax.engine import steps
from ds41jax.engine.session import Prompt, Session

GREEDY = GenerateOptions(max_tokens=24)
SEEDED = dataclasses.replace(GREEDY, sampling=SamplingParams(temperature=0.7, top_p=0.9, seed=11))


def undrafted(options):
    return dataclasses.replace(options, dspark=False)


@pytest.fixture(scope="module")
def runs():
    return recorded("tiny_runs")


@pytest.mark.parametrize("name", ["p20", "p33", "b13"])
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_change_no_token(model, runs, name, options):
    ids = runs[f"{name}.input_ids"].tolist()
    drafted = generate(ids, model, options)
    plain = generate(ids, model, undrafted(options))
    assert drafted.token_ids == plain.token_ids
    assert drafted.progress.drafted > 0 and plain.progress.drafted == 0


def test_accepted_drafts_save_passes(model, runs):
    """Some drafts of this network are accepted, and each saves a pass."""
    total = [
        generate(runs[f"{n}.input_ids"].tolist(), model, GREEDY).progress
        for n in ("p20", "p33", "p64", "b13", "b27")
    ]
    accepted = sum(p.accepted for p in total)
    assert accepted > 0
    assert sum(p.rounds for p in total) == sum(p.tokens - 1 for p in total) - accepted


def test_equal_seeds_repeat_and_others_differ(model, runs):
    ids = runs["p20.input_ids"].tolist()
    other = dataclasses.replace(
        SEEDED, sampling=SamplingParams(temperature=0.7, top_p=0.9, seed=12)
    )
    first = generate(ids, model, SEEDED).token_ids
    assert first == generate(ids, model, SEEDED).token_ids
    assert first != generate(ids, model, other).token_ids


def test_exact_and_bounded_prefill_differ_only_past_the_window(model, runs):
    ids = runs["p33.input_ids"]
    window = model.config.sliding_window
    for length, equal in ((window, True), (33, False)):
        logits = [
            Session(model, 64).prefill(Prompt.of_text(ids[:length]), bounded=b)[-1].logits
            for b in (True, False)
        ]
        assert np.array_equal(*logits) == equal


def test_max_tokens_are_never_exceeded(model, runs):
    ids = runs["p20.input_ids"].tolist()
    for count in (1, 2, 7):
        made = generate(ids, model, GenerateOptions(max_tokens=count))
        assert len(made.token_ids) == count and made.finish_reason == "length"


def test_the_end_token_ends_the_turn(model, runs, monkeypatch):
    ids, end = runs["p20.input_ids"].tolist(), model.config.eos_token_id
    full = generate(ids, model, GREEDY).token_ids

    def choose(logits, sampling, index):
        return np.where(
            np.arange(index, index + len(logits)) == 5, end, original(logits, sampling, index)
        )

    original = loop._choose
    monkeypatch.setattr(loop, "_choose", choose)
    made = generate(ids, model, GREEDY)
    assert made.token_ids == [*full[:5], end] and made.finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], GREEDY, "empty"),
        ([512], GREEDY, "vocabulary of 512"),
        ([-1], GREEDY, "vocabulary of 512"),
        ([5], GenerateOptions(max_tokens=1 << 20), "context of 1048576"),
        ("text", GREEDY, "no tokenizer"),
    ],
)
def test_bad_prompts_are_refused(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(prompt, model, options)


def test_max_tokens_must_be_positive():
    with pytest.raises(ValueError, match="max_tokens"):
        GenerateOptions(max_tokens=0)


@pytest.mark.parametrize("raw", [True, False])
def test_text_streams_in_whole_pieces(text_model, raw):
    options = GenerateOptions(max_tokens=20, raw=raw)
    pieces = list(stream_text("naïve café", text_model, options))
    assert "".join(pieces).rstrip("\ufffd") == generate(
        "naïve café", text_model, options
    ).text.rstrip("\ufffd")


def test_prompts_of_every_length_share_the_programs_of_their_buckets(model):
    """Lengths 1 to 70 and both prefill modes: one program a bucket, not one a length."""
    programs = (steps.full_step, steps.encode_step, steps.suffix_step)
    for length in (1, 8, 64, 70):
        for bounded in (True, False):
            Session(model, 100).prefill(Prompt.of_text([5] * length), bounded=bounded)
    before = [program._cache_size() for program in programs]
    for length in range(1, 70, 3):
        for bounded in (True, False):
            Session(model, 100).prefill(Prompt.of_text([5] * length), bounded=bounded)
    assert [program._cache_size() for program in programs] == before
