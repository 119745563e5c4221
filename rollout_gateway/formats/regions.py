"""Regions: the marks of a format that text is searched for, compiled from the fields of a response template."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["reasoning", "content", "calls"]
Fields = Mapping[str, Mapping[str, Any]]

#: The regions for fields of a response template. Text of other fields is content, so no text of a model is lost.
_KINDS: Mapping[str, Kind] = {
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "calls",
}
#: The pattern of a tagged value: what stands before the key, and after the value.
_TAGGED = re.compile(r"(.+?)\(\?P<key>.+\(\?P<value>\.\*\?\)(.+)", re.DOTALL)
_NO_ANCHOR = "\0"  # transformers asks for one; here the chat template itself shows where an answer begins


@dataclass(frozen=True, slots=True)
class Mark:
    """A pattern at which a region begins or ends. `literal`: a match stays one, whatever text follows."""

    pattern: Any  # a compiled pattern of the module `regex`
    literal: bool

    def find(self, text: str, start: int, last: bool) -> tuple[Any | None, int]:
        """The first match from `start` on that no further text can change, and the position at which one may begin.

        That position is the end of the text if none may. With `last` no text follows.
        """
        match = self.pattern.search(text, start, partial=not last)
        if match is None or last:
            return match, len(text)
        if match.partial or not self._stays(match, text):
            return None, self._first_beginning(text, start) if match.start() == len(text) else match.start()
        return match, len(text)

    def begin_at_end(self, text: str, start: int) -> int:
        """The position of a mark that the end of the text cuts off; the end of the text if there is no such mark."""
        match = self.pattern.search(text, start, partial=True)
        return match.start() if match is not None and match.partial else len(text)

    def _first_beginning(self, text: str, start: int) -> int:
        """The first position from which the rest of the text may be the beginning of a match.

        A search prefers an empty match at the end, as of `$`, to a longer match that begins before it.
        """
        if self.literal:
            return len(text)
        positions = range(start, len(text))
        return next((at for at in positions if self.pattern.fullmatch(text, at, partial=True) is not None), len(text))

    def _stays(self, match: Any, text: str) -> bool:
        if self.literal:
            return True
        if self.pattern.fullmatch(text, match.start(), partial=True) is not None:  # the mark may become longer
            return False
        # A match that leans on the end of the text, by `$` or `\\Z`, is another one once text follows.
        later = self.pattern.match(text + "\0", match.start())
        return later is not None and later.span() == match.span() and later.groupdict() == match.groupdict()


@dataclass(frozen=True, slots=True)
class AnswerRegion:
    """A region of a format. `once`: it opens at the beginning of an answer, or not at all."""

    kind: Kind
    open: Mark
    close: Mark | None
    once: bool
    content: str  # the name of transformers' parser of it
    arguments: Mapping[str, Any]  # the arguments of that parser
    value_begin: Any  # tagged values: pattern of the last position at which a value begins; else None
    value_end: Any  # tagged values: pattern of the position at which a value ends; else None
    alone: Any  # a response template of this region that ends with its text


def kind_of(name: str) -> Kind:
    """The kind of region that a field of a response template declares."""
    return _KINDS.get(name, "content")


def compile_regions(fields: Fields) -> tuple[AnswerRegion, ...]:
    """The regions of the fields of a response template. Raises ValueError for what is no template."""
    template = _load(fields)
    return tuple(_region(field, fields[name]) for name, field in template.fields.items() if field.open_re is not None)


def special_marks(fields: Fields, special: Mapping[str, int]) -> frozenset[int]:
    """Ids of the special tokens (given by their text) that marks of a template's fields consist of."""
    marks: list[str] = []
    for field in fields.values():
        if "open" in field or "open_pattern" in field:
            names = ("open", "close", "open_pattern", "close_pattern", "content_args")
            marks += [str(field.get(name, "")) for name in names]
    text = "\n".join(marks).replace("\\", "")
    return frozenset(token for name, token in special.items() if name in text)


def _region(field: Any, spec: Mapping[str, Any]) -> AnswerRegion:
    kind = kind_of(field.name)
    close = None
    if field.close_re is not None:
        close = Mark(field.close_re, field.close_literals is not None and not field.close_literal_can_extend)
    begin, end = _value_marks(field)
    opened = Mark(field.open_re, field.open_literals is not None and not field.open_literal_can_extend)
    kept = {name: item for name, item in spec.items() if name not in ("close", "close_pattern", "repeats", "join")}
    alone = _load({field.name: kept | {"repeats": not field.transform_each}})
    return AnswerRegion(
        kind,
        opened,
        close,
        kind == "reasoning" and not field.repeats,
        field.content,
        field.content_args,
        begin,
        end,
        alone,
    )


def _load(fields: Fields) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(
        {"start_anchor": _NO_ANCHOR, "fields": {name: dict(field) for name, field in fields.items()}}
    )


def _value_marks(field: Any) -> tuple[Any, Any]:
    """The patterns of the beginning and the end of a tagged value, searched backwards; None if it has none."""
    import regex  # transformers' parsers use it

    pattern = field.content_args.get("tag_pattern") if field.content == "xml-inline" else None
    found = None if pattern is None else _TAGGED.fullmatch(pattern)
    if found is None:
        return None, None
    begin, end = (regex.compile(mark, regex.DOTALL | regex.REVERSE) for mark in found.groups())
    return begin, end
