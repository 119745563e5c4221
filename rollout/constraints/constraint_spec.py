"""A constraint as a client states it: plain data; equal constraints compare equal."""

import json
from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "grammar", "choices", "token_ids"]


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """One constraint.

    `source` by kind: a JSON schema as text, a regular expression, a grammar in xgrammar's EBNF with a rule `root`, the
    texts to choose from, or the ids of the allowed tokens.

    It holds from the first token, or `after` a marker: a text or token ids. Before it the completion is free, and white
    space may follow it, except that token ids allow these tokens only.
    """

    kind: Kind
    source: str | tuple[str, ...] | tuple[int, ...]
    after: str | tuple[int, ...] | None = None


def choices_grammar(choices: tuple[str, ...]) -> str:
    """A grammar that allows exactly these texts; none of them is empty."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
