"""How a completion ended."""

from __future__ import annotations

from typing import Literal, get_args

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline", "stale", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
#: Of completions that ended by themselves; any other may be continued.
COMPLETE: frozenset[str] = frozenset(("stop", "length", "repetition"))
