"""A plan: what one step does, as plain data. The scheduler makes it, `pack` turns it into an upload, a commit reads it.

A plan is a list of spans, one for each row of the step:

    row's positions    0 ................. start .......... start + tokens_in
    decode row         [ KV is there      ][ last token ]                        1 in, 1 drawn
    with k ahead       [ KV is there      ][ last token ][ k ahead ]             1 + k in and drawn, 1 or more kept
    prompt chunk       [ KV is there      ][ the next L tokens of the prompt ]   L in; 1 drawn after the last, if any is

The two kinds of span differ in the source of their tokens: the device drew the token of a decode row, and the host
sends the tokens of a prompt (`Span.prompt`). A step whose spans all have one token takes the decode forward, whatever
their source is. If only the last prompt token lacks KV, the sequence is planned as a decode row, which the upload sets
up.

A feature may put tokens into a row ahead of its draw (`TokensAhead`). While such a step is in flight, the position of
the row is not known, and `start` is the highest that it can be.

A step of hundreds of rows loops over its spans four times at every token, so these loops are kept short.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import RowNeeds

_VARIANT = RowNeeds.VARIANT.value


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The additional fields of a span of a prompt."""

    tokens: np.ndarray  # int32 [tokens in]
    copies: tuple[tuple[int, int], ...] = ()  # (source page, target page) to copy before anything is written
    saves: tuple[tuple[int, int], ...] = ()  # (row, place of a snapshot) to which the row's state is saved first
    loads: tuple[tuple[int, int], ...] = ()  # (place of a snapshot, row) that is loaded first, after all saves
    decodes: bool = True  # the decode forward can compute these tokens


#: The `prompt` of a decode row, whose token the device drew last.
NO_PROMPT = PromptPart(np.zeros(0, np.int32))


class Span(NamedTuple):
    """The work of one row in a step."""

    seq: Sequence
    start: int  # position of the first token that goes in
    tokens_in: int
    draws: int  # tokens drawn after them: 1, or 0 in the middle of a prompt and where `max_tokens` allows none
    prompt: PromptPart = NO_PROMPT


class TokensAhead(Protocol):
    """Tokens that a feature expects next: they go into a decode row after its last token, before they are drawn.

    The step draws a token after each. Tokens before the first difference from the tokens drawn are kept.
    """

    @property
    def seq(self) -> Sequence:
        """The sequence of the row."""

    @property
    def draw_index(self) -> int:
        """Index of the row's own draw in the step; the draws after these tokens follow."""

    @property
    def length(self) -> int:
        """The number of tokens."""

    def tokens(self) -> list[int]:
        """The tokens, once all earlier steps are committed; fewer if no more of them are known."""

    def stop(self) -> None:
        """The row's constraint cannot check tokens ahead. Later steps give this row none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. All its spans are decode rows, or all are of prompts."""

    spans: list[Span]
    version: int  # weights version at the launch of the step
    needs: RowNeeds
    max_context: int  # longest context in the step, this step's tokens included
    tokens: int  # input tokens
    draws: int  # tokens to draw
    opens: list[tuple[int, int]]  # (index of the span, page) where a span begins at the first position of a page
    token_rows: list[int]  # a decode's tokens: the row of each in the row state; tokens ahead have rows, too
    saves: tuple[tuple[int, int], ...] = ()  # (row, place of a snapshot) of rows that ended before this step
    ahead: Seq[TokensAhead] = ()  # in the order of `spans`; whoever plans them sends all pages, and `opens` is empty

    @property
    def kind(self) -> Literal["decode", "prefill"]:
        """The kind of step, for the meter and for the alternation of prompts and decode rows."""
        return "decode" if self.spans[0].prompt is NO_PROMPT else "prefill"

    @property
    def rows(self) -> int:
        return len(self.spans)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequence of each token drawn, in the order of the output."""
        return [span.seq for span in self.spans for _ in range(span.draws)]

    @property
    def decodes(self) -> bool:
        """True if a token is drawn after every token that goes in, and the decode forward can compute all of them."""
        if self.kind == "decode":
            return True
        return self.tokens == self.draws == len(self.spans) and all(span.prompt.decodes for span in self.spans)

    @property
    def draws_later(self) -> bool:
        """True if the draw waits for the masks of constrained rows."""
        return bool(self.needs & RowNeeds.CONSTRAIN)


def make_plan(
    spans: list[Span],
    version: int,
    page_size: int,
    saves: tuple[tuple[int, int], ...] = (),
) -> Plan:
    """The step of these spans under the weights of `version`; `saves` as in `Plan`."""
    opens: list[tuple[int, int]] = []
    needs = tokens = draws = longest = 0
    for index, (seq, start, tokens_in, drawn, _) in enumerate(spans):
        # A row without a draw has no needs in the draw, but the forward needs its variant.
        needs |= seq.need_bits if drawn else seq.need_bits & _VARIANT
        tokens += tokens_in
        draws += drawn
        if start + tokens_in > longest:
            longest = start + tokens_in
        if not start % page_size:
            opens.append((index, seq.kv.pages[start // page_size]))
    rows = [span.seq.row for span in spans]
    return Plan(spans, version, RowNeeds(needs), longest, tokens, draws, opens, rows, saves)


_new_tuple = tuple.__new__  # takes half the time of Span(...)


def decode_spans(seqs: list[Sequence]) -> list[Span]:
    """One token for each of these rows."""
    return [_new_tuple(Span, (seq, seq.kv.length, 1, 1, NO_PROMPT)) for seq in seqs]
