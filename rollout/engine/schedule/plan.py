"""A plan: what one step does, as plain data. The scheduler makes it, `pack` turns it into an upload, a commit reads it.

A plan is a list of spans, one for each row of the step:

    row's positions    0 ................. start .......... start + tokens_in
    decode row         [ KV is there      ][ last token ]                        1 in, 1 drawn
    with k drafts      [ KV is there      ][ last token ][ k drafts ]            1 + k in and drawn, 1 or more kept
    prompt chunk       [ KV is there      ][ the next L tokens of the prompt ]   L in; 1 drawn after the last, if any is

Both differ in two facts only. The token that goes into a decode row is on the device, which drew it; the tokens of a
prompt come from the host (`Span.prompt`). And a step whose spans are all of one token takes the decode forward,
whatever its tokens are. A prompt of which only the last token has no KV is planned as a decode row; the upload sets it
up.

A plan is a verify step if a row has drafts, or if a step in flight has drafts of a row: then the position of that row
is not known, and `start` is the highest that it can be.

A step of hundreds of rows loops over its spans four times at every token, so these loops are kept short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import IN_ROW_STATE

_ADAPTER = RowNeeds.ADAPTER.value
NO_NOTES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The additional fields of a span of a prompt."""

    tokens: np.ndarray  # int32 [tokens in]
    scored: int = 0  # tokens, after the `unscored` first ones, whose successor's log-prob is wanted: it is the prompt's
    copies: tuple[tuple[int, int], ...] = ()  # (source page, target page) to copy before anything is written
    saves: tuple[tuple[int, int], ...] = ()  # (row, place of a snapshot) to which the row's state is saved first
    loads: tuple[tuple[int, int], ...] = ()  # (place of a snapshot, row) that is loaded first, after all saves
    decodes: bool = True  # the decode forward can compute these tokens
    unscored: int = 0


#: The `prompt` of a decode row, whose token the device drew last.
NO_PROMPT = PromptPart(np.zeros(0, np.int32))


class Span(NamedTuple):
    """The work of one row in a step."""

    seq: Sequence
    start: int  # position of the first token that goes in
    tokens_in: int
    draws: int  # tokens drawn after them: 1, or 0 in the middle of a prompt and where `max_tokens` allows none
    prompt: PromptPart = NO_PROMPT


class Drafts(NamedTuple):
    """The drafts of one decode row: `length` tokens of `path`, from the position that the row then has.

    Drafts of the device have no path: the host does not know them when it plans.
    """

    seq: Sequence
    place: int  # place of the row's own draw in the step; its drafts follow
    length: int
    path: list[int]  # tokens expected from position `begin` on
    begin: int  # `IN_ROW_STATE` for drafts of the device
    age: int | None = None  # versions between the weights that the path comes from and the step's; None: from none
    drafter: str = "suffix"  # a name in `DRAFTER_NAMES`

    @property
    def on_device(self) -> bool:
        """True if the device has made them."""
        return self.begin == IN_ROW_STATE

    def tokens(self, position: int, width: int) -> list[int]:
        """The drafts if the first is at `position`; `verify.set_up` takes them from a path padded to `width`."""
        places = [min(position - self.begin + i, width - 1) for i in range(self.length)]
        return [self.path[i] if i < len(self.path) else 0 for i in places]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. All its spans are decode rows, or all are of prompts."""

    spans: list[Span]
    version: int  # weights version at the launch of the step
    needs: RowNeeds
    max_context: int  # longest context in the step, this step's tokens included
    tokens: int  # input tokens
    draws: int  # tokens to draw
    opens: list[tuple[int, int]]  # (place of the span, page) where a span begins at the first position of a page
    saves: tuple[tuple[int, int], ...] = ()  # (row, place of a snapshot) of rows that ended before this step
    drafts: tuple[Drafts, ...] = ()
    #: The row of each token of a verify step: after each row those of its drafts. Such a step has no `opens`, as its
    #: feature sends all pages. Empty: a token for each row.
    token_rows: list[int] = field(default_factory=list)
    notes: Mapping[str, Any] = field(default_factory=dict)  # plans of features, by feature name

    @property
    def kind(self) -> Literal["decode", "prefill"]:
        """The kind of step, for the meter and for the alternation of prompts and decode rows."""
        return "decode" if self.spans[0].prompt is NO_PROMPT else "prefill"

    @property
    def rows(self) -> int:
        """Number of rows in the step."""
        return len(self.spans)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequence of each token drawn, in the order of the output."""
        if self.drafts:
            return [span.seq for span in self.spans for _ in range(span.draws)]
        return [span.seq for span in self.spans if span.draws]

    @property
    def path_tokens(self) -> int:
        """Tokens of its longest path; the others are padded to this. 0 without drafts."""
        return max((len(draft.path) for draft in self.drafts), default=0)

    @property
    def decodes(self) -> bool:
        """True if a token is drawn after every token that goes in, and the decode forward can compute all of them."""
        if self.tokens != self.draws or not (self.draws == len(self.spans) or self.drafts):
            return False
        return self.kind == "decode" or all(span.prompt.decodes for span in self.spans)

    @property
    def draws_later(self) -> bool:
        """True if the draw waits for the masks of constrained rows."""
        return bool(self.needs & RowNeeds.CONSTRAIN)


def make_plan(
    spans: list[Span],
    version: int,
    page_size: int,
    saves: tuple[tuple[int, int], ...] = (),
    notes: Mapping[str, Any] = NO_NOTES,
) -> Plan:
    """The step of these spans under the weights of `version`; `saves` and `notes` as in `Plan`."""
    opens: list[tuple[int, int]] = []
    needs = tokens = draws = longest = 0
    for place, (seq, start, tokens_in, drawn, _) in enumerate(spans):
        # A row without a draw has no needs in the draw, but the forward needs its adapter.
        needs |= seq.need_bits if drawn else seq.need_bits & _ADAPTER
        tokens += tokens_in
        draws += drawn
        if start + tokens_in > longest:
            longest = start + tokens_in
        if not start % page_size:
            opens.append((place, seq.kv.pages[start // page_size]))
    of_step = RowNeeds(needs), longest, tokens, draws, opens, saves
    return Plan(spans, version, *of_step, notes=notes)


_new_tuple = tuple.__new__  # takes half the time of Span(...)


def decode_spans(seqs: list[Sequence]) -> list[Span]:
    """One token for each of these rows."""
    return [_new_tuple(Span, (seq, seq.kv.length, 1, 1, NO_PROMPT)) for seq in seqs]
