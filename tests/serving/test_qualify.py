"""`ds41jax qualify`: right answers pass, wrong ones do not, whoever gives them."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from fake_engine import FakeEngine

from ds41jax.engine.request import Request
from ds41jax.qualify import CLOSES, ENDS, Question, answer_limit, qualify, questions
from ds41jax.qualify_command import _verdict, needed_context
from ds41jax.serving.chat_request import read_chat
from ds41jax.serving.conversation import render
from ds41jax.tokenizer import Tokenizer
from ds41jax.training.tasks import Example

COUNT = 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_vendor()


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> list[Question]:
    return questions(tokenizer, COUNT)


def prompt_and_answer(example: Example, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of the right answer behind it, as the format spells them."""
    body = {
        "model": "m",
        "messages": example.prompt,
        "thinking": {"type": "enabled" if example.thinking else "disabled"},
    }
    body |= {"tools": example.tools} if example.tools else {}
    body |= {"response_format": example.response_format} if example.response_format else {}
    conversation = read_chat(body).conversation
    assert conversation is not None
    text = example.answer["content"]
    if example.thinking:
        text = f"{example.answer['reasoning_content']}</think>{text}"
    if example.calls:
        invokes = [_invoke(call) for call in example.calls]
        text += "\n\n" + "\n".join(["<｜DSML｜ calls>", *invokes, "</｜DSML｜ calls>"])
    return render(conversation).encode(tokenizer), tokenizer.encode_special(text)


def _invoke(call: dict[str, Any]) -> str:
    lines = [f'<｜DSML｜ invoke name="{call["name"]}">']
    for key, value in call["arguments"].items():
        string = isinstance(value, str)
        said = value if string else json.dumps(value)
        head = f'<｜DSML｜ parameter name="{key}" string="{str(string).lower()}">'
        lines.append(f"{head}{said}</｜DSML｜ parameter>")
    return "\n".join([*lines, "</｜DSML｜ invoke>"])


def answering(asked: list[Question], tokenizer: Tokenizer, tail: list[int]) -> FakeEngine:
    """An engine that knows every answer and goes on with `tail`."""
    known = dict(
        (tuple(prompt), answer)
        for prompt, answer in (prompt_and_answer(q.example, tokenizer) for q in asked)
    )

    def play(request: Request) -> Iterable[int]:
        assert request.constraint is None and request.sampling.temperature == 0
        yield from known[request.token_ids]
        yield from tail

    return FakeEngine(tokenizer, play)


def test_questions_are_fixed(asked: list[Question], tokenizer: Tokenizer) -> None:
    assert asked == questions(tokenizer, COUNT)
    counts = Counter(question.check for question in asked)
    assert len(counts) == 6 and set(counts.values()) == {COUNT}
    longest = max(sum(map(len, prompt_and_answer(q.example, tokenizer))) for q in asked)
    assert 7600 < longest <= 8192
    for question in asked:
        prompt, answer = prompt_and_answer(question.example, tokenizer)
        limit = answer_limit(tokenizer, question.example)
        assert len(answer) < limit
        assert len(prompt) + limit <= needed_context(tokenizer, asked)


def test_right_answers_pass(asked: list[Question], tokenizer: Tokenizer) -> None:
    engine = answering(asked, tokenizer, [1])
    report = qualify(engine, asked, needed_context(tokenizer, asked), 4, progress=False)
    assert report.wrong == []
    rows = dict((name, (passed, count)) for name, passed, count in report.rows())
    assert all(passed == count for passed, count in rows.values())
    assert list(rows)[-2:] == [CLOSES, ENDS] and rows[ENDS] == (18, 18)
    thinking = sum(question.example.thinking for question in asked)
    assert rows[CLOSES] == (thinking, thinking) and 0 < thinking < 18
    assert _verdict(report, 1.0) == 0


def test_an_answer_without_end(asked: list[Question], tokenizer: Tokenizer) -> None:
    """What follows the right answer makes it wrong, but where containing it is enough."""
    word = tokenizer.encode(" and 7")
    engine = answering(asked, tokenizer, word * 2000)
    report = qualify(engine, asked, needed_context(tokenizer, asked), 16, progress=False)
    assert report.rate(ENDS) == 0 and report.rate("counts to 100") == 0
    assert report.rate("fact in 1024 tokens") == 1 and report.rate(CLOSES) == 1


def test_noise_fails(asked: list[Question], tokenizer: Tokenizer) -> None:
    noise = [*tokenizer.encode("noise"), 1]
    engine = FakeEngine(tokenizer, lambda request: noise)
    report = qualify(engine, asked, needed_context(tokenizer, asked), 16, progress=False)
    data = report.json()
    assert report.rate(ENDS) == 1 and report.rate(CLOSES) == 0
    assert all(data["checks"][q.check]["passed"] == 0 for q in asked)
    assert len(data["wrong"]) == len(asked) and json.dumps(data)
    assert _verdict(report, 0.5) == 1 and _verdict(report, None) == 0
    assert "counts to 100" in report.table()


def test_a_refusal_is_a_wrong_answer(asked: list[Question], tokenizer: Tokenizer) -> None:
    """A question too long for the context does not end the examination."""
    engine = FakeEngine(tokenizer, lambda request: [1])
    report = qualify(engine, asked[:1], 512, 1, progress=False)
    assert report.wrong[0]["got"].startswith("The prompt has")
