"""Constrained decoding: what each kind of constraint lets through, and what it refuses."""

import json
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds41jax.engine import xgrammar_import
from ds41jax.engine.constraints import Constraint, ConstraintCompiler
from ds41jax.engine.grammar_masks import apply_masks
from ds41jax.engine.grammar_matcher import (
    Matcher,
    mask_words,
    masks_for_draft,
    row_of,
    without,
)
from ds41jax.engine.grammar_schema import ConstraintError, check_schema
from ds41jax.engine.grammar_tools import tool_constraint
from ds41jax.tokenizer import Tokenizer, byte_tokenizer

VOCAB, EOS = 129280, 1
BLOCK, END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "grün", None]},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["name", "age", "colour", "home", "tags"],
    "additionalProperties": False,
}
GOOD = {"name": "Zoë 😀", "age": 42, "colour": "grün", "home": {"zip": "12345"}, "tags": ["a"]}


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_vendor()


@pytest.fixture(scope="session")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer, VOCAB, (EOS,), tokenizer.special_id("</think>"))


def parameter(key: str, value: str, text: bool = True) -> str:
    kind = "true" if text else "false"
    return f'<｜DSML｜ parameter name="{key}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    body = "".join(parameters) or "\n"
    return f'<｜DSML｜ invoke name="{name}">\n{body}</｜DSML｜ invoke>\n'


def function(name: str, schema=None, strict=None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def accepts(matcher: Matcher, tokens) -> bool:
    """Whether all tokens are allowed, by the masks and by the matcher alike."""
    row = np.empty(matcher.words, np.int32)
    for token in tokens:
        matcher.fill_mask(row)
        allowed = bool(row[token // 32] >> (token % 32) & 1)
        assert matcher.accept(token) == allowed
        if not allowed:
            return False
    return True


def matches(compiler, tokenizer, constraint, text, special=True) -> bool:
    matcher = compiler.compile(constraint).matcher()
    ids = tokenizer.encode_special(text) if special else tokenizer.encode(text)
    return accepts(matcher, ids) and matcher.complete and matcher.accept(EOS) and matcher.finished


def test_json_object(compiler, tokenizer):
    def ok(text):
        return matches(compiler, tokenizer, Constraint("json_object"), text)

    assert ok('{"a": [1, -2.5e3, {"b": null}], "é": "\\n😀"}')
    assert ok(json.dumps(GOOD, indent=4, ensure_ascii=False))
    assert not ok("[1]") and not ok('{"a": 1') and not ok('{"a": 1}x') and not ok("")
    assert (
        not ok('{"a": "<｜User｜>"}')
        and not ok('{"a": "｜DSML｜"}')
        and not ok('{"a": "</think>"}')
    )
    assert ok('{"a": "<｜box｜>1<｜/box｜>"}')


def test_white_space_can_be_bounded():
    tokenizer = byte_tokenizer(512)
    for limit, good in [(None, True), (8, False)]:
        compiler = ConstraintCompiler(tokenizer, 512, (EOS,), max_whitespace=limit)
        text = "{" + "\n" * 40 + "}"
        assert matches(compiler, tokenizer, Constraint("json_object"), text) == good


def test_schema(compiler, tokenizer):
    constraint = Constraint("json_schema", json.dumps(PERSON))

    def ok(**change):
        text = json.dumps({**GOOD, **change}, ensure_ascii=False)
        return matches(compiler, tokenizer, constraint, text)

    assert ok() and ok(colour=None) and ok(tags=[]) and ok(name='quote " and \\ and \n')
    assert not ok(age=151) and not ok(age="1") and not ok(colour="blue") and not ok(extra=1)
    assert not ok(home={"zip": "123"}) and not ok(tags=["a", "b", "c"]) and not ok(home={})


def test_loose_schema_allows_other_properties(compiler, tokenizer):
    source = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    loose = Constraint("json_schema", source, strict=False)
    assert matches(compiler, tokenizer, loose, '{"a": 1, "b": 2}')
    with pytest.raises(ConstraintError, match=r"^\$: .*additionalProperties"):
        compiler.compile(Constraint("json_schema", source))


def test_regex(compiler, tokenizer):
    constraint = Constraint("regex", r"(ja|nein), \d{2,3} é+")
    for text, good in [
        ("ja, 12 éé", True),
        ("nein, 123 é", True),
        ("ja, 1 é", False),
        ("ja", False),
    ]:
        assert matches(compiler, tokenizer, constraint, text) == good


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"uniqueItems": True, "type": "array"}, r"\$\.properties\.x: .*uniqueItems"),
        ({"not": {"type": "null"}}, r"\$\.properties\.x: .*not"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, r"\$\.properties\.x: allOf"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, r"\$\.properties\.x: oneOf"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, r"\$\.properties\.x: anyOf"),
        ({"type": "string", "format": "foo"}, r"\$\.properties\.x: the format 'foo'"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, r"\$\.properties\.x: pattern"),
        ({"type": "string", "pattern": "(?=a)"}, r"\$\.properties\.x: .*Lookahead"),
        ({"type": "object", "properties": {}}, r"\$\.properties\.x: .*additionalProperties"),
        ({"type": "array", "items": {"type": "foo"}}, r"\$\.properties\.x\.items: unknown type"),
        ({"$ref": "#/$defs/no"}, r"\$\.properties\.x: there is no"),
        ({"$ref": "http://x/y"}, r"\$\.properties\.x: only references"),
        ({"enum": []}, r"\$\.properties\.x: enum"),
        ({"type": "string", "enum": [1]}, r"\$\.properties\.x: enum"),
        (False, r"\$\.properties\.x: false"),
        (3, r"\$\.properties\.x: a schema"),
    ],
)
def test_refused_schemas_name_the_place(compiler, change, where):
    schema = {"type": "object", "properties": {"x": change}, "additionalProperties": False}
    schema["required"] = ["x"]
    with pytest.raises(ConstraintError, match=where) as error:
        compiler.compile(Constraint("json_schema", json.dumps(schema)))
    assert "cpp" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "source",
    [
        "[" * 100_000,
        "{nonsense",
        '{"type": "object", "x": NaN}',
        json.dumps({"type": "object", "description": "x" * (1 << 20)}),
        json.dumps({"anyOf": [{"type": "null"}] * 5000}),
    ],
)
def test_bounded_schemas(compiler, source):
    with pytest.raises(ConstraintError):
        compiler.compile(Constraint("json_schema", source, strict=False))


def test_deep_schema_is_refused():
    schema = {"type": "null"}
    for _ in range(64):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConstraintError, match="64 deep"):
        check_schema(schema, strict=False)


@pytest.mark.parametrize(
    ("pattern", "compiles"),
    [
        ("(a|[b-z].)*" * 40, False),
        (".*" * 100, False),
        ("a" * 5000, False),
        (r"(a)\1", False),
        ("[a-z]{1,100}" * 300, True),
        ("((a{100}){100}){100}", True),
    ],
)
def test_no_regex_takes_long(compiler, pattern, compiles):
    began = time.perf_counter()
    if compiles:
        compiler.compile(Constraint("regex", pattern))
    else:
        with pytest.raises(ConstraintError):
            compiler.compile(Constraint("regex", pattern))
    assert time.perf_counter() - began < 5


STRICT = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "count": {"type": "integer"},
        "either": {"anyOf": [{"type": "string", "pattern": "^[^a]*$"}, {"type": "number"}]},
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "day": {"type": "string", "format": "date"},
        "where": PERSON["properties"]["home"],
    },
    "additionalProperties": False,
}
STRICT["required"] = list(STRICT["properties"])
TOOLS = [
    function("f", STRICT, True),
    function("loose"),
    function("none", {"type": "object", "properties": {}, "additionalProperties": False}, True),
]
CALL = {
    "text": parameter("text", 'raw "text"\n</b> 你好 ｜'),
    "unit": parameter("unit", "C"),
    "count": parameter("count", "-4", False),
    "either": parameter("either", "1.5", False),
    "short": parameter("short", "é😀"),
    "day": parameter("day", "2026-01-31"),
    "where": parameter("where", '{"zip": "12345"}', False),
}


@pytest.mark.parametrize(
    ("key", "line", "good"),
    [
        ("text", parameter("text", ""), True),
        ("text", parameter("text", "a ｜DSML｜ b"), False),
        ("text", parameter("texts", ""), False),
        ("unit", parameter("unit", "K"), False),
        ("count", parameter("count", "4"), False),
        ("count", parameter("count", "4.5", False), False),
        ("either", parameter("either", "</x>"), True),
        ("either", parameter("either", "bca"), False),
        ("short", parameter("short", "a"), False),
        ("short", parameter("short", "abcd"), False),
        ("day", parameter("day", "2026-13-01"), False),
        ("where", parameter("where", '{"zip": 1}', False), False),
        ("where", "", False),
    ],
)
def test_strict_arguments(compiler, tokenizer, key, line, good):
    constraint = tool_constraint(TOOLS, "required")
    call = invoke("f", *{**CALL, key: line}.values())
    assert matches(compiler, tokenizer, constraint, "\n\n" + BLOCK + call + END) == good


def test_tool_choice(compiler, tokenizer):
    def ok(text, choice="auto", special=True, **options):
        constraint = tool_constraint(TOOLS, choice, **options)
        return matches(compiler, tokenizer, constraint, text, special)

    f, none = invoke("f", *CALL.values()), invoke("none")
    loose = invoke("loose", parameter("any-key", "v"), parameter("k", '[1, {"a": null}]', False))
    head = "\n\n" + BLOCK
    assert ok("Just text, 1 < 2 ｜ <b>") and ok("") and ok("a lone ｜DSML｜ marker")
    assert ok("Look:" + head + f + loose + none + END) and ok(head + invoke("loose") + END)
    assert (
        not ok(head + f + END + "more") and not ok(head + END) and not ok(head + invoke("g") + END)
    )
    assert not ok("<｜DSML｜ invoke") and not ok("a</think>b") and not ok(head + f)
    assert ok(head + none + END, "required") and not ok("text", "required")
    assert not ok(head + none + END, "required", special=False)
    assert ok(head + none + END, parallel=False)
    assert not ok(head + none + none + END, parallel=False)
    named = {"type": "function", "function": {"name": "none"}}
    assert ok(none + none + END, named, block_open=True)
    assert not ok(loose + END, named, block_open=True)
    assert tool_constraint(TOOLS, "none") is None and tool_constraint([]) is None


def test_tools_with_a_response_format(compiler, tokenizer):
    response = Constraint("json_schema", json.dumps(PERSON))
    constraint = tool_constraint(TOOLS, response=response)
    good = json.dumps(GOOD, ensure_ascii=False)
    assert matches(compiler, tokenizer, constraint, good)
    assert matches(compiler, tokenizer, constraint, "\n\n" + BLOCK + invoke("none") + END)
    assert not matches(compiler, tokenizer, constraint, "text")
    assert tool_constraint(TOOLS, "none", response=response) is response


def test_refused_tools():
    bad = {"type": "object", "properties": {"x": {"type": "string"}}}
    for tools, choice, message in [
        ([function("f", bad, True)], "auto", r"tool f: \$: .*additionalProperties"),
        ([function("f"), function("f")], "auto", "same name"),
        ([function("bad name")], "auto", r"tools\[0\]"),
        ([function("f")], {"type": "function", "function": {"name": "g"}}, "not offered"),
        ([], "required", "needs tools"),
        ([function(f"f{n}") for n in range(129)], "auto", "limit is 128"),
    ]:
        with pytest.raises(ConstraintError, match=message):
            tool_constraint(tools, choice)


def test_thinking_boundary(compiler, tokenizer):
    """B064, B093: the grammar begins right after the closing token, also within one round."""
    end = tokenizer.special_id("</think>")
    compiled = compiler.compile(Constraint("json_object", after_thinking=True))
    matcher = compiled.matcher()
    assert accepts(matcher, tokenizer.encode("Let me think: [1")) and matcher.thinking
    assert not matcher.accept(EOS) and not matcher.complete
    thought = matcher.fork()
    brace = tokenizer.encode("{")[0]
    assert matcher.accept(end) and matcher.accept(brace) and not matcher.thinking
    assert not matcher.accept(brace)
    kept, masks = masks_for_draft(thought, [end, brace, brace, brace])
    assert kept == 2 and masks.shape == (3, VOCAB // 32)
    assert thought.thinking
    matcher.rollback(2)
    assert matcher.thinking and matcher.accept(end) and matcher.accept(brace)
    with pytest.raises(ValueError):
        matcher.rollback(1000)


def test_no_unchecked_call_while_thinking(compiler, tokenizer):
    matcher = compiler.compile(tool_constraint(TOOLS, thinking=True)).matcher()
    assert accepts(matcher, tokenizer.encode("I could call <"))
    assert not matcher.accept(tokenizer.special_id("｜DSML｜"))


def test_drafts_of_free_text_are_all_kept(compiler, tokenizer):
    """Free text may end anywhere, which must not end the walk."""
    matcher = compiler.compile(tool_constraint(TOOLS)).matcher()
    draft = tokenizer.encode("Tools are offered but not used here.")[:7]
    kept, masks = masks_for_draft(matcher, draft)
    assert kept == len(draft) and masks.dtype == np.int32
    kept, masks = masks_for_draft(matcher, [*draft[:2], EOS, *draft[2:]])
    assert kept == 2 and masks[2, 0] >> EOS & 1


def test_draft_masks_equal_serial_masks(compiler, tokenizer):
    compiled = compiler.compile(Constraint("json_schema", json.dumps(PERSON)))
    ids = tokenizer.encode(json.dumps(GOOD, ensure_ascii=False))
    matcher, row = compiled.matcher(), np.empty(VOCAB // 32, np.int32)
    kept, masks = masks_for_draft(matcher, ids)
    assert kept == len(ids)
    for token, mask in zip([*ids, EOS], masks, strict=True):
        matcher.fill_mask(row)
        np.testing.assert_array_equal(row, mask)
        assert matcher.accept(token)
    matcher.rollback(len(ids) + 1)
    matcher.fill_mask(row)
    np.testing.assert_array_equal(row, masks[0])


def test_random_walks_are_valid(compiler, tokenizer):
    """Whatever the masks let through matches the schema (mask width == logits width, B058)."""
    import jsonschema

    compiled = compiler.compile(Constraint("json_schema", json.dumps(PERSON)))
    rng = np.random.default_rng(0)
    ends = [tokenizer.encode(end)[0] for end in '"}],:']
    for _ in range(10):
        matcher, out = compiled.matcher(), []
        row = np.empty(mask_words(VOCAB), np.int32)
        while not matcher.finished and len(out) < 600:
            matcher.fill_mask(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            assert bits.shape == (VOCAB,)
            closing = [end for end in ends if bits[end]]
            choices = closing if closing and rng.random() < 0.7 else np.flatnonzero(bits)
            out.append(int(rng.choice(choices)))
            assert matcher.accept(out[-1])
        assert matcher.finished
        jsonschema.validate(json.loads(tokenizer.decode(out[:-1])), PERSON)


@pytest.mark.parametrize("vocab_size", [259, 512, 515])
def test_small_vocabularies(vocab_size):
    tokenizer = byte_tokenizer(vocab_size)
    compiler = ConstraintCompiler(tokenizer, vocab_size, (EOS,))
    assert matches(
        compiler,
        tokenizer,
        Constraint("json_schema", json.dumps(PERSON)),
        json.dumps(GOOD, ensure_ascii=False),
    )
    with pytest.raises(ConstraintError, match="thinking"):
        compiler.compile(Constraint("json_object", after_thinking=True))
    if vocab_size == 259:
        with pytest.raises(ConstraintError, match="marker"):
            compiler.compile(tool_constraint(TOOLS))


def test_forbidding_leaves_something():
    rows = np.stack([row_of([1, 5], 64), row_of([1], 64), np.full(2, -1, np.int32)])
    without(rows, [1, 40])
    assert [len(tokens_of(row)) for row in rows] == [1, 1, 62]
    assert tokens_of(rows[0]) == [5] and tokens_of(rows[1]) == [1]


def tokens_of(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def test_apply_masks():
    rng = np.random.default_rng(0)
    for width in (1, 31, 32, 33, 515):
        allowed = rng.random((3, width)) < 0.5
        packed = np.zeros((3, mask_words(width) * 4), np.uint8)
        packed[:, : -(-width // 8)] = np.packbits(allowed, axis=1, bitorder="little")
        words = packed.view("<i4")
        words[2] = -1
        logits = np.where(allowed, rng.normal(size=allowed.shape), np.nan).astype(np.float32)
        logits[2] = 1.0
        masked = jax.jit(apply_masks)(jnp.asarray(logits), jnp.asarray(words))
        expected = np.where(allowed, logits, -np.inf)
        expected[2] = 1.0
        np.testing.assert_array_equal(masked, expected)


def test_compiler_is_thread_safe_and_bounded(compiler):
    results = []

    def work():
        results.extend(compiler.compile(Constraint("regex", f"a{n}")).grammar for n in range(80))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 320 and len(compiler._cache) <= 64
    again = Constraint("regex", "a79")
    assert compiler.compile(again).grammar is compiler.compile(again).grammar


def _python(code: str, *paths) -> str:
    code = f"import sys; sys.path[:0] = {list(map(str, paths))!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


USE = """
from ds41jax.engine.constraints import Constraint, ConstraintCompiler
from ds41jax.tokenizer import byte_tokenizer
m = ConstraintCompiler(byte_tokenizer(512), 512, (1,)).compile(Constraint("regex", "a")).matcher()
assert not m.accept(3 + 65) and m.accept(byte_tokenizer(512).encode("a")[0]) and m.complete
"""


def test_import_without_torch_leaves_no_trace():
    import importlib.util

    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    check = "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    assert _python(USE + check + "print('fine')").strip() == "fine"


def test_import_with_its_dependencies(tmp_path):
    """The package's own import runs, on stubs of torch and transformers."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "__version__ = '2.8.0'\nclass Tensor: pass\ndef tensor(*a, **k): pass\n"
        "def __getattr__(name):\n"
        "    if name.startswith('_'): raise AttributeError(name)\n"
        "    return name\n"
    )
    (tmp_path / "transformers.py").write_text(
        "class PreTrainedTokenizerBase: pass\nclass PreTrainedTokenizerFast: pass\n"
        "class LogitsProcessor: pass\n"
    )
    lend = "import os; os.environ['TVM_FFI_DISABLE_TORCH_C_DLPACK'] = '1'\n"
    check = "import xgrammar; print(xgrammar.contrib.hf.__name__, 'torch' in sys.modules)"
    assert _python(lend + USE + check, tmp_path).split() == ["xgrammar.contrib.hf", "True"]


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(xgrammar_import, "SUPPORTED_VERSION", "0.1")
    with pytest.raises(ImportError, match=r"works with 0\.1\.\*"):
        xgrammar_import.import_xgrammar()


def test_speed(compiler, tokenizer, record_property):
    """The median step of a walk stays far below a decode round."""
    compiled = compiler.compile(Constraint("json_schema", json.dumps(PERSON)))
    draft = tokenizer.encode(json.dumps(GOOD))[:7]
    times = []
    for _ in range(50):
        matcher = compiled.matcher()
        began = time.perf_counter()
        masks_for_draft(matcher, draft)
        times.append(time.perf_counter() - began)
    record_property("walk_of_7_us", float(np.median(times)) * 1e6)
    assert np.median(times) < 5e-3
