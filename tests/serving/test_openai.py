"""The official openai client against a live server."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of

from ds41jax.tokenizer import Tokenizer

MODEL = "DeepSeek-V4.1-Flash"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris 🌊</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">[1, 2]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, ""))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with running(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def says(engine: FakeEngine, text: str) -> None:
    assert engine.model.tokenizer is not None
    engine.script = script_of(engine.model.tokenizer, text)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "thought</think>Hello 🌊!")
    answer = chat(client)
    message = answer.choices[0].message
    assert message.content == "Hello 🌊!" and message.reasoning_content == "thought"
    assert message.tool_calls is None and answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 1
    assert engine.requests[-1].sampling.temperature == 1.0


def test_chat_without_thinking(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "Hello")
    answer = chat(client, reasoning_effort="none")
    assert answer.choices[0].message.content == "Hello"
    assert not hasattr(answer.choices[0].message, "reasoning_content")


def test_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "thought</think>Hello 🌊!")
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
    deltas = [c.choices[0].delta.model_dump(exclude_none=True) for c in chunks if c.choices]
    assert all(len(delta) == 1 for delta in deltas[:-1]) and deltas[-1] == {}
    assert deltas[0] == {"role": "assistant"}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "thought"
    assert "".join(d.get("content", "") for d in deltas) == "Hello 🌊!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    says(engine, f"I look it up.</think>Looking.{CALL}")
    wanted = {"city": "Paris 🌊", "days": [1, 2]}
    answer = chat(client, tools=[WEATHER], stream=stream)
    if not stream:
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather" and call.type == "function"
        assert json.loads(call.function.arguments) == wanted
        assert answer.choices[0].finish_reason == "tool_calls"
        return
    chunks = list(answer)
    calls = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert calls[0].id and calls[0].function.name == "get_weather"
    assert not any(call.id or call.function.name for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == wanted
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_forced_call_while_thinking(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B010: the grammar forces the call behind the thinking block."""
    says(engine, f"thought</think>{CALL}")
    named = {"type": "function", "function": {"name": "get_weather"}}
    other = {"type": "function", "function": {"name": "other"}}
    answer = chat(client, tools=[WEATHER, other], tool_choice=named)
    assert answer.choices[0].message.content is None
    constraint = engine.requests[-1].constraint
    assert constraint is not None and constraint.after_thinking
    assert "get_weather" in constraint.source and "other" not in constraint.source


def test_forced_call_that_is_missing(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "thought</think>No.")
    with pytest.raises(openai.InternalServerError, match="called no tool"):
        chat(client, tools=[WEATHER], tool_choice="required")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize("strict", [False, True])
def test_json_schema(client: openai.OpenAI, engine: FakeEngine, strict: bool) -> None:
    says(engine, 'thought</think>{"a": 1}')
    schema = {"name": "x", "schema": STRICT if strict else SCHEMA, "strict": strict}
    answer = chat(client, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(answer.choices[0].message.content) == {"a": 1}
    constraint = engine.requests[-1].constraint
    assert constraint is not None and constraint.after_thinking  # B093
    assert (constraint.kind, constraint.strict) == ("json_schema", strict)


def test_output_that_breaks_its_schema(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, 'thought</think>{"a": "x"}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with pytest.raises(openai.InternalServerError, match="does not match"):
        chat(client, response_format=schema)
    with pytest.raises(openai.APIError, match="does not match"):
        list(chat(client, response_format=schema, stream=True))
    assert chat(client, response_format=schema, max_tokens=3).choices[0].finish_reason == "length"


def test_schema_outside_the_strict_subset(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=schema)
    assert caught.value.param == "response_format.json_schema.schema"


def test_response_format_with_tools(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, f"thought</think>{CALL}")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = chat(client, response_format=schema, tools=[WEATHER])
    assert answer.choices[0].finish_reason == "tool_calls"


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B072, B073: each token once, reasoning apart, joined bytes are the content."""
    says(engine, "thought</think>Hello 🌊!")
    whole = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs
    chunks = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []
    ]
    assert [e.token for e in streamed] == [e.token for e in whole.content]
    assert b"".join(bytes(e.bytes) for e in whole.content).decode() == "Hello 🌊!"
    assert all(len(entry.top_logprobs) == 2 for entry in whole.content)
    assert [entry["token"] for entry in whole.reasoning_content] == ["thought"]


def test_stop_string(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "a STOP b</think>one two STOP three four five")
    answer = chat(client, stop=["STOP"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].message.reasoning_content == "a STOP b"
    assert engine.cancelled and not engine.open
    pieces = chat(client, stop="STOP", stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == "one two "


def test_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "one two three four five")
    answer = chat(client, max_completion_tokens=2, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2
    chat(client, max_tokens=10**9)
    request = engine.requests[-1]
    assert request.max_tokens == 4096 - len(request.token_ids)  # B096


def test_seeds(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B090: a fresh seed each time, unless one is given; -1 is one."""
    says(engine, "x")
    for _ in range(2):
        chat(client)
    assert engine.requests[-1].sampling.seed != engine.requests[-2].sampling.seed
    chat(client, seed=-1)
    assert engine.requests[-1].sampling.seed == 2**64 - 1


def test_prompt_too_long(client: openai.OpenAI) -> None:
    """B097: 400 with both numbers."""
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens.*4096"):
        chat(client, messages=[{"role": "user", "content": "word " * 5000}])


def test_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "\n a</think>b")
    answer = client.completions.create(model=MODEL, prompt="once", logprobs=1)
    assert answer.choices[0].text == "\n a</think>b"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens - 1
    ids = engine.requests[-1].token_ids
    chunks = list(client.completions.create(model=MODEL, prompt=list(ids), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "\n a</think>b"
    assert engine.requests[-1].token_ids == ids


def test_responses(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "thought</think>Hello!")
    answer = client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
    assert answer.output_text == "Hello!" and answer.status == "completed"
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    text = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(text) == "Hello!" and events[-1].type == "response.completed"


def test_responses_tools_and_schema(client: openai.OpenAI, engine: FakeEngine) -> None:
    """B094: the grammar begins behind the thinking block on this route too."""
    says(engine, f"thought</think>{CALL}")
    tool = {"type": "function", **WEATHER["function"]}
    answer = client.responses.create(model=MODEL, input="hi", tools=[tool], tool_choice="required")
    call = answer.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] == "Paris 🌊"
    says(engine, 'thought</think>{"a": 1}')
    form = {"format": {"type": "json_schema", "name": "x", "schema": STRICT, "strict": True}}
    assert client.responses.create(model=MODEL, input="hi", text=form).output_text == '{"a": 1}'
    constraint = engine.requests[-1].constraint
    assert constraint is not None and constraint.after_thinking


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve("deepseek-ai/DeepSeek-V4.1-Flash").owned_by == "deepseek-ai"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model="another")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
