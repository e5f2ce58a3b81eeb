"""Faults that users met in other servers, where no other test here tries them.

`tests/README.md` says which test tries which fault.
"""

import json
from collections.abc import Iterator
from typing import Any

import deepseek_recipe as recipe
import httpx
import openai
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of
from test_openai import CALL, MODEL, USER, WEATHER, chat, says
from test_parsing import collect, parse, parser

from ds41jax.serving.settings import default_max_tokens, resolve_max_tokens
from ds41jax.serving.usage import TokenCounts
from ds41jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, ""))


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_two_way_splits(official: Tokenizer, decoder: recipe.Tokenizer) -> None:
    """B001, B003: the same result wherever the text of a call is cut; no delta holds markup."""
    case: dict[str, Any] = {"start": "content", "tools_offered": True}
    special, marker = "｜DSML｜", official.special_id("｜DSML｜")
    parts = f"Looking.{CALL}".split(special)
    results = []
    for cut in range(sum(map(len, parts))):
        ids: list[int] = []
        at = 0
        for n, part in enumerate(parts):
            ids += [marker] if n else []
            inside = min(max(cut - at, 0), len(part))
            ids += official.encode(part[:inside]) + official.encode(part[inside:])
            at += len(part)
        chunks = parse(parser(official, decoder, case, TokenCounts()), ids, "stop")
        text = json.dumps(chunks, ensure_ascii=False)
        assert not any(word in text for word in ("DSML", "invoke", "parameter", "calls>"))
        results.append(collect(chunks))
    assert all(result == results[0] for result in results)
    assert results[0]["content"] == "Looking." and len(results[0]["tool_calls"]) == 1


def test_body_is_a_plain_completion(url: str, engine: FakeEngine) -> None:
    """B007: the body is the object itself, with every field that clients expect."""
    says(engine, f"thought</think>{CALL}")
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"model": MODEL, "messages": USER, "tools": [WEATHER]}
    ).json()
    wanted = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert set(answer) == wanted and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["content"] is None and choice["logprobs"] is None
    assert "DSML" not in json.dumps(answer, ensure_ascii=False)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_call_inside_the_reasoning(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B009: it counts as a call."""
    says(engine, f"I call it now.{CALL}")
    choice = chat(client, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.reasoning_content == "I call it now."


def test_reasoning_alone(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B009: a reply that is reasoning alone still brings the reasoning."""
    says(engine, "I think.</think>")
    message = chat(client, tools=[WEATHER]).choices[0].message
    assert message.content is None and message.reasoning_content == "I think."


@pytest.mark.parametrize(
    ("thinking", "max_effort", "default"),
    [(False, False, 8192), (True, False, 65536), (True, True, 131072)],
)
def test_limit_that_nobody_stated(thinking: bool, max_effort: bool, default: int) -> None:
    """B012: large while thinking, within the context and the server's own limit."""
    limit = default_max_tokens(thinking, max_effort)
    assert limit == default
    assert resolve_max_tokens(None, 1000, 1_000_000, 393_216, limit) == default
    assert resolve_max_tokens(None, 1000, 4096, 393_216, limit) == min(default, 3096)
    assert resolve_max_tokens(None, 1000, 1_000_000, 50, limit) == 50


def test_stop_string_that_begins_like_the_end_of_thinking(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    """B069: what is held back for a stop string never hides the end of the thinking."""
    for stop in ("</", "</think>", "<"):
        says(engine, "I think.</think>An answer.")
        message = chat(client, stop=[stop]).choices[0].message
        assert (message.reasoning_content, message.content) == ("I think.", "An answer.")


def test_usage_counts_each_token_once(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B075: a stream and a whole answer agree with the engine's own count."""
    text = "thought of several words</think>Hello 🌊, world!"
    says(engine, text)
    assert engine.model.tokenizer is not None
    emitted = len(engine.model.tokenizer.encode_special(text)) + 1
    options = {"include_usage": True}
    streamed = list(chat(client, stream=True, stream_options=options))[-1].usage
    whole = chat(client).usage
    assert streamed.completion_tokens == whole.completion_tokens == emitted
    assert whole.total_tokens == whole.prompt_tokens + emitted


def test_several_choices_are_refused_by_name(client: openai.OpenAI) -> None:
    """B091: no choice can share another's seed where there is only one; nothing is ignored."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, n=2)
    assert caught.value.param == "n"


def test_acceptance_by_position_is_a_metric(official: Tokenizer) -> None:
    """B063: lists of records become metrics with an index, gaps left out."""
    engine = FakeEngine(official, script_of(official, "x"))
    record = {"position": 1, "accept_rate": 0.75}, {"position": 2, "accept_rate": None}
    engine.policy = {"mode": "fixed", "confidence_reliability": list(record)}
    with running(engine) as url:
        text = httpx.get(f"{url}/metrics").text
    name = "ds41jax_engine_policy_confidence_reliability"
    assert f'{name}_accept_rate{{index="0"}} 0.75' in text
    assert f'{name}_position{{index="1"}} 2.0' in text
    assert f'{name}_accept_rate{{index="1"}}' not in text
