"""The generated tasks: deterministic, scored exactly, and nobody's name in them."""

import json

import pytest

from ds41jax.training.tasks import (
    TASKS,
    Check,
    Example,
    draw,
    planted_fact,
    question,
    rng_of,
    score,
)
from ds41jax.training.tasks.arithmetic import steps
from ds41jax.training.tasks.docstrings import pairs, summary
from ds41jax.training.tasks.example import calls_of, same_shape, same_values
from ds41jax.training.tasks.recall import long_table
from ds41jax.training.tasks.tool_specs import SPECS

NAMES = sorted(TASKS)


def examples(task, count=60, split="held-out"):
    return [draw(split, task, i) for i in range(count)]


@pytest.mark.parametrize("task", NAMES)
def test_a_seed_names_an_example(task):
    assert examples(task) == examples(task)
    assert len({json.dumps(e.messages) for e in examples(task)}) > 30


@pytest.mark.parametrize("task", NAMES)
def test_no_held_out_question_is_trained(task):
    trained = {question(e) for e in examples(task, 400, "training")}
    assert trained.isdisjoint(question(e) for e in examples(task, 150))
    with pytest.raises(ValueError, match="split"):
        draw("test", task, 0)


def test_tools_of_held_out_questions_are_never_called_in_training():
    def called(split):
        made = [
            [c["name"] for m in e.messages for c in calls_of(m)]
            for e in examples("tools", 300, split)
        ]
        return [names for names in made if names]

    trained = {name for names in called("training") for name in names}
    held_out = {names[0] for names in called("held-out")}
    assert len(held_out) > 20 and trained.isdisjoint(held_out)
    assert all(trained & set(spec.names) for spec in SPECS)


def test_streams_of_a_split_differ():
    first, second = ([draw("training", "recall", i, s) for i in range(20)] for s in ("/0", "/1"))
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("task", NAMES)
def test_the_own_answer_is_right_and_another_is_wrong(task):
    scored = [e for e in examples(task) if e.check.kind != "open"]
    assert len(scored) > 40
    for example in scored:
        answer = example.answer["content"]
        assert score(example, answer, example.calls)
        assert not score(example, "no 7", [{"name": "other", "arguments": {}}])
        if example.calls:
            wrong = [{"name": c["name"], "arguments": {"x": 1}} for c in example.calls]
            assert not score(example, answer, wrong)
            assert not score(example, answer, [])
        elif example.check.kind != "calls":
            assert not score(example, "", [])


@pytest.mark.parametrize("task", NAMES)
def test_thinking_answers_have_reasoning(task):
    made = examples(task, 100)
    assert {e.thinking for e in made} == {True, False}
    for example in made:
        assert bool(example.answer.get("reasoning_content")) == example.thinking
        assert example.messages[-1]["role"] == "assistant"
        assert example.prompt[-1]["role"] in ("user", "tool")


def test_counting_to_a_hundred_is_common():
    hundred = [str(i) for i in range(1, 101)]
    made = examples("counting", 100)
    assert sum(e.check.value == hundred for e in made) > 25
    example = next(e for e in made if e.check.value == hundred)
    assert score(example, " ".join(hundred))
    assert not score(example, " ".join(hundred[:-1]))
    assert not score(example, " ".join(hundred[:50] + hundred[51:]))


@pytest.mark.parametrize(
    "sum", [(347, 586, "+"), (12, 999, "+"), (500, 7, "-"), (7, 500, "-"), (305, 47, "*")]
)
def test_the_last_line_of_the_reasoning_is_the_result(sum):
    a, b, sign = sum
    assert str({"+": a + b, "-": a - b, "*": a * b}[sign]) in steps(a, b, sign).splitlines()[-1]


def test_columns_carry():
    assert steps(347, 586, "+").splitlines() == [
        "7 + 6 = 13, write 3, carry 1",
        "4 + 8 + 1 = 13, write 3, carry 1",
        "3 + 5 + 1 = 9, write 9",
        "347 + 586 = 933",
    ]


def test_json_is_scored_by_shape_and_by_values():
    example = Example("json", [], False, Check("json", {"n": 1.5, "tags": ["a"], "ok": True}))
    same = '{"tags": ["b", "c"], "n": 2, "ok": false}'
    assert score(example, same) and not same_values(example, same)
    assert same_values(example, '{"n": 1.5, "tags": ["a"], "ok": true}')
    for wrong in ('{"n": 1.5}', '{"n": "1", "tags": [], "ok": true}', '{"n": 1.5,', "[1]", ""):
        assert not score(example, wrong)
    assert not same_shape(True, 1) and not same_shape(1, True)


def test_calls_are_those_of_offered_tools():
    kinds = set()
    for example in examples("tools", 300):
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in example.tools}
        assert 1 <= len(offered) == len(example.tools) <= 4
        kinds.add(len(example.calls))
        for call in example.calls:
            shape = offered[call["name"]]
            assert set(shape["required"]) <= set(call["arguments"]) <= set(shape["properties"])
            said = json.dumps(example.messages)
            assert all(v is True or str(v) in said for v in call["arguments"].values())
    assert kinds == {0, 1, 2}


@pytest.mark.parametrize("tokens", [1000, 4000, 8000])
def test_a_planted_fact_is_in_a_text_of_the_asked_length(tokens):
    for i in range(5):
        example = planted_fact(rng_of("held-out", "retrieval", i), tokens, lambda t: len(t) // 4)
        text = example.prompt[-1]["content"]
        assert tokens - 400 <= len(text) // 4 <= tokens + 40
        assert example.check.value in text and not score(example, "I do not know.")


def test_answers_of_recall_are_copies_from_before():
    for example in [*examples("recall", 40), long_table(rng_of("training", "long", 0), 3000)]:
        said = ""
        for message in example.messages:
            if message["role"] == "assistant":
                assert (
                    message["content"] in said or f'"{message["content"]}"' in said or ": " in said
                )
            said += message["content"]


def test_open_talk_is_not_scored():
    with pytest.raises(ValueError, match="no one right answer"):
        score(Example("chat", [], False, Check("open")), "Hello!")


def test_docstrings_of_the_standard_library():
    known = dict(pairs())
    assert known["math.sqrt"] == "Return the square root of x."
    assert len(known) > 1000
    assert summary("sqrt(x, /)\n--\n\nReturn it.\n") is None
    assert summary("Return e.g. two things. And more.") == "Return e.g. two things."
    assert summary("Written by someone@example.org for all.") is None
