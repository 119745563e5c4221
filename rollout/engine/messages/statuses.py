"""An engine in numbers, for `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout.engine.messages.requests import RequestKey


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter that requests can name."""

    name: str
    version: int
    resident: bool  # the adapter is in a slot on the device
    rows: int  # rows that use the slot


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """One swap of the weights."""

    version: int
    age_s: float  # time since its end
    pause_s: float  # time that it occupied the compute stream


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """One completion that holds a row."""

    key: RequestKey
    index: int
    state: Literal["prefill", "decode", "leaving"]
    prompt_tokens: int
    tokens: int  # committed tokens, including `prior`
    max_tokens: int
    pages: int
    age_s: float  # time since its request was submitted
    version: int | None  # weights version of its newest token; None before the first token
    priority: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Sessions between their turns: now, and totals since start."""

    holding: int = 0  # sessions with pages, now
    pages: int = 0  # pages of these sessions, now
    turns: int = 0
    hits: int = 0  # turns that found KV in their session
    reused_tokens: int = 0  # tokens whose KV these turns found
    evicted: int = 0  # sessions that lost their pages to rows or to other sessions
    room: int | None = None  # estimate: more sessions of the mean size that fit now; None without sessions and rows


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """KV of preempted sequences on the host: now, and totals since start."""

    sequences: int = 0  # offloaded sequences, now
    pages: int = 0  # pages of host memory reserved for them, now
    pages_total: int = 0  # all pages of host memory; 0 without offloading
    parked: int = 0  # preempted sequences whose KV was offloaded
    restored: int = 0  # offloaded sequences that went on with their KV
    refused: int = 0  # preempted sequences whose KV had no room on the host
    bytes_out: int = 0  # copied to the host
    bytes_in: int = 0  # copied back


@dataclass(frozen=True, slots=True)
class KeptStatus:
    """KV of known prefixes on the host, which has `OffloadStatus.pages_total` pages: now, and totals since start."""

    pages: int = 0  # pages with KV of known prefixes, now
    bytes_out: int = 0  # copied to the host
    bytes_in: int = 0  # copied back
    fetched_tokens: int = 0  # tokens of the KV that was copied back
    lost_pages: int = 0  # known pages that the pool gave up before they were on the host
    disk_pages: int = 0  # pages on disk, now
    disk_pages_total: int = 0  # most pages on disk
    disk_read: int = 0  # pages that were read from disk
    disk_failed: int = 0  # pages that could not be written or read


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """A worker that is asleep, or about to be."""

    level: int
    requests: Literal["wait", "refuse"]  # policy for requests that arrive during the sleep
    freed_bytes: int  # device memory given back; 0 while it falls asleep
    age_s: float  # time asleep


EngineState = Literal["serving", "paused", "draining", "asleep", "stale", "stalled"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank of a tensor group."""

    rank: int
    pid: int
    device: str
    beat_age_s: float  # seconds since its last beat; rank 0: 0
    sequence: int  # last order that it has carried out; rank 0: last order that it has given
    launched: int  # steps that it has launched
    done: int  # steps that are complete on its device; rank 0: steps that it has committed
    swapped: int  # weight updates that it has copied; rank 0: updates that it has begun
    verified: int  # last update that it has received and checked in full; rank 0: as `swapped`
    copies: int  # copies of adapters, KV and states that its device has done; rank 0: 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine, replaced as a whole a few times a second; `status` is answered from it."""

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
    gpu_busy_s: float = 0.0  # time since start in which the compute stream ran a step
    reclaimed: int = 0
    preemptions: int = 0
    prefix_hits: Mapping[str, int] = field(default_factory=dict)  # rows by `PrefixHit`, since start
    uptime_s: float = 0.0
    last_tick_s: float = 0.0  # seconds since the last tick of the loop
    faults: int = 0  # faults of the engine, which was built anew after each
    restarts: int = 0  # restarts of the worker by its supervisor
    prompt_faults: int = 0  # deaths of the prompt process, which was replaced after each
    tokens: int = 0  # committed and kept since start
    tokens_by_second: tuple[int, ...] = ()  # tokens of each of the last ten seconds, oldest first
    idle_pct: Mapping[str, float] = field(default_factory=dict)  # share of about the last 10 s, by cause
    metrics: Mapping[str, float] = field(default_factory=dict)  # last report, as `rollout top` shows it
    swaps: tuple[SwapStatus, ...] = ()  # the last swaps, newest first
    ranks: tuple[RankStatus, ...] = ()  # ranks of a tensor group, rank 0 first
    problems: tuple[str, ...] = ()  # failures that do not stop generation, one sentence each
    stale: str = ""  # reason why the weights cannot be used, and the remedy
