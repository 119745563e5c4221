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

    tokens: np.ndarray  # int32 or int64 [tokens]: the tokens of the KV, as in `Sequence.identity`
    pages: list[int]  # the last one may be half full
    oldest: int  # oldest weights version of the KV
    keys: PrefixKeys | None  # keys of at least all full pages; None without a prefix cache
    adapter_edition: int = 0  # 0 without an adapter
    snapshots: tuple[Snapshot, ...] = ()  # models with states, longest first: KV is usable up to a snapshot


@dataclass(eq=False, slots=True)
class KeptSession:
    """One conversation."""

    key: SessionKey
    lease_s: float
    turns: int = 0  # submitted turns that are not settled: the last one, and earlier ones with steps in flight
    turn: RequestKey | None = None  # the last turn
    over: bool = False  # the session was ended: it keeps no KV
    kv: SessionKV | None = None
    until_s: float = 0.0  # end of its lease, while it has no turn
    last_s: float = 0.0  # time after a turn in which it is evicted after others
    last_until_s: float = 0.0  # end of that time, while it has no turn
