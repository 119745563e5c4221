"""Preemption: sequences lose their row because pages run short, weights change, or all KV leaves.

**Pages run short** (`grow_rows`). Idle sessions give way first, then shared prompts, then a row of the lowest priority:
the youngest row of the client with the most rows, so clients with few rows do not pay for other clients. Where the KV
of preempted sequences is kept on the host, their pages are free only after they are copied. So a row is preempted a
little before its pages are needed, and a row whose page is not free yet is left out of one step.

**Weights change** (`change_weights`), or something else that KV depends on (`restart_prompts`). Rows, and sequences
whose KV is offloaded or on its way back, go on with their KV. With `recompute` both are computed again. Three kinds are
always computed again: a row without a launched step, a prompt that was offloaded before its first token, and a prompt
whose KV has to be fresh (`Group.fresh_from`). Other sequences use KV of older weights up to `engine.max_kv_age`; a row
without a launched step goes on if the KV that it has found is not older.

**All KV leaves the pool** (`release_pool`). Where nothing else changes, every sequence that has KV may go on with it, a
half-prefilled prompt too.
"""

from collections import Counter
from collections.abc import Collection

from rollout.engine.messages.to_service import Finish
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence, SequenceState

#: A row is preempted this many tokens before its pages are needed, where they must be copied first.
_SOON = 4


# --- pages run short -------------------------------------------------------------------------------------------------


def grow_rows(roster: Roster, full: list[Sequence]) -> None:
    """Get one page more for each of these rows, in `Sequence.order`; some may go without for this step."""
    for seq in sorted(full, key=lambda seq: seq.order):
        _grow(roster, seq)
    if roster.allocator.tier.pages:
        _make_way(roster, roster.allocator.tier.outgoing)


def _grow(roster: Roster, seq: Sequence) -> None:
    allocator = roster.allocator
    while seq.state is SequenceState.DECODE and not allocator.try_grow(seq):
        if allocator.sharing:
            allocator.close_shared_prompt(allocator.sharing[-1])
        elif _ends(roster, seq.kv.rank) or allocator.tier.outgoing or allocator.tier.send_unshared():
            return  # pages are about to be free
        else:
            roster.preempt(_last(roster, seq.kv.rank))


def _ends(roster: Roster, rank: int) -> bool:
    """True if pages of a rank become free without a preemption."""
    return any(seq.kv.rank == rank for seq in roster.ending)


def _make_way(roster: Roster, outgoing: int) -> None:
    """Preempt a row if pages will be needed soon that are neither available nor among the `outgoing` ones.

    But not if enough pages are available to readmit the victim immediately (thrashing).
    """
    available, running = roster.allocator.available + outgoing, len(roster.decoding) + len(roster.prefilling)
    if roster.ending or running < 2 or available >= running:
        return
    if sum(map(_grows_soon, roster.decoding)) > available:
        roster.preempt(_last(roster))


def _last(roster: Roster, rank: int = 0) -> Sequence:
    """The row of a rank to preempt: of the lowest priority, of the client that has most of these rows, the youngest."""
    rows = [seq for seq in roster.decoding + roster.prefilling if seq.kv.rank == rank]
    lowest = min(seq.priority for seq in rows)
    rows = [seq for seq in rows if seq.priority == lowest]
    of_client = Counter(seq.group.client for seq in rows)
    return max(rows, key=lambda seq: (of_client[seq.group.client], seq.arrival))


def _grows_soon(seq: Sequence) -> bool:
    has_all = seq.kv.capacity >= seq.prompt_len + seq.max_tokens - 1
    return seq.kv.capacity - seq.kv.length < _SOON and not has_all


# --- weights change --------------------------------------------------------------------------------------------------


def change_weights(roster: Roster, version: int, recompute: bool, names: Collection[str] = ()) -> list[Sequence]:
    """Steps planned from now on run under `version`. Returns the sequences whose KV has to be computed again.

    `names` are the names of the changed tensors.
    """
    again, roster.version = version == roster.version, version
    for feature in roster.features:
        feature.weights_changed(version, names)
    roster.feed.queue_early(version)
    prefixes = roster.allocator.prefixes
    if prefixes.max_age and not again:
        roster.feed.close_shared_prompts(lambda group: prefixes.too_old(group, version))
        roster.allocator.forget_older(version - prefixes.max_age)
        stopped = [seq for seq in roster.prefilling if not prefixes.of_use(seq, version)]
    else:
        roster.feed.close_shared_prompts()
        roster.allocator.forget_all()
        stopped = roster.prefilling
    for seq in stopped:
        roster.feed.prefill_stopped(seq)
    for seq in roster.unfinished():
        first = max(version, seq.group.request.min_version)  # oldest version that the next token can have
        if seq.launched == len(seq.tokens) and seq.drawn.too_old_for(first):  # tokens in flight have the old version
            roster.finish(seq, Finish("stale"))
    return restart_prompts(roster, roster.unfinished(), recompute)[1]


def restart_prompts(roster: Roster, seqs: list[Sequence], recompute: bool) -> tuple[list[Sequence], list[Sequence]]:
    """Take off the rows of `seqs` that have to be computed again; returns (rows kept, rows taken off)."""
    for seq in seqs:
        if recompute or not seq.drawn.versions:
            roster.allocator.tier.drop(seq)
    prefixes, changed = roster.allocator.prefixes, set(seqs)
    kept: list[Sequence] = []
    taken_off: list[Sequence] = []
    for seq in [seq for seq in roster.prefilling + roster.decoding if seq in changed]:
        # A row that launched nothing keeps only KV that was offloaded from it, or found KV that is young enough.
        own = bool(seq.drawn.versions) if seq.kv.own else prefixes.may_go_on(seq, roster.version)
        if recompute or not (seq.row_ready or own) or seq.fresh_from is not None:
            roster.take_off(seq)
            taken_off.append(seq)
        else:
            kept.append(seq)
    return kept, taken_off


# --- all KV leaves the pool ------------------------------------------------------------------------------------------


def release_pool(roster: Roster, keep: bool) -> None:
    """All KV leaves the pool; with `keep` it is offloaded, in `Sequence.order` as long as the host has room."""
    roster.feed.close_shared_prompts()
    roster.allocator.end_sharing()
    if not keep:
        restart_prompts(roster, roster.unfinished(), recompute=True)
        return
    for seq in sorted(roster.prefilling + roster.decoding, key=lambda seq: seq.order):
        roster.take_off(seq, offload=True)
