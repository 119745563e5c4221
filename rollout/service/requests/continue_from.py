"""The `continue_from` of a `generate` message: an earlier partial completion."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from rollout.service.requests.fields import (
    HIGHEST_LOGPROB,
    KVRunList,
    Logprobs,
    MarkList,
    Positions,
    Routing,
    Seed,
    Strict,
    TokenIds,
    TopIds,
    TopLogprobs,
    VersionRunList,
)
from trainer_bridge.wire.columns import COLUMNS, MARKS


class ContinueFrom(Strict):
    """An earlier partial completion. Columns such as `logprobs` are optional, and as long as `token_ids`."""

    token_ids: TokenIds
    seed: Seed
    logprobs: Logprobs | None = None
    raw_logprobs: Logprobs | None = None
    drawn_logprobs: Logprobs | None = None
    top_ids: TopIds | None = None
    top_logprobs: TopLogprobs | None = None
    versions: VersionRunList | None = None
    recomputed: MarkList | None = None
    kv_versions: KVRunList | None = None
    adapter_versions: MarkList | None = None
    forced: Positions | None = None
    routing: Routing | None = None
    text_chars: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _lengths_agree(self) -> ContinueFrom:
        tokens = len(self.token_ids)
        given = {name: values for name in COLUMNS if (values := getattr(self, name)) is not None}
        for name, values in given.items():
            if len(values) != tokens:
                raise ValueError(
                    f"'{name}' has {len(values)} entries, but 'token_ids' has {tokens}; send one for each token"
                )
            if values.ndim == 1 and values.dtype == np.float32 and (values > HIGHEST_LOGPROB).any():
                raise ValueError(f"'{name}' must be at most 0, or NaN if unknown; send them as in the completion")
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise ValueError("send both 'top_ids' and 'top_logprobs', or neither")
        if self.tops != (0 if self.top_logprobs is None or not tokens else self.top_logprobs.shape[1]):
            raise ValueError("the rows of 'top_ids' and 'top_logprobs' differ in length; send rows of one length")
        if self.versions is not None and sum(count for _, count in self.versions) != tokens:
            raise ValueError(f"the counts in 'versions' must add up to {tokens}, the length of 'token_ids'")
        last = {name: marks[-1][0] for name in MARKS if (marks := getattr(self, name))}
        last |= {"forced": self.forced[-1]} if self.forced else {}
        for name, position in last.items():
            if position >= tokens:
                raise ValueError(f"'{name}' has position {position}, which is not below the {tokens} of 'token_ids'")
        return self

    @property
    def tops(self) -> int:
        """Number of likeliest tokens in each row; 0 without tokens."""
        return 0 if self.top_ids is None or not len(self.token_ids) else self.top_ids.shape[1]
