"""A constraint as a client states it: plain data that tells whether two are the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "grammar", "choices", "token_ids"]


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """One constraint.

    `source` is a JSON schema (text), a regular expression, a grammar in xgrammar's EBNF whose first rule is `root`, the
    texts to choose from, or the ids of the tokens that are allowed.
    """

    kind: Kind
    source: str | tuple[str, ...] | tuple[int, ...]


def choices_grammar(choices: tuple[str, ...]) -> str:
    """The grammar of one of these texts, each not empty."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
