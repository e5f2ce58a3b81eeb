"""`ds41jax qualify`: fixed questions with one right answer, put to a model as a client would.

The questions have the form of those that the small model is trained on, but none of them is among
those, word for word, and none wants a tool that training calls. Answers are greedy and free of any
grammar, on the server's own path from a Chat Completions body to a reply: prompt, parsing and
counting are those of `ds41jax serve`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from ds41jax.serving.chat_request import read_chat
from ds41jax.serving.conversation import AnswerFormat
from ds41jax.serving.errors import ApiError
from ds41jax.serving.generation import Generation
from ds41jax.serving.preparation import prepare
from ds41jax.serving.replies import ChatReply
from ds41jax.serving.server import Engine, Server, ServerOptions
from ds41jax.tokenizer import Tokenizer
from ds41jax.training.tasks import Example, draw, planted_fact, rng_of, score

SPARE_TOKENS = 64
FACT_ROOM = 256  # of the format around a text, the question and the answer: all within the length
FACT_LENGTHS = (1024, 4096, 8192)
COUNT_TO_100 = [str(number) for number in range(1, 101)]
CLOSES, ENDS = "closes its thinking", "ends its turn"


@dataclass(frozen=True)
class Question:
    """An example and the check that it belongs to."""

    check: str
    example: Example


@dataclass(frozen=True)
class Reply:
    """What came of a question.

    Attributes:
      right: as the example's check scores it.
      closed: something followed the thinking; None for a question without thinking.
      ended: the model ended by itself rather than at the limit.
      message: the assistant's message, or what the server said instead.
    """

    right: bool
    closed: bool | None
    ended: bool
    message: Any


@dataclass
class Report:
    """Counts by check, and the replies that were wrong."""

    passed: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, question: Question, reply: Reply) -> None:
        """Takes a reply into account."""
        self._count(question.check, reply.right)
        if reply.closed is not None:
            self._count(CLOSES, reply.closed)
        self._count(ENDS, reply.ended)
        if not reply.right:
            wanted = question.example.check.value
            self.wrong.append({"check": question.check, "wanted": wanted, "got": reply.message})

    def _count(self, check: str, good: bool) -> None:
        self.asked[check] += 1
        self.passed[check] += good

    def rate(self, check: str) -> float:
        """The share that passed."""
        return self.passed[check] / self.asked[check]

    def rows(self) -> list[tuple[str, int, int]]:
        """(check, passed, asked) in the order of the questions; what holds for all comes last."""
        names = [name for name in self.asked if name not in (CLOSES, ENDS)]
        names += [name for name in (CLOSES, ENDS) if name in self.asked]
        return [(name, self.passed[name], self.asked[name]) for name in names]

    def table(self) -> str:
        """The rows to read."""
        lines = [f"{'check':<24}{'passed':>8}{'asked':>8}{'rate':>8}"]
        for name, passed, asked in self.rows():
            lines.append(f"{name:<24}{passed:>8}{asked:>8}{100 * passed / asked:>7.1f}%")
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """The same as data, with the wrong replies."""
        checks = {name: {"passed": p, "asked": a, "rate": p / a} for name, p, a in self.rows()}
        return {"checks": checks, "wrong": self.wrong}


def questions(tokenizer: Tokenizer, count: int) -> list[Question]:
    """`count` questions of each check, always the same ones; the longest come first."""

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    asked = []
    for length in sorted(FACT_LENGTHS, reverse=True):
        name = f"fact in {length} tokens"
        for index in range(count):
            rng = rng_of("held-out", f"fact-{length}", index)
            asked.append(Question(name, planted_fact(rng, length - FACT_ROOM, tokens)))
    wanted: list[tuple[str, str, Callable[[Example], bool]]] = [
        ("counts to 100", "counting", lambda e: e.check.value == COUNT_TO_100),
        ("JSON of a shape", "json", lambda e: True),
        ("right tool, arguments", "tools", lambda e: bool(e.calls)),
    ]
    for name, task, fits in wanted:
        drawn = _examples(task, fits)
        asked += [Question(name, next(drawn)) for _ in range(count)]
    return asked


def _examples(task: str, fits: Callable[[Example], bool]) -> Iterator[Example]:
    index = 0
    while True:
        example = draw("held-out", task, index)
        index += 1
        if fits(example):
            yield example


def answer_limit(tokenizer: Tokenizer, example: Example) -> int:
    """Tokens that an answer may take: twice what the right one needs, and some more."""
    return 2 * len(tokenizer.encode(json.dumps(example.answer))) + SPARE_TOKENS


def qualify(
    engine: Engine, asked: list[Question], context: int, at_once: int, *, progress: bool = True
) -> Report:
    """Puts questions to an engine, so many at once; raises `ValueError` without a tokenizer."""
    return asyncio.run(_qualify(engine, asked, context, at_once, progress))


async def _qualify(
    engine: Engine, asked: list[Question], context: int, at_once: int, progress: bool
) -> Report:
    server = Server(engine, ServerOptions(context=context))
    places = asyncio.Semaphore(at_once)
    bar = tqdm(total=len(asked), desc="asking", unit="question", disable=not progress)

    async def one(question: Question) -> Reply:
        async with places:
            reply = await ask(server, question.example)
        bar.update()
        return reply

    report = Report()
    with bar:
        replies = await asyncio.gather(*map(one, asked))
    for question, reply in zip(asked, replies, strict=True):
        report.add(question, reply)
    return report


async def ask(server: Server, example: Example) -> Reply:
    """The model's reply to an example's prompt."""
    body = {
        "model": server.options.model_name,
        "messages": example.prompt,
        "thinking": {"type": "enabled" if example.thinking else "disabled"},
        "temperature": 0,
        "max_tokens": answer_limit(server.tokenizer, example),
    }
    body |= {"tools": example.tools} if example.tools else {}
    body |= {"response_format": example.response_format} if example.response_format else {}
    try:
        choice = await _choice(server, body)
    except ApiError as error:
        return Reply(False, False if example.thinking else None, False, error.message)
    message = choice["message"]
    content, functions = message["content"] or "", _functions(message)
    return Reply(
        right=functions is not None and score(example, content, functions),
        closed=bool(content or message.get("tool_calls")) if example.thinking else None,
        ended=choice["finish_reason"] != "length",
        message=message,
    )


async def _choice(server: Server, body: dict[str, Any]) -> Any:
    incoming = read_chat(body)
    prepared = await prepare(server, incoming, len(json.dumps(body)))
    free = replace(prepared.request, constraint=None)
    prepared = replace(prepared, request=free, answer=AnswerFormat())
    reply = ChatReply(prepared, incoming, incoming.settings.model)
    generation = Generation(server, prepared, reply, "qualify")
    try:
        await generation.open()
        async for chunks in generation.chunks():
            for chunk in chunks:
                reply.add(chunk)
    finally:
        generation.close()
    return json.loads(reply.body())["choices"][0]


def _functions(message: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The calls as examples score them; None if an argument text is not a JSON object."""
    found = []
    for call in message.get("tool_calls") or []:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return None
        found.append({"name": call["function"]["name"], "arguments": arguments})
    return found
