"""The official anthropic client against a live server."""

from collections.abc import Iterator

import anthropic
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of
from test_openai import CALL, MODEL, USER, says

from ds41jax.tokenizer import Tokenizer

TOOL = {"name": "get_weather", "description": "", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, ""))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with running(engine, api_key="secret") as url:
        yield anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)


def test_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    says(engine, "thought</think>Hello!")
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=USER, system="Be brief.")
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Hello!" and answer.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.")
    assert counted.input_tokens == len(engine.requests[-1].token_ids)


def test_stream(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    thinking, body = {"type": "disabled"}, {"temperature": 0.5}
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=USER, thinking=thinking, extra_body=body
    ) as stream:
        assert "".join(stream.text_stream) == "Hello!"
        assert stream.get_final_message().usage.output_tokens == 3
    assert engine.requests[-1].sampling.temperature == 0.5


def test_tools(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    says(engine, f"thought</think>Looking.{CALL}")
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=USER, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert answer.stop_reason == "tool_use"
    assert answer.content[-1].input == {"city": "Paris 🌊", "days": [1, 2]}
    with client.messages.stream(model=MODEL, max_tokens=100, messages=USER, tools=[TOOL]) as stream:
        assert stream.get_final_message().content[-1].input["city"] == "Paris 🌊"
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "Sunny."}
    history = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    says(engine, "thought</think>It is sunny.")
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=history, tools=[TOOL])
    assert answer.content[-1].text == "It is sunny."


def test_stop_sequence(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    says(engine, "thought</think>one STOP two")
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=USER, stop_sequences=["STOP"]
    )
    assert answer.content[-1].text == "one "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        body = {"temperature": 3}
        client.messages.create(model=MODEL, max_tokens=9, messages=USER, extra_body=body)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(
            model=MODEL, max_tokens=9, messages=USER
        )
