"""From emitted tokens to the chunks of a protocol, whether they are streamed or added up.

The parsing itself, reasoning, content, tool calls and stop strings, is deepseek-recipe's; the tool
markup is mended on its way in.
"""

from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from ds41jax.engine.request import TokenLogprobs
from ds41jax.serving.tool_markup import DSML, OutputToken, ToolMarkupFilter
from ds41jax.serving.usage import TokenCounts
from ds41jax.tokenizer import Tokenizer

STAGES = (
    ("reasoning", recipe.ThinkingInitialStage.ReasoningStart),
    ("reasoning_continuation", recipe.ThinkingInitialStage.ReasoningContinuation),
    ("content_continuation", recipe.ThinkingInitialStage.ContentContinuation),
)
# For output that is no turn of a conversation; a NUL keeps the text from spelling these.
_NO_MARKERS = {"thinking_start": "\0think", "thinking_end": "\0/think", "dsml": "\0dsml"}


@dataclass(frozen=True)
class ParsePlan:
    """How an output is to be read.

    Attributes:
      start: "reasoning", "reasoning_continuation", "content", "content_continuation", "tool_block",
        or "text" for output in which no marker has a meaning.
      tools: tool markup is parsed.
      json_output: JSON is expected; a code fence around it is dropped.
      stop: strings that end the output, matched in content only.
    """

    start: str = "content"
    tools: bool = False
    json_output: bool = False
    stop: tuple[str, ...] = ()

    def options(self) -> recipe.ParsingOptions:
        """The same for deepseek-recipe."""
        stage = "content_continuation" if self.start == "text" else self.start
        options = recipe.ParsingOptions(
            parse_tool_calls=self.tools,
            starts_in_tool_calls=self.start == "tool_block",
            parse_json_output=self.json_output,
            thinking_initial_stage=dict(STAGES).get(stage),
            stop_sequences=list(self.stop),
        )
        if self.start == "text":
            options.special_tokens = recipe.SpecialTokens(**_NO_MARKERS)
        return options


class OutputParser:
    """One output: `start`, a `push` for each token until `finished`, `finish`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: recipe.Tokenizer,
        plan: ParsePlan,
        generator: Any,
        eos: int,
        counts: TokenCounts,
    ):
        """A parser that keeps the counts.

        Args:
          decoder: deepseek-recipe's copy of the tokenizer.
          generator: what makes its chunks.
        """
        self._processor = recipe.StreamProcessor(generator, plan.options(), decoder)
        self._filter = ToolMarkupFilter(tokenizer) if plan.tools else None
        self._eos = eos
        self._counts = counts
        self._reasoning = plan.start.startswith("reasoning")
        ends = ["</think>", DSML] if plan.tools else ["</think>"]
        self._reasoning_ends = (
            {tokenizer.special_id(word) for word in ends} if self._reasoning else ()
        )

    @property
    def finished(self) -> bool:
        """A stop string has ended the output."""
        return self._processor.finished

    def start(self, prompt_tokens: int, cached_tokens: int, fingerprint: str) -> list[Any]:
        """The chunks that open the answer."""
        usage = recipe.PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        ready = recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint)
        return self._processor.push(ready)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> list[Any]:
        """The chunks that a token adds. The end token is counted but is no text."""
        self._counts.completion += 1
        if token_id == self._eos:
            return []
        self._reasoning = self._reasoning and token_id not in self._reasoning_ends
        self._counts.reasoning += self._reasoning
        pair = None if logprobs is None else (logprobs.logprob, logprobs.top)
        token = OutputToken(token_id, pair)
        return self._parsed(self._filter.push(token) if self._filter else [token], pair is not None)

    def finish(self, reason: str) -> list[Any]:
        """The chunks that close the answer; the reason is "stop" or "length"."""
        chunks = []
        if not self.finished and self._filter:
            held = self._filter.flush()
            chunks += self._parsed(held, any(token.logprobs for token in held))
        if not self.finished:
            kind = recipe.InferenceFinishReason
            ended = kind.Length if reason == "length" else kind.Stop
            chunks += self._processor.push(recipe.InferenceChunk.finish(ended))
        return chunks + self._processor.finish()

    def _parsed(self, tokens: list[OutputToken], with_logprobs: bool) -> list[Any]:
        if not tokens:
            return []
        pairs = [token.logprobs or (0.0, ()) for token in tokens] if with_logprobs else None
        chunk = recipe.InferenceChunk.tokens([token.id for token in tokens], pairs)
        return self._processor.push(chunk)
