"""Faults that users met in other engines, tried on this one; the table is tests/README.md."""

from engine_runs import Run, alone, prompt, request

from ds41jax.cache.radix import Reuse
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.engine.request import Started


class Ragged(FixedPolicy):
    """Verifies one, three and five drafts of successive requests."""

    def _choose(self, lane, shared):
        return [min(r.available, 1 + 2 * (r.request_id % 3)) for r in lane]


def cached(run, number):
    started = run.events[number][0]
    assert isinstance(started, Started)
    return started.cached_tokens


def test_ragged_verifications_equal_single_runs():
    requests = [request(prompt(50 + i, 10 + i), 14, seed=i or None) for i in range(3)]
    run = Run(policy=Ragged(5))
    assert run.all(requests) == [alone(r) for r in requests]
    widths = run.core.speculation.policy.stats()["draft_rows_histogram"]
    assert widths[1] and widths[3] and widths[5]


def test_a_limit_beyond_the_block_acts_as_the_block():
    run = Run(policy=FixedPolicy(7))
    wanted = request(prompt(1, 20), 12)
    assert run.all([wanted]) == [alone(wanted)]
    widths = run.core.speculation.policy.stats()["draft_rows_histogram"]
    assert widths[5] and widths[6] == widths[7] == 0


def test_drafts_change_nothing_on_twenty_prompts():
    requests = [request(prompt(60 + i, 3 + 2 * i), 6) for i in range(20)]
    assert Run().all(requests) == Run(dspark=False).all(requests)


def test_sequences_may_change_places_between_steps():
    """State belongs to the sequence, never to its row in the batch."""
    requests = [request(prompt(70 + i, 9 + i), 10, seed=i % 2 or None) for i in range(4)]
    run = Run()
    for r in requests:
        run.add(r)
    while run.core.step():
        run.core.active.reverse()
    assert [run.tokens(n) for n in range(4)] == [alone(r) for r in requests]


def test_every_turn_of_a_conversation_finds_the_one_before():
    run, ids, before = Run(), prompt(80, 30), 0
    for turn in range(4):
        wanted = request(ids, 5)
        number = run.add(wanted)
        run.finish()
        assert run.tokens(number) == alone(wanted)
        assert cached(run, number) >= before
        # All but the last token, which was never fed.
        before = len(ids) + len(run.tokens(number)) - 1
        ids = (*ids, *run.tokens(number), *prompt(81 + turn, 7))


def test_a_prompt_of_a_thousand_tokens_hits():
    run = Run(reuse=Reuse.BOUNDED)
    ids = prompt(90, 1000)
    run.all([request(ids, 1)])
    for wanted, least in (((*ids[:990], 11, 12), 900), (ids, 1000)):
        number = run.add(request(wanted, 1))
        run.finish()
        assert cached(run, number) >= least


def test_a_chunk_larger_than_the_pool_still_runs():
    """Pages are for the prompt, whatever a step could hold."""
    wanted = request(prompt(1, 20), 4)
    assert Run(prefill_chunk=4096).all([wanted]) == [alone(wanted)]


def test_equal_text_in_other_tokens_costs_time_only():
    """A turn that comes back in other tokens than were sampled resumes where they part."""
    run, ids = Run(), prompt(91, 40)
    answer = run.all([request(ids, 8)])[0]
    changed = (*ids, *answer[:3], *prompt(92, 2), *answer[5:], 11)
    number = run.add(request(changed, 6))
    run.finish()
    assert cached(run, number) >= len(ids)
    assert run.tokens(number) == alone(request(changed, 6))
