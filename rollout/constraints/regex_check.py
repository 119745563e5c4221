"""Finds regular expressions that the compiler would silently misread.

xgrammar (0.2.8) ignores anchors that are not at an end of the text, and takes an unknown letter after a backslash for
the letter itself. In a JSON string it writes quotes, backslashes and control characters unescaped, and ignores
lookaround. It cuts counts of repetitions to 32 bits.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

#: Nested groups are compiled by recursion; enough of them overflow the stack and end the process.
MAX_CHARS = 4096

#: The largest count of repetitions.
MOST_REPETITIONS = 2**31 - 1

#: After a backslash: letters that the compiler knows, or refuses by itself.
_ESCAPES = "dDwWsSnrtfvexuc0" + "bB" + "123456789kpP"
#: Known letters that stand for a control character, or may.
_CONTROLS = "nrtfvec0"
_NUMBERED = {"x": 2, "u": 4}  # hexadecimal digits
_REPEATS = tuple("*+{")
_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')  # an unescaped quote
#: Letters that the compiler takes literally after a backslash in a class; elsewhere it refuses them.
_NO_CLASS = "123456789kpPB"
#: Any escape; the group matches if it is half of a surrogate pair.
_ESCAPE = re.compile(r"\\(?:((?:u\{?|U0000|x0*)[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
#: Any escape; the group matches a number that does not end with its second digit: xgrammar would read on.
_LONG_NUMBER = re.compile(r"\\(?:(x)(?![0-9a-fA-F]{2}(?![0-9a-fA-F]))|.)", re.DOTALL)
_COUNTS = re.compile(r"([0-9]+)(?:,([0-9]+))?")
#: Parts of a grammar: texts, classes, comments and names, or, in the group, numbers. An unclosed part extends to the
#: end: otherwise the search would start again at each quote.
_PART = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|[A-Za-z_][A-Za-z0-9_.-]*|([0-9]+)', re.DOTALL)


def grammar_problem(text: str) -> str | None:
    """The reason to refuse a grammar; None if it is accepted."""
    if "Regex" in text:
        if any(len(part) > MAX_CHARS for part in _QUOTE.split(text)):
            return f"a text of a grammar with 'Regex' has more than {MAX_CHARS} characters; shorten it"
        if problem := _half_of_pair(text.replace("\\\\", "\\")):
            return problem
    return _half_of_pair(text) or _too_many(part[1] for part in _PART.finditer(text))


def regex_problem(text: str, in_json: bool = False) -> str | None:
    """The reason to refuse an expression; None if it is accepted. `in_json`: it is the pattern of a JSON string."""
    if len(text) > MAX_CHARS:
        return f"it has more than {MAX_CHARS} characters; shorten it"
    elements = list(_elements(text))
    if problem := _long_number(text) or _half_of_pair(text) or _not_known(text, elements, in_json):
        return problem
    groups: list[tuple[bool, bool]] = []  # open ones: (at the beginning of the text, with an anchor)
    begins, anchored = True, False
    for (at, element), ends in zip(elements, _ends(elements), strict=True):
        repeated = text.startswith(_REPEATS, at + 1)
        if element in ("^", "$"):
            if not (begins if element == "^" else ends) or repeated or text.startswith("?", at + 1):
                return f"{element!r} at character {at} is not at an end of the text; leave it out"
            anchored = True
        elif element.startswith("("):
            groups.append((begins, anchored))
            anchored = False
        elif element == "|":
            begins = groups[-1][0] if groups else True
        elif element == ")" and groups:
            if anchored and repeated:
                return f"an anchor is repeated with the group that ends at character {at}; leave it out"
            begins, anchored = False, groups.pop()[1] or anchored
        else:
            begins = False
    return None


def _not_known(text: str, elements: Sequence[tuple[int, str]], in_json: bool) -> str | None:
    """The first element that is misread wherever it stands."""
    for at, element in elements:
        if element == "(" and text.startswith(("?=", "?!", "?<=", "?<!"), at + 1):
            return f"lookahead or lookbehind, at character {at}, is not supported; leave it out"
        if element == "{" and (counts := _COUNTS.match(text, at + 1)) and (problem := _too_many(counts.groups())):
            return problem
        if problem := _element_problem(element, in_json):
            return problem
    return None


def _long_number(text: str) -> str | None:
    if any(match[1] for match in _LONG_NUMBER.finditer(text)):
        return (
            r"'\x' takes two hexadecimal digits and no third may follow; write '\u' with four, or the character itself"
        )
    return None


def _half_of_pair(text: str) -> str | None:
    half = next((match[0] for match in _ESCAPE.finditer(text) if match[1]), None)
    return half and f"{half!r} is half of a surrogate pair, which is not a character; write the character itself"


def _too_many(counts: Iterable[str | None]) -> str | None:
    for digits in counts:
        number = (digits or "").lstrip("0")
        if len(number) > len(str(MOST_REPETITIONS)) or int(number or 0) > MOST_REPETITIONS:
            return f"{number:.20} repetitions are too many; {MOST_REPETITIONS} are the most"
    return None


def _elements(text: str) -> Iterator[tuple[int, str]]:
    """Classes, escapes, starts of groups and single characters: the position and the text of each."""
    at = 0
    while at < len(text):
        end = _element_end(text, at)
        yield at, text[at:end]
        at = end


def _ends(elements: Sequence[tuple[int, str]]) -> list[bool]:
    """True for each element where an anchor is at the end of every text that passes it."""
    found: list[bool] = []
    groups: list[bool] = []  # open groups, from the right: True at the end of the text
    ends, after = True, ""
    for _, element in reversed(elements):
        if element == ")":
            ends = ends and after not in _REPEATS
            groups.append(ends)
        elif element == "|":
            ends = groups[-1] if groups else True
        elif element.startswith("(") and groups:
            groups.pop()
        found.append(ends)
        ends, after = ends and element in (")", "|", "$"), element
    return found[::-1]


def _element_end(text: str, at: int) -> int:
    """The end of the class, escape or single character that begins here."""
    if text[at] == "\\":
        return min(at + 2 + _digits_of(text, at), len(text))
    if text[at] != "[":
        return at + (3 if text.startswith("(?:", at) else 1)
    at += 1 + text.startswith("^", at + 1)
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    return min(at + 1, len(text))


def _digits_of(text: str, at: int) -> int:
    """Number of hexadecimal digits of the escape that begins here; 0 if it takes none or they are missing."""
    count = _NUMBERED.get(text[at + 1 : at + 2], 0)
    digits = text[at + 2 : at + 2 + count]
    return count if len(digits) == count and all(digit in "0123456789abcdefABCDEF" for digit in digits) else 0


def _element_problem(element: str, in_json: bool) -> str | None:
    if element[0] == "[":
        negated, at = element.startswith("[^"), 1
        while at < len(element) - 1:
            end = at + 2 + _digits_of(element, at) if element[at] == "\\" else at + 1
            if element[at] in "\r\n":
                return f"a class has a line break; write it as {element[at]!r:.4} with a backslash"
            if element[at] == "\\" and element[at + 1] in _NO_CLASS:
                return f"{element[at:end]!r} in a class is not supported; leave it out"
            if problem := _character_problem(element[at:end], in_json and not negated):
                return problem
            at = end
        return None
    return _character_problem(element, in_json)


def _character_problem(element: str, in_json: bool) -> str | None:
    if element[0] == "\\" and len(element) > 1:
        kind = element[1]
        if kind.isascii() and kind.isalnum() and kind not in _ESCAPES:
            return f"{element!r} is not supported; leave it out, or write the character itself"
        number = element[2:] if kind in _NUMBERED and len(element) > 2 else ""
        char = chr(int(number, 16)) if number else "\n" if kind in _CONTROLS or kind in _NUMBERED else kind
    else:
        char = element
    if in_json and (char in '"\\' or char < " "):
        return f"{element!r} cannot be enforced in a string of JSON, which writes it differently; leave it out"
    return None
