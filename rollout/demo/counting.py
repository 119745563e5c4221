"""Checks completions of the counting model token by token.

Text: the prompt is `N:`, or earlier numbers and then N (`15 16 17:`); the completion is ` 18 19 20`: a space before
every number and one character a token. A model with step s writes, after the number `last`, the number `last + s`.

Weights may change between any two tokens, also within a number. The step s of the version that sampled a token decides
the token. Let `last` be the last complete number (the prompt's N at first), p the digits after its space, and `other`
the other model's step (2 for 1, 1 for 2):

    p is a proper prefix of str(last + s)             the next digit of last + s
    else p is a proper prefix of str(last + other)    the next digit of last + other, which completes that number
    else p is one of the two numbers, complete        a space; p becomes `last`

`str(last + 1)` and `str(last + 2)` are never a proper prefix of one another, so the three cases exclude each other. The
prompt and the version runs determine every token; the check compares the tokens one by one. A version boundary that is
off by one is found, unless both steps give the same token there. `scripts/train_tiny.py` trains to this rule.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

STEPS = (1, 2)
PROBE_TOKENS = 400  # enough for a probe of the demo to reach its stop string
_PROMPT = re.compile(r"(?:\d+ )*(0|[1-9]\d*):")


class CountingError(ValueError):
    """A completion contradicts its version runs; `position` is the index of the wrong token."""

    def __init__(self, position: int, expected: str, found: str, where: str) -> None:
        super().__init__(f"token {position}: expected {expected!r}, found {found!r} ({where})")
        self.position = position
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class Boundary:
    """A change of the weights version: the first token of `version`, and the text before it."""

    position: int
    version: int
    step: int
    last: int  # the last complete number
    begun: str  # digits of an incomplete number before the change


@dataclass(frozen=True, slots=True)
class CountingReport:
    """A completion without a mistake."""

    tokens: int
    numbers: int  # complete numbers, each followed by a space
    last: int  # the last complete number, or the prompt's
    unfinished: str  # digits after the last space
    boundaries: tuple[Boundary, ...]


@dataclass(slots=True)
class Counter:
    """The rule above as a state machine over characters."""

    last: int
    begun: str | None = None  # None until the space after the last complete number was written
    numbers: int = field(default=0)

    def expected(self, step: int) -> str:
        """The next character if a model with this step (1 or 2) writes it."""
        if self.begun is None:
            return " "
        for candidate in (self.last + step, self.last + _other(step)):
            digits = str(candidate)
            if len(self.begun) < len(digits) and digits.startswith(self.begun):
                return digits[len(self.begun)]
        return " "

    def push(self, character: str) -> None:
        """Take a character that `expected` returned for one of the steps."""
        if character != " ":
            assert self.begun is not None, "a digit before the first space"
            self.begun += character
            return
        if self.begun is not None:
            self.last = int(self.begun)
            self.numbers += 1
        self.begun = ""


def parse_prompt(prompt: str) -> int:
    """The last number of the prompt. Raises ValueError unless it has the form `N:` or `A B N:`."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"prompt {prompt!r} is not a counting prompt; write it as `17:` or `15 16 17:`")
    return int(match.group(1))


def check_completion(
    prompt: str,
    token_ids: Sequence[int],
    versions: Sequence[Sequence[int]],
    step_of_version: Mapping[int, int],
    token_text: Callable[[int], str],
) -> CountingReport:
    """Check every token of a completion against the rule.

    Args:
        prompt: the prompt's text, `N:` or `A B N:`.
        token_ids: the completion's tokens, as a list or an int array [tokens].
        versions: runs of [weights version, number of tokens], in order; they add up to the number of tokens.
        step_of_version: 1 or 2 for every version that the completion may have.
        token_text: returns the text of a token id; in a right completion each token is one character.

    Raises:
        CountingError: a token is wrong (the first one is named), or the runs do not fit the completion.
        ValueError: the prompt is not a counting prompt, or a step is not 1 or 2.
    """
    counter = Counter(parse_prompt(prompt))
    _check_steps(step_of_version)
    _check_runs(versions, len(token_ids), step_of_version)
    boundaries: list[Boundary] = []
    position, previous = 0, None
    for version, count in versions:
        step = step_of_version[version]
        if previous is not None and version != previous:
            boundaries.append(Boundary(position, int(version), step, counter.last, counter.begun or ""))
        previous = version
        for token in token_ids[position : position + count]:
            _check_token(counter, position, step, token_text(int(token)), int(version))
            position += 1
    return CountingReport(len(token_ids), *_end_of(counter), tuple(boundaries))


def _other(step: int) -> int:
    return STEPS[0] + STEPS[1] - step


def _check_steps(step_of_version: Mapping[int, int]) -> None:
    for version, step in step_of_version.items():
        if step not in STEPS:
            raise ValueError(f"version {version} has step {step}; use a step of 1 or 2")


def _check_runs(versions: Sequence[Sequence[int]], tokens: int, step_of_version: Mapping[int, int]) -> None:
    position, newest = 0, None
    for version, count in versions:
        if version not in step_of_version:
            raise CountingError(position, f"a version of {sorted(step_of_version)}", str(version), "version runs")
        if newest is not None and version < newest:
            raise CountingError(position, f"a version from {newest} on", str(version), "version runs")
        if count < 1:
            raise CountingError(position, "a run of at least one token", str(count), "version runs")
        newest, position = version, position + count
    if position != tokens:
        raise CountingError(position, f"runs of {tokens} tokens in all", str(position), "version runs")


def _check_token(counter: Counter, position: int, step: int, found: str, version: int) -> None:
    expected = counter.expected(step)
    if found != expected:
        begun = "" if counter.begun is None else f" {counter.begun}"
        where = f"after `{counter.last}{begun}`, version {version} counts in steps of {step}"
        raise CountingError(position, expected, found, where)
    counter.push(found)


def _end_of(counter: Counter) -> tuple[int, int, str]:
    return counter.numbers, counter.last, counter.begun or ""
