"""The finish reasons of completions."""

from typing import Literal, get_args

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline", "stale", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
#: Reasons of completions that ended by themselves; any other completion may be continued.
COMPLETE: frozenset[str] = frozenset(("stop", "length", "repetition"))
