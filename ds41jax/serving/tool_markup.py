"""Mends tool calls in the model's output before deepseek-recipe parses them.

The parser of deepseek-recipe 0.2 passes some imperfect calls on as broken JSON: a `string="false"`
value that is not JSON, a missing or odd `string` attribute, further attributes, and parameter names
with quotes or blanks. A client that gets broken arguments asks the model again, often for ever. So
this module reads the parameters of a tool block and puts a well-formed one in the place of an
imperfect one. Everything else passes through untouched, token by token.

A value that is not declared a plain string is held back until it is complete, since only then is it
known whether it is JSON.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ds41jax.tokenizer import StreamDecoder, Tokenizer

DSML = "｜DSML｜"
Logprobs = tuple[float, tuple[tuple[int, float], ...]]
MAX_TAG = 4096  # longer than any opening tag; what goes on without an end is no tag

_TAG_START = re.compile(r" ?parameter(?=[\s>/])")
_TAG_END = re.compile(r'"\s*/?>')
_PLAIN_TAG = re.compile(r' ?parameter name="[\w.:-]+" string="(true|false)">')
_ATTRIBUTE = re.compile(r'(?:^|\s)(?!name=)([\w-]+)="([^"]*)"(?=\s|$)')
_NAME = re.compile(r'name="(.*)"', re.DOTALL)
_UNSAFE = re.compile(r"[^\w.:-]", re.ASCII)


@dataclass
class OutputToken:
    """A token on its way to the parser, with its log probabilities if they were asked for."""

    id: int
    logprobs: Logprobs | None = None


@dataclass
class _Held:
    """Tokens held back and the text they spell; real DSML tokens are not part of the text."""

    decoder: StreamDecoder
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""

    def push(self, token: OutputToken) -> None:
        self.tokens.append(token)
        self.text += self.decoder.push(token.id)

    @property
    def whole(self) -> bool:
        return self.decoder.held_bytes == 0


class ToolMarkupFilter:
    """One output's filter: `push` each token, `flush` at the end."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._dsml = tokenizer.special_id(DSML)
        self._think_end = tokenizer.special_id("</think>")
        self._state: Callable[[OutputToken], list[OutputToken]] = self._outside
        self._held = _Held(StreamDecoder(tokenizer))
        self._name = ""
        self._tail = b""  # what stands before a DSML token: "<" opens, "</" closes

    def push(self, token: OutputToken) -> list[OutputToken]:
        """Takes a token; returns those that may go on."""
        return self._state(token)

    def flush(self) -> list[OutputToken]:
        """What is held back when the output ends."""
        tokens, text = self._take()
        tag = text[: _tag_end(text)]
        if self._state != self._value or _PLAIN_TAG.fullmatch(tag):
            return tokens
        return self._encoded(f' parameter name="{self._name}" string="true">{text[len(tag) :]}')

    def _take(self) -> tuple[list[OutputToken], str]:
        held, self._held = self._held, _Held(StreamDecoder(self._tokenizer))
        self._tail = (self._tail + held.text.encode())[-2:]
        return held.tokens, held.text

    def _release(self) -> list[OutputToken]:
        self._state = self._outside
        return self._take()[0]

    def _outside(self, token: OutputToken) -> list[OutputToken]:
        if token.id == self._dsml:
            if self._tail.endswith(b"<"):
                self._state = self._tag
        else:
            self._tail = (self._tail + self._tokenizer.token_bytes(token.id))[-2:]
        return [token]

    def _tag(self, token: OutputToken) -> list[OutputToken]:
        """Behind a DSML token: reads a parameter's opening tag, lets anything else go."""
        if token.id in (self._dsml, self._think_end):
            return [*self._release(), token]
        self._held.push(token)
        text = self._held.text
        if not _may_open_parameter(text) or len(text) > MAX_TAG:
            return self._release()
        end = _tag_end(text)
        if end is None or not self._held.whole:
            return []
        return self._opened(text[:end], text[end:])

    def _opened(self, tag: str, rest: str) -> list[OutputToken]:
        plain = _PLAIN_TAG.fullmatch(tag)
        if plain is not None and plain[1] == "true":
            return self._release()
        name, flag = _attributes(tag)
        self._name = _escaped(name)
        if flag == "true" or tag.endswith("/>"):
            head = self._encoded(f' parameter name="{self._name}" string="true">')
            if tag.endswith("/>"):  # the parser knows no empty element for a parameter
                head += [
                    *self._encoded("</"),
                    OutputToken(self._dsml),
                    *self._encoded(" parameter>"),
                ]
            self._release()
            return head + self._encoded(rest)
        self._state = self._value
        return []

    def _value(self, token: OutputToken) -> list[OutputToken]:
        """Holds a value back until a closing tag: only then is it known to be JSON or not."""
        self._held.push(token)
        if token.id != self._dsml:
            return []
        end = _tag_end(self._held.text)
        body = self._held.text[end:].removesuffix(DSML)
        if not body.endswith(("</", "<")):
            return []
        tag, (held, _) = self._held.text[:end], self._take()
        self._state = self._outside if body.endswith("</") else self._tag
        closing = "</" if body.endswith("</") else "<"
        value = body.removesuffix(closing)
        if _is_json(value):
            if _PLAIN_TAG.fullmatch(tag):
                return held
            flag = "false"
        else:
            flag = "true"
        head = self._encoded(f' parameter name="{self._name}" string="{flag}">{value}{closing}')
        return [*head, held[-1]]

    def _encoded(self, text: str) -> list[OutputToken]:
        return [OutputToken(id, (0.0, ())) for id in self._tokenizer.encode(text)]


def _may_open_parameter(text: str) -> bool:
    """Whether the text begins a parameter's opening tag, or still may."""
    return _TAG_START.match(text) is not None or any(
        head.startswith(text) for head in (" parameter", "parameter")
    )


def _tag_end(text: str) -> int | None:
    """Index behind the `>` that ends an opening tag; the name in it may hold one too."""
    quoted = _TAG_END.search(text)
    if quoted is not None:
        return quoted.end()
    bare = text.find(">")
    return bare + 1 if bare >= 0 and '"' not in text[:bare] else None


def _attributes(tag: str) -> tuple[str, str]:
    """Name and `string` flag of an opening tag, whatever else stands in it, in any order."""
    body = re.sub(r"^ ?parameter\s*|\s*/?>$", "", tag)
    flag = ""
    while (found := _last_attribute(body)) is not None:
        if found[1] == "string":
            flag = flag or found[2]
        body = body[: found.start()] + body[found.end() :]
    name = _NAME.search(body)
    return (name[1] if name else body.strip()), flag


def _last_attribute(body: str) -> re.Match[str] | None:
    """An attribute other than the name, at either end of the tag's body."""
    matches = [m for m in _ATTRIBUTE.finditer(body) if m.end() == len(body) or m.start() == 0]
    return matches[-1] if matches else None


def _escaped(name: str) -> str:
    """A parameter name that is safe between quotes and, unescaped by the client, the same again.

    The parser copies names into JSON as they are, and ends them at a quote or a blank.
    """

    def escape(match: re.Match[str]) -> str:
        units = match[0].encode("utf-16-be", "surrogatepass").hex()
        return "".join("\\u" + units[i : i + 4] for i in range(0, len(units), 4))

    return _UNSAFE.sub(escape, name)


def _is_json(value: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(value, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
