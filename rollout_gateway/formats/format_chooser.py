"""Chooses the formats of a model: the flags name them, or the model's own files show them.

`auto` renders an answer with the model's chat template, and takes the format that reads reasoning and call out of it
again. A response template that the tokenizer brings comes first. What no format reads is not guessed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_gateway.formats.answer_segments import AnswerPiece, Segments
from rollout_gateway.formats.chat_turns import PROBE_NAME, PROBE_TOOL, ChatTurns, probe_call
from rollout_gateway.formats.known_formats import ALIASES, ANSWER_AFTER, OWN, REASONING, THOUGHTS, TOOL_CALLS
from rollout_gateway.formats.regions import AnswerRegion, Fields, compile_regions, kind_of, special_marks

log = logging.getLogger(__name__)

_THOUGHT, _ANSWER = "probe thought", "probe answer"
_ARGUMENTS: Mapping[str, Any] = {"city": "K\u00f6ln", "days": 3}
_THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)  # the names in templates


@dataclass(frozen=True, slots=True)
class SearchedRegions:
    """The regions that answers are searched for. `shown`: ids of the special tokens that the text must have for it."""

    regions: tuple[AnswerRegion, ...] = ()
    shown: frozenset[int] = frozenset()

    def without_reasoning(self) -> SearchedRegions:
        return SearchedRegions(tuple(region for region in self.regions if region.kind != "reasoning"), self.shown)


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a model's answers.

    `tools`, `reasoning`: the names of the formats; None: there is none. `cuts`: the cuts of answers without and with
    calls. `answer_after`: the text after which a constraint begins, None if it is not known. `thoughts`: the texts with
    which a thought starts and ends, None if they are not known.
    """

    tools: str | None = None
    reasoning: str | None = None
    cuts: tuple[SearchedRegions, SearchedRegions] = (SearchedRegions(), SearchedRegions())
    answer_after: str | None = None
    thoughts: tuple[str, str] | None = None


class FormatChooser:
    """Chooses among the formats for one model.

    `own`: the response template of its tokenizer; `special`: ids of its special tokens by text.
    """

    def __init__(self, turns: ChatTurns, own: Mapping[str, Any] | None, special: Mapping[str, int]) -> None:
        self._turns = turns
        self._own = _with_header((own or {}).get("fields") or {}, turns)
        self._special = special

    def formats(self, tools: str, reasoning: str) -> Formats:
        """The formats that flags name. Raises ValueError for a name that is unknown, or not to be used here."""
        tool_names = [*(name for name in (OWN,) if "tool_calls" in self._own), *TOOL_CALLS]
        thinking_names = [*(name for name in (OWN,) if self._own_reasoning()), *REASONING]
        calls = self._named("--tool-parser", tools, tool_names, self._reads_calls)
        thoughts = self._named("--reasoning-parser", reasoning, thinking_names, self._reads_thoughts)
        if calls is not None and self._turns.call_form() is not None and not self._reads_calls(calls):
            log.warning("--tool-parser %s does not read the calls that the chat template writes; try auto", calls)
        cuts = self._cut_by(self._fields(None, thoughts)), self._cut_by(self._fields(calls, thoughts))
        return Formats(calls, thoughts, cuts, self._answer_after(thoughts), self._marks_of(thoughts))

    def _cut_by(self, fields: Fields) -> SearchedRegions:
        try:
            return (
                SearchedRegions(compile_regions(fields), special_marks(fields, self._special))
                if fields
                else SearchedRegions()
            )
        except ValueError as error:
            raise ValueError(f"the installed transformers cannot read this format; update it: {error}") from error

    def _named(self, flag: str, name: str, names: Sequence[str], reads: Callable[[str], bool]) -> str | None:
        if name == "none":
            return None
        if name == "auto":
            found = next(filter(reads, names), None)
            log.info("%s auto: %s", flag, found or "none; the chat template shows no known format")
            return found
        known = ALIASES.get(name, name)
        if known not in names:
            if known == OWN:
                raise ValueError(f"{flag} {name}: the tokenizer brings no response template with this part; use auto")
            raise ValueError(f"{flag} {name} is unknown; use auto, none, {', '.join(names)}")
        return known

    def _fields(self, calls: str | None, thoughts: str | None) -> dict[str, Mapping[str, Any]]:
        """The fields of the response template that has both formats."""
        fields: dict[str, Mapping[str, Any]] = {}
        for name in (calls, thoughts):
            if name == OWN:  # the tokenizer's own format has regions of content and of other kinds, too
                fields |= {field: spec for field, spec in self._own.items() if kind_of(field) == "content"}
            elif name == "gpt_oss":  # every message is on a channel
                fields |= REASONING[name]
        if thoughts is not None:
            fields |= self._own_reasoning() if thoughts == OWN else REASONING[thoughts]
        if calls is not None:
            fields["tool_calls"] = self._own["tool_calls"] if calls == OWN else TOOL_CALLS[calls]
        return fields

    def _own_reasoning(self) -> dict[str, Mapping[str, Any]]:
        return {name: spec for name, spec in self._own.items() if kind_of(name) == "reasoning"}

    def _answer_after(self, thoughts: str | None) -> str | None:
        if thoughts == OWN:
            (spec,) = list(self._own_reasoning().values())[:1]
            return spec["close"] if isinstance(spec.get("close"), str) else None
        return None if thoughts is None else ANSWER_AFTER[thoughts]

    def _marks_of(self, thoughts: str | None) -> tuple[str, str] | None:
        if thoughts == OWN:
            (spec,) = list(self._own_reasoning().values())[:1]
            start, end = spec.get("open"), spec.get("close")
            return (start, end) if isinstance(start, str) and isinstance(end, str) else None
        return None if thoughts is None else THOUGHTS[thoughts]

    # --- probes ------------------------------------------------------------------------------------------------------

    def _reads_calls(self, name: str) -> bool:
        """True if a format reads a call out of what the chat template writes."""
        form = self._turns.call_form()
        if form is None:
            return False
        fields = self._fields(name, None)
        answer = self._turns.answer(probe_call(_ARGUMENTS, form), [PROBE_TOOL])
        piece = self._cut(fields, answer, [PROBE_TOOL])
        return piece is not None and [(call.name, call.decoded()) for call in piece.calls] == [(PROBE_NAME, _ARGUMENTS)]

    def _reads_thoughts(self, name: str) -> bool:
        """True if a format reads reasoning out of an answer or a prompt, or if the template drops it from history."""
        fields, question = self._fields(None, name), self._turns.question()
        answers: list[dict[str, Any]] = [{"role": "assistant", "content": _ANSWER, **_THOUGHTS}]
        if (form := self._turns.call_form()) is not None:
            answers.append(probe_call(_ARGUMENTS, form) | _THOUGHTS)
        for answer in answers:
            piece = self._cut(fields, self._turns.answer(answer, [PROBE_TOOL]))
            if piece is not None and piece.reasoning.strip() == _THOUGHT:
                return answer["content"] != _ANSWER or piece.content.strip() == _ANSWER
        asking = self._turns.render([question], add_generation_prompt=True)
        if asking is not None and self._opens_thoughts(fields, self._turns.begun(asking)):
            return True
        marks = [spec for field, spec in fields.items() if kind_of(field) == "reasoning"]
        if not all(isinstance(spec.get(mark), str) for spec in marks for mark in ("open", "close")):
            return False
        said = f"{marks[0]['open']}{_THOUGHT}{marks[0]['close']}{_ANSWER}"
        history = self._turns.render([question, {"role": "assistant", "content": said}, question])
        return history is not None and _ANSWER in history and _THOUGHT not in history

    def _cut(self, fields: Fields, answer: str | None, tools: Any = ()) -> AnswerPiece | None:
        """An answer cut by a format; None without a format, or if transformers is too old for it."""
        if answer is None:
            return None
        try:
            cut = self._cut_by(fields)
        except ValueError:
            return None
        for name in sorted(self._special, key=len, reverse=True):
            if self._special[name] not in cut.shown:
                answer = answer.replace(name, "")
        return Segments(cut.regions, tools).feed(answer, True)

    def _opens_thoughts(self, fields: Fields, begun: str) -> bool:
        """True if what follows `begun` is reasoning."""
        try:
            return bool(Segments(self._cut_by(fields).regions, begun=begun).feed(_THOUGHT, True).reasoning)
        except ValueError:
            return False


def _with_header(fields: Fields, turns: ChatTurns) -> Fields:
    """The fields of a template in which each region may begin with the header of an answer.

    So it is where every text belongs to a region: transformers leaves out text between regions.
    """
    if not all("open" in field or "open_pattern" in field for field in fields.values()):
        return fields
    header, changed = re.escape(turns.header()), {}
    for name, field in fields.items():
        given = field.get("open", [])
        literals = [given] if isinstance(given, str) else list(given)
        mark = field.get("open_pattern") or "|".join(map(re.escape, literals))
        rest = {key: value for key, value in field.items() if key != "open"}
        changed[name] = {**rest, "open_pattern": rf"(?:{header}\s*)?(?:{mark})"}
    return changed
