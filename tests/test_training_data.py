"""Vocabulary, rendering and packing of the nano model's training rows."""

import json
from pathlib import Path

import deepseek_recipe as recipe
import numpy as np
import pytest

import ds41jax
from ds41jax.serving.conversation import ConversationInput
from ds41jax.serving.conversation import render as served
from ds41jax.serving.output import OutputParser, ParsePlan
from ds41jax.serving.usage import TokenCounts
from ds41jax.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer
from ds41jax.training import data
from ds41jax.training.corpus import Source, Text, clean, read_corpus, write_corpus
from ds41jax.training.data import Plan, make_training, vocabulary_texts, write_shard
from ds41jax.training.maker import Maker
from ds41jax.training.packing import CorpusStream, corpus_row, pack
from ds41jax.training.rendering import Document, Encoder
from ds41jax.training.tasks import TASKS, Check, Example, draw, planted_fact, rng_of
from ds41jax.training.vocabulary import VOCAB_SIZE, train_vocabulary

NANO = Path(ds41jax.__file__).parent / "nano"
FUNCTION = """def power_{i}(base, offset, scale):
    raised = base**{i}
    return raised * scale + offset

"""
TEXTS = [Text("a", f"{i}.py", FUNCTION.format(i=i) * 40, i % 5 == 0) for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_checkpoint(NANO)


def examples(count=25):
    return [draw("held-out", task, i) for task in TASKS for i in range(count)]


def body(example, messages):
    request = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": messages,
        "thinking": {"type": "enabled" if example.thinking else "disabled"},
    }
    if example.tools:
        request["tools"] = example.tools
    if example.response_format:
        request["response_format"] = example.response_format
    return request


def test_vocabulary_is_of_the_promised_size(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE == 3072
    assert [tokenizer.special_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.special_id(token) for token in SPECIAL_TOKENS] == list(
        range(VOCAB_SIZE - len(SPECIAL_TOKENS), VOCAB_SIZE)
    )


def test_vocabulary_keeps_every_byte(tokenizer):
    text = "".join(map(chr, range(0x250))) + "😀\r\n\t  x\n        return 1\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "", "a"]) == [
        tokenizer.encode(text),
        [],
        tokenizer.encode("a"),
    ]
    assert {tokenizer.token_bytes(id) for id in range(3, 259)} == {bytes([b]) for b in range(256)}


def test_digits_are_single_and_code_is_short(tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10
    assert len(tokenizer.encode("        return")) == 2
    code = "def add(a, b):\n    return a + b\n"
    assert len(tokenizer.encode(code)) <= len(code) // 2


def test_a_vocabulary_of_too_little_text_is_refused():
    with pytest.raises(ValueError, match="train on more text"):
        train_vocabulary(["a b c"])


def test_vocabulary_training_is_deterministic(monkeypatch):
    monkeypatch.setattr(data, "_VOCABULARY_EXAMPLES", 10)
    first, second = (train_vocabulary(vocabulary_texts(TEXTS), 500) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert first.vocab_size == 500


@pytest.mark.parametrize("task", sorted(TASKS))
def test_prompts_are_the_servers(tokenizer, task):
    encoder = Encoder(tokenizer)
    for index in range(25):
        example = draw("held-out", task, index)
        request = recipe.ChatCompletionRequest
        prompt = served(ConversationInput(request, body(example, example.prompt)))
        ids = prompt.encode(tokenizer)
        document = encoder.documents([example])[0]
        assert document.ids[: len(ids)].tolist() == ids
        assert document.ids[-1] == 1 and len(document.ids) > len(ids) + 1
        assert document.weights[len(ids) :].min() >= 16


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_servers_parser_reads_the_answer(tokenizer, task):
    decoder = recipe.Tokenizer.from_str(tokenizer.to_json().decode())
    for index in range(25):
        example = draw("held-out", task, index)
        prompt = served(
            ConversationInput(recipe.ChatCompletionRequest, body(example, example.prompt))
        )
        ids = Encoder(tokenizer).documents([example])[0].ids.tolist()
        answer = ids[len(prompt.encode(tokenizer)) :]
        plan = ParsePlan(prompt.start, tools=bool(example.tools))
        message = parsed(tokenizer, decoder, prompt, plan, answer)
        assert message["content"] == example.answer["content"]
        assert message["reasoning"] == example.answer.get("reasoning_content", "")
        assert message["calls"] == example.calls


def parsed(tokenizer, decoder, prompt, plan, answer):
    """The streamed deltas of an answer, added up."""
    generator = recipe.ChatCompletionRequest.chunk_generator(prompt.converted, "id", "nano")
    parser = OutputParser(tokenizer, decoder, plan, generator, 1, TokenCounts())
    chunks = parser.start(1, 0, "test")
    for id in answer:
        chunks += parser.push(id)
    chunks += parser.finish("stop")
    content, reasoning, calls = "", "", []
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                if function.get("name"):
                    calls.append({"name": function["name"], "arguments": ""})
                calls[-1]["arguments"] += function.get("arguments") or ""
    calls = [call | {"arguments": json.loads(call["arguments"])} for call in calls]
    return {"content": content, "reasoning": reasoning, "calls": calls}


def test_weights_lie_on_what_the_assistant_says(tokenizer):
    seen = set()
    for example in examples():
        document = Encoder(tokenizer).documents([example])[0]
        answer = document.weights >= 16
        runs = np.flatnonzero(np.diff(answer.astype(int)) == 1)
        turns = [m for m in example.messages if m["role"] == "assistant"]
        assert len(runs) == len(turns)
        ends = np.flatnonzero(document.ids == 1)
        assert len(ends) == len(turns) and answer[ends].all()
        heads = tokenizer.special_id("<think>"), tokenizer.special_id("</think>")
        assert all(document.ids[run] in heads for run in runs)
        seen |= set(document.weights.tolist())
    assert seen == {0, 1, 2, 16, 32, 48, 64}


def test_special_tokens_in_a_request_stay_text(tokenizer):
    messages = [
        {"role": "user", "content": f"{EOS}</think>"},
        {"role": "assistant", "content": "x"},
    ]
    document = Encoder(tokenizer).documents([Example("chat", messages, False, Check("open"))])[0]
    ids = document.ids.tolist()
    assert ids.count(1) == ids.count(tokenizer.special_id("</think>")) == 1
    assert tokenizer.decode(ids).count("</think>") == 2


def document(*ids):
    return Document(np.array(ids, np.uint16), np.full(len(ids), 16, np.uint8))


def test_packing_keeps_documents_whole():
    documents = [document(0, *range(100 + i, 110 + i), 1) for i in range(40)]
    corpus = CorpusStream([np.arange(500, 900, dtype=np.uint16)], 0, 1, seed=0)
    rows = list(pack(documents, 64, corpus, seed=0))
    assert all(len(row.ids) == len(row.weights) == 64 and row.ids[0] == 0 for row in rows)
    joined = [",".join(map(str, row.ids)) + "," for row in rows]
    for one in documents:
        assert sum(",".join(map(str, one.ids)) + "," in row for row in joined) == 1
    padding = np.concatenate([row.weights[row.ids == 2] for row in rows])
    assert not padding.any()
    with pytest.raises(ValueError, match="does not fit"):
        list(pack(documents, 8, corpus, seed=0))


def test_corpus_rows_go_through_every_file():
    files = [np.full(30, 7, np.uint16), np.full(200, 8, np.uint16)]
    corpus = CorpusStream(files, 0, 1, seed=0)
    rows = [corpus_row(80, corpus) for _ in range(4)]
    ids = np.concatenate([row.ids for row in rows])
    assert {7, 8} <= set(ids.tolist()) and (ids == 1).any()
    assert all((row.weights[row.ids == 0] == 0).all() for row in rows)
    with pytest.raises(ValueError, match="corpus is empty"):
        CorpusStream([np.zeros(0, np.uint16)], 0, 1, seed=0)


TRAINED = [text for text in TEXTS if not text.held_out]


def test_shards_are_deterministic_and_apart(tokenizer, tmp_path):
    first, second = (Maker(tokenizer, TRAINED, "training", 0).short(40) for _ in range(2))
    held_out = Maker(tokenizer, [t for t in TEXTS if t.held_out], "held-out", 0).short(40)
    other = Maker(tokenizer, TRAINED, "training", 0, part=1).short(40)
    said = write_shard(tmp_path, "short", first)
    tokens, weights = (np.load(tmp_path / f"short_{n}.npy") for n in ("tokens", "weights"))
    assert tokens.shape == weights.shape == (said["rows"], 1025) == (40, 1025)
    assert (tokens.dtype, weights.dtype) == (np.uint16, np.uint8)
    assert np.array_equal(tokens, second.arrays()["tokens"])
    for rows in (held_out.rows, other.rows):
        assert {bytes(row.ids) for row in first.rows}.isdisjoint(bytes(r.ids) for r in rows)
    assert set(said["tokens"]) == {*TASKS, "corpus"}
    assert (tokens == 0).sum(axis=1).max() <= 24


def test_another_machine_makes_the_same_rows_from_the_corpus_file(tmp_path):
    corpus = tmp_path / "corpus.jsonl.xz"
    write_corpus(corpus, [Source("a", "1", "MIT", ())], TEXTS)
    sources, texts = read_corpus(corpus)
    assert texts == TEXTS and sources == [Source("a", "1", "MIT", ())]
    made = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        said = make_training(Plan(corpus, NANO, folder, 3, parts=2, short=3, long=1), workers)
        assert said["long"]["rows"] == 2 and said["long"]["tokens"]["retrieval"] > 0
        made.append(np.load(folder / "short_tokens.npy"))
    assert np.array_equal(*made) and (made[0] > 0).any(axis=1).all()
    assert not np.array_equal(made[0][:3], made[0][3:])


def test_long_rows_ask_for_several_facts(tokenizer):
    shard = Maker(tokenizer, TRAINED, "training", 0).long(4)
    assert all(len(row.ids) == 8193 for row in shard.rows)
    weights = np.stack([row.weights for row in shard.rows])
    assert (weights == 64).any() and (weights == 48).any()
    with pytest.raises(ValueError, match="no paragraphs"):
        Maker(tokenizer, [Text("a", "b", "x", False)], "training", 0).long(1)
    example = planted_fact(rng_of("training", "x", 0), 500, questions=4)
    assert [m["role"] for m in example.messages] == ["user", "assistant"] * 4
    assert len({m["content"] for m in example.messages}) == 8


def test_cleaning_drops_people_rights_and_addresses():
    text = "# Copyright 2020 The Authors\n# Licensed under X\n\nimport re\n"
    text += "x = 1  # by someone@example.org\n# see https://example.org/x\ny = 2\n"
    assert clean(text, code=True) == "import re\ny = 2\n"
    assert clean("# an idea of Thomas Nobody\nx = 1\n", code=True) == "x = 1\n"
    references = "Text.\n.. [1] A. Nobody, Title,\n       Place.\nMore.\n"
    assert clean(references, code=False) == "Text.\nMore.\n"
    assert (
        clean("As in J. D. Nobody's book.\nKept, e.g. this.\n", code=False) == "Kept, e.g. this.\n"
    )
