"""What an output must look like: the constraints that a request can carry.

A constraint is data; `ConstraintCompiler` turns it into matchers that say which tokens may come
next. The grammars are xgrammar's; `grammar_tools` makes the constraints of requests with tools.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds41jax.engine.grammar_matcher import CompiledConstraint
from ds41jax.engine.grammar_schema import (
    ConstraintError,
    check_pattern,
    check_schema,
    parse_json,
    repeated_groups,
)
from ds41jax.engine.xgrammar_import import import_xgrammar
from ds41jax.tokenizer import Tokenizer, TokenizerError

# Stands for the marker token of tool calls in a structural tag. JSON cannot contain it, and the
# byte token that spells it is never allowed.
MARKER = "\x01"
MARKER_TOKEN = "｜DSML｜"
# Marks of places in images, which answers may contain.
_GROUNDING = frozenset(
    f"<｜{slash}{name}｜>" for name in ("polygon", "point", "box", "ref") for slash in ("", "/")
)
MAX_TAG_BYTES = 16 << 20
CACHE_ENTRIES = 64
CACHE_BYTES = 512 << 20
# Beyond these a grammar's masks are made as they are needed, a few milliseconds each, rather than
# while compiling, which could take minutes.
_EAGER_BYTES = 64 << 10
_EAGER_REPEATS = 256
_EAGER_GROUPS = 3
_EAGER_UNBOUNDED = 64


@dataclass(frozen=True)
class Constraint:
    """A grammar for the output.

    Attributes:
      kind: "json_object", "json_schema", "regex" or "structural_tag".
      source: the schema or the structural tag as JSON text, the regular expression, or "".
      strict: for a schema, refuse what the engine cannot enforce exactly.
      after_thinking: the grammar begins after the token that closes the thinking block.
    """

    kind: str
    source: str = ""
    strict: bool = True
    after_thinking: bool = False


class ConstraintCompiler:
    """Compiles constraints for one vocabulary and keeps the latest. Thread-safe.

    Raises:
      ImportError: if xgrammar is missing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        think_end_id: int | None = None,
        max_whitespace: int | None = None,
    ):
        """Prepares the vocabulary, in about half a second.

        Args:
          tokenizer: what the tokens stand for.
          vocab_size: width of the logits.
          stop_token_ids: what ends an output.
          think_end_id: what closes the thinking block.
          max_whitespace: of JSON answers, in a row; models that lose their way tend to write white
            space for ever. A limit triples the time of a mask.
        """
        if not stop_token_ids:
            raise ValueError("a constraint can only end with a stop token; none is given")
        self._xgrammar = import_xgrammar()
        self._vocab_size = vocab_size
        self._stop = tuple(stop_token_ids)
        self._think_end = think_end_id
        self._max_whitespace = max_whitespace
        self._marker_id = _find_special(tokenizer, MARKER_TOKEN)
        plain = _grammar_vocabulary(tokenizer, vocab_size, self._stop)
        marked = list(plain)
        if self._marker_id is not None:
            marked[self._marker_id] = MARKER.encode()
        self._plain = self._compilers(plain)
        self._marked = self._compilers(marked)
        self._cache: OrderedDict[tuple[str, str, bool], Any] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compiles, or finds, a grammar. May take a tenth of a second; other threads can run.

        Raises:
          ConstraintError: if the constraint is malformed, too large or cannot be enforced.
        """
        if constraint.after_thinking and self._think_end is None:
            raise ConstraintError("the vocabulary has no token that closes the thinking block")
        key = (constraint.kind, constraint.source, constraint.strict)
        grammar = self._cached(key)
        if grammar is None:
            with self._compile_lock:
                grammar = self._cached(key)
                if grammar is None:
                    grammar = self._compile(constraint)
                    self._keep(key, grammar)
        forbidden = set(self._stop)
        if constraint.kind == "structural_tag" and self._marker_id is not None:
            forbidden.add(self._marker_id)
        return CompiledConstraint(
            grammar,
            self._vocab_size,
            self._stop,
            self._think_end if constraint.after_thinking else None,
            frozenset(forbidden),
        )

    def _compilers(self, vocabulary: list[bytes]) -> tuple[Any, Any]:
        """One that makes all masks while compiling, and one that makes them as needed."""
        info = self._xgrammar.TokenizerInfo(
            vocabulary,
            self._xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=list(self._stop),
        )
        eager, lazy = (
            self._xgrammar.GrammarCompiler(
                info, max_threads=2, cache_enabled=False, enable_dynamic_compilation=dynamic
            )
            for dynamic in (False, True)
        )
        return eager, lazy

    def _cached(self, key: tuple[str, str, bool]) -> Any:
        with self._cache_lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _keep(self, key: tuple[str, str, bool], grammar: Any) -> None:
        with self._cache_lock:
            self._cache[key] = grammar
            # Grammars whose masks are made as needed have grown since they were added.
            used = sum(kept.memory_size_bytes for kept in self._cache.values())
            while len(self._cache) > 1 and (len(self._cache) > CACHE_ENTRIES or used > CACHE_BYTES):
                used -= self._cache.popitem(last=False)[1].memory_size_bytes

    def _compile(self, constraint: Constraint) -> Any:
        kind, source = constraint.kind, constraint.source
        patterns: list[tuple[str, str]] = []
        if kind == "json_schema":
            patterns = check_schema(parse_json(source, "the schema"), strict=constraint.strict)
        elif kind == "regex":
            check_pattern("regex", source)
            patterns = [("regex", source)]
        elif kind == "structural_tag":
            parse_json(source, "the structural tag", MAX_TAG_BYTES)
            if self._marker_id is None:
                raise ConstraintError("the vocabulary has no marker token for tool calls")
        elif kind != "json_object":
            raise ConstraintError(f"unknown kind of constraint {kind!r:.40}")
        for path, pattern in patterns:
            self._check_pattern(path, pattern)
        try:
            return self._build(kind, source, constraint.strict)
        except (RuntimeError, ValueError) as error:
            raise ConstraintError(_public(error)) from error

    def _build(self, kind: str, source: str, strict: bool) -> Any:
        eager, lazy = self._marked if kind == "structural_tag" else self._plain
        compiler = lazy if _is_heavy(source) else eager
        if kind == "regex":
            return compiler.compile_regex(source)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(source)
        return compiler.compile_json_schema(
            source if kind == "json_schema" else '{"type": "object"}',
            strict_mode=strict and kind == "json_schema",
            max_whitespace_cnt=self._max_whitespace,
        )

    def _check_pattern(self, path: str, pattern: str) -> None:
        try:
            self._xgrammar.Grammar.from_regex(pattern)
        except (RuntimeError, ValueError) as error:
            raise ConstraintError(f"{path[:200]}: {_public(error)}") from error


def _find_special(tokenizer: Tokenizer, spelling: str) -> int | None:
    try:
        return tokenizer.special_id(spelling)
    except TokenizerError:
        return None


def _grammar_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]
) -> list[bytes]:
    """What each token stands for in a grammar. The empty ones are never allowed by it."""
    vocabulary = [b""] * vocab_size
    for id in range(min(vocab_size, tokenizer.vocab_size)):
        spelling = tokenizer.token(id)
        special = spelling is not None and _find_special(tokenizer, spelling) is not None
        text = tokenizer.token_bytes(id)
        if id in stop_token_ids or MARKER.encode() in text:
            continue
        if not special or spelling in _GROUNDING:
            vocabulary[id] = text
    return vocabulary


def _is_heavy(source: str) -> bool:
    """Whether compiling could take long: large, or with many or large repetitions."""
    if len(source) > _EAGER_BYTES or repeated_groups(source) > _EAGER_GROUPS:
        return True
    if source.count("*") + source.count("+") > _EAGER_UNBOUNDED:
        return True
    repeats = 1
    for least, most in re.findall(r"\{(\d+)(?:,(\d*))?\}", source):
        repeats *= max(1, int((most or least)[:9]))
        if repeats > _EAGER_REPEATS:
            return True
    return False


def _public(error: Exception) -> str:
    """The library's message without the places in its source."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S*?:\d+: ", "", str(error)).strip()
    return text[:300] or "the grammar could not be compiled"
