"""A session: one conversation, and the KV that it keeps between its turns. `kv/sessions` has the books of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.engine.messages.requests import RequestKey, SessionKey
from rollout.engine.sequence.prefix_keys import PrefixKeys
from rollout.engine.sequence.sequence_kv import Snapshot


@dataclass(frozen=True, slots=True)
class SessionKV:
    """The KV of a session."""

    tokens: np.ndarray  # int32 or int64 [tokens]: the pages have the KV of these, as `Sequence.identity` says
    pages: list[int]  # the last one may be half full
    oldest: int  # oldest weights version of the KV
    keys: PrefixKeys | None  # of all full pages at least; None without a prefix cache
    adapter_edition: int = 0  # 0 without an adapter
    snapshots: tuple[Snapshot, ...] = ()  # longest first; of models with states: KV is of use up to one of them


@dataclass(eq=False, slots=True)
class Session:
    """One conversation."""

    key: SessionKey
    lease_s: float
    turns: int = 0  # submitted and not settled: the last one, and earlier ones with steps still in flight
    turn: RequestKey | None = None  # the last one
    over: bool = False  # it was ended: it keeps no KV
    kv: SessionKV | None = None
    until_s: float = 0.0  # end of its lease, while it has no turn
    last_s: float = 0.0  # for how long after a turn it gives way after others
    last_until_s: float = 0.0  # until then, while it has no turn
