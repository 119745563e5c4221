"""An engine in numbers, for `status`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from rollout.engine.messages.requests import RequestKey


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter that requests can name."""

    name: str
    version: int
    resident: bool  # has a slot
    rows: int


class StatusFields(TypedDict, total=False):
    """The fields of a status that features give."""

    adapters: tuple[AdapterStatus, ...]


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """One swap of the weights."""

    version: int
    age_s: float  # time since its end
    pause_s: float  # its time on the compute stream


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """The oldest completions with a row."""

    key: RequestKey
    index: int
    state: Literal["prefill", "decode", "leaving"]
    prompt_tokens: int
    tokens: int  # old ones included
    max_tokens: int
    pages: int
    age_s: float
    version: int | None  # weights version of its newest token
    priority: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Sessions between two turns."""

    holding: int = 0  # sessions with pages
    pages: int = 0
    turns: int = 0
    hits: int = 0  # turns that found KV
    reused_tokens: int = 0
    evicted: int = 0
    room: int | None = None  # more sessions that fit; nil: unknown


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """KV of preempted sequences on the host."""

    sequences: int = 0
    pages: int = 0
    pages_total: int = 0
    parked: int = 0  # offloaded
    restored: int = 0  # went on with their KV
    refused: int = 0  # no room
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass(frozen=True, slots=True)
class KeptStatus:
    """KV of known prefixes on the host and on disk."""

    pages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    fetched_tokens: int = 0
    lost_pages: int = 0  # not copied in time
    disk_pages: int = 0
    disk_pages_total: int = 0
    disk_read: int = 0
    disk_failed: int = 0


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """A worker that is asleep or about to be."""

    level: int
    requests: Literal["wait", "refuse"]
    freed_bytes: int
    age_s: float


EngineState = Literal["serving", "paused", "draining", "asleep", "stale", "stalled"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The progress of a rank of a tensor group."""

    rank: int
    pid: int
    device: str
    beat_age_s: float
    sequence: int  # last order carried out
    launched: int  # steps
    done: int  # steps
    swapped: int  # updates in use
    verified: int  # last update received and checked
    copies: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine, replaced as a whole a few times a second; `status` is answered from it."""

    #: `serving`, `paused`, `draining`, `asleep`, `stale`, or `stalled`: no tick for a fifth of `engine.stall_exit_s`
    state: EngineState = "serving"
    weights_version: int = 0
    rows_running: int = 0
    rows_max: int = 0
    queue_waiting: int = 0
    queue_max: int = 0
    queue_clients: int = 0  # clients whose completions wait
    pages_free: int = 0
    pages_cached: int = 0
    pages_used: int = 0
    pages_total: int = 0
    sessions: SessionStatus = SessionStatus()
    offload: OffloadStatus = OffloadStatus()
    kept: KeptStatus = KeptStatus()
    sleep: SleepStatus | None = None  # None: awake
    slots_in_flight: int = 0
    adapters: tuple[AdapterStatus, ...] | None = None  # None: this worker serves none
    tokens_per_s: float = 0.0
    gpu_active_pct: float = 0.0
    gpu_busy_s: float = 0.0  # time of steps on the compute stream
    reclaimed: int = 0  # completions that ended with their client
    preemptions: int = 0
    #: rows by what they reused: [metrics](metrics.md#steps-and-memory)
    prefix_hits: Mapping[str, int] = field(default_factory=dict)
    uptime_s: float = 0.0
    last_tick_s: float = 0.0
    faults: int = 0  # new engines after a fault
    restarts: int = 0  # new processes by the supervisor
    prompt_faults: int = 0  # new prompt processes after a fault
    tokens: int = 0  # committed and kept
    tokens_by_second: tuple[int, ...] = ()  # the last ten seconds, oldest first
    #: share of the last 10 s by cause: `no_work`, `prefill`, `swap`, `offload`, `bubble`
    idle_pct: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # last report
    swaps: tuple[SwapStatus, ...] = ()  # up to 8, newest first: `version`, `age_s`, `pause_s`
    ranks: tuple[RankStatus, ...] = ()  # ranks of a tensor group, rank 0 first
    problems: tuple[str, ...] = ()  # failures that do not stop generation
    stale: str = ""  # reason why the weights cannot be used, and the remedy
