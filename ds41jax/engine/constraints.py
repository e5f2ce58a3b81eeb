"""What an output must look like: the constraints that a request can carry.

A constraint is data; `ConstraintCompiler` turns it into matchers that say which tokens may come next.
"""

from dataclasses import dataclass


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
