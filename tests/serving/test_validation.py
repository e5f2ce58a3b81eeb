"""What is refused, and how it is said."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of
from test_openai import MODEL, USER, WEATHER

from ds41jax.serving.chat_request import read_chat
from ds41jax.serving.errors import MAX_MESSAGE
from ds41jax.serving.settings import SamplingDefaults
from ds41jax.tokenizer import Tokenizer

BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, "x"))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running(engine) as url, httpx.Client(base_url=url) as client:
        yield client


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}"}} for n in range(count)]


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"functions": []}, "functions"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_effort": 0}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "weird": 1}]}, "messages[0].weird"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": "assistant"}]}, "messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x", "task": "cook"}]}, "messages[0].task"),
        ({"tools": tools(129)}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f" * 65}}]},
            "tools[0].function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "regex", "regex": ""}}, "response_format.regex"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {**SCHEMA, "strict": True}}, "response_format.strict"),
        ({"store": True}, "store"),
        ({"model": 5}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_field_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post(CHAT, json={**BODY, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0},
        {"top_k": None, "seed": 0, "stop": None, "n": 1, "presence_penalty": 0, "logit_bias": {}},
        {"reasoning_effort": "minimal", "user": "u", "metadata": {"a": "b"}, "store": False},
        {"reasoning_effort": 33, "stop": "x"},
        {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
        {"response_format": {"type": "regex", "regex": "x+"}},
        {"tools": tools(128), "parallel_tool_calls": False, "tool_decoding_assistance": False},
        {"messages": [{"role": "developer", "content": "x"}, *USER]},
    ],
)
def test_accepted(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post(CHAT, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text


def test_what_is_stated_is_honoured(engine: FakeEngine, client: httpx.Client) -> None:
    """Also while thinking, where the hosted API ignores it."""
    more = {"min_tokens": 3, "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [5]}
    fields = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, **more}
    client.post(CHAT, json={**BODY, **fields})
    request = engine.requests[-1]
    assert all(
        getattr(request, key) == value for key, value in {**more, "stop_token_ids": (5,)}.items()
    )
    sampling = request.sampling
    wanted = (0.25, 0.5, 7, 0.1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == wanted
    greedy = read_chat({**BODY, "temperature": 1e-6}).settings.sampling(SamplingDefaults())
    assert greedy.temperature == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (json.dumps(deep(150)).encode(), "too_deep"),
    ],
)
def test_malformed_body(client: httpx.Client, body: bytes, code: str) -> None:
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        answer = client.post(path, content=body)
        assert answer.status_code == 400
        if path != "/v1/messages":
            assert answer.json()["error"]["code"] in (code, "too_deep")


def test_errors_are_short(client: httpx.Client) -> None:
    """Long input is not echoed, and many faults make one message."""
    answer = client.post(CHAT, json={**BODY, "reasoning_effort": "x" * 100_000})
    assert len(answer.text) < 2 * MAX_MESSAGE
    answer = client.post(
        CHAT, json={**BODY, "messages": [{"role": "x" * 5000, "content": 5}] * 500}
    )
    assert answer.status_code == 400 and len(answer.text) < 2 * MAX_MESSAGE
    answer = client.post(CHAT, json={**BODY, "x" * 100_000: 1})
    assert answer.status_code == 400 and len(answer.text) < 2 * MAX_MESSAGE


def test_wrong_routes(client: httpx.Client) -> None:
    assert client.get("/nothing").json()["error"]["message"]
    assert client.get(CHAT).status_code == 405


def test_tokenize(client: httpx.Client, engine: FakeEngine) -> None:
    fields = {**BODY, "tools": [WEATHER], "reasoning_effort": "max"}
    client.post(CHAT, json=fields)
    answer = client.post("/tokenize", json=fields).json()
    assert answer["tokens"] == list(engine.requests[-1].token_ids)
    assert client.post("/tokenize", json={"text": "a</think>"}).json()["count"] > 2
    assert client.post("/tokenize", json={}).status_code == 400


def test_metrics_and_stats(client: httpx.Client) -> None:
    client.post(CHAT, json=BODY)
    stats = client.get("/v1/stats").json()
    assert stats["totals"]["requests_admitted"] == stats["totals"]["requests_retired"]
    assert stats["engine"]["finished"] == {"stop": 2}
    text = client.get("/metrics").text
    assert 'ds41jax_engine_accepted_by_position{index="1"} 3.0' in text
    assert "ds41jax_totals_output_tokens_total" in text


def mutated(value: Any, generator: random.Random) -> Any:
    """The value with one place of it replaced by something unfit."""
    junk = [None, True, -1, 1e300, "", "x" * 300, [], {}, [[]], {"type": "text"}, "\x00", 2**70]
    if generator.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return generator.choice(junk)
    key = generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = mutated(copy[key], generator)
    return copy


RICH: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "json"}]},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "y"},
        {"role": "user", "content": "x"},
    ],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": deep(3)}},
    "stop": ["a"],
    "thinking": {"type": "disabled"},
    "temperature": 1,
    "seed": 3,
}
MESSAGES = {
    "model": MODEL,
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "auto"},
}
RESPONSES = {
    "model": MODEL,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    ],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": deep(2)}},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, RICH), ("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)],
    ids=["chat", "messages", "responses"],
)
def test_mutated_requests(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """No body makes the server fail; only the model's output can (the script says "x")."""
    generator = random.Random(0)
    for _ in range(300):
        changed = mutated(body, generator)
        answer = client.post(path, json=changed)
        failed = answer.status_code == 500 and "The model" not in answer.text
        assert answer.status_code in (200, 400, 500) and not failed, (changed, answer.text)
