"""What becomes of sequences when the weights change, or the adapter that they take, or when all KV leaves the device.

A row goes on with the KV that it has, and so does a sequence that is parked, or whose KV is on its way back. With
`recompute` they are computed again; and so is, always, a row that nothing was launched with, a prompt that is parked
before its first token, and a prompt whose log-probs are asked for. KV of older weights, or of several versions of
anything, is its sequence's alone: nobody else finds it.

Where KV leaves the device and nothing else changes, all that has any may go on with it, a prompt half-way too.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.engine.adapter_table import AdapterError
from rollout.engine.kv.memory import SequenceMemory
from rollout.engine.messages import Finish, RequestKey
from rollout.engine.schedule.queue import WaitingRoom
from rollout.engine.schedule.sequence import Group, Sequence
from rollout.models.adapters import AdapterWeights


class Changes:
    """The lists and groups are the scheduler's own; `take_off` takes a sequence out of them, `finish` ends it."""

    def __init__(
        self,
        memory: SequenceMemory,
        room: WaitingRoom,
        groups: dict[RequestKey, Group],
        decoding: list[Sequence],
        prefilling: list[Sequence],
        take_off: Callable[[Sequence], None],
        finish: Callable[[Sequence, Finish], None],
    ) -> None:
        self._memory, self._room, self._groups = memory, room, groups
        self._prefilling, self._decoding = prefilling, decoding
        self._take_off, self._finish = take_off, finish

    def weights(self, version: int, recompute: bool) -> None:
        """Steps planned from now on run under `version`."""
        self._room.weights_changed(version)
        self._memory.weights_changed()
        for seq in self._unfinished():
            first = max(version, seq.group.request.min_version)  # that it can have a token of
            if seq.launched == len(seq.tokens) and seq.too_old_for(first):  # tokens in flight are of the old version
                self._finish(seq, Finish("stale"))
        self._begin_again(self._unfinished(), recompute)

    def put_adapter(self, name: str, version: int | None, weights: AdapterWeights, recompute: bool) -> None:
        """Have an adapter; steps planned from now on run with it. Raises AdapterError where it cannot be taken."""
        assert self._memory.adapters is not None
        old = self._memory.adapters.known.get(name)
        adapter = self._memory.adapters.put(name, version, weights)
        if old is None:
            return
        self._room.adapter_changed(adapter)
        for seq in self._begin_again([seq for seq in self._unfinished() if seq.group.adapter is adapter], recompute):
            seq.kv_version = -1  # of several generations: nobody else may have it
            seq.note_adapter()

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises AdapterError where there is none, or a request names it."""
        table = self._memory.adapters
        if table is None or name not in table.known:
            raise AdapterError(f"adapter {name!r:.200} is not loaded")
        users = sum(group.adapter is table.known[name] for group in self._groups.values())
        if users:
            raise AdapterError(f"{users} unfinished requests name adapter {name!r:.200}: cancel them, or wait")
        table.drop(name)

    def leave_pool(self, keep: bool) -> None:
        """All KV leaves the pool; with `keep` it is parked, that of the first in rank where room is short."""
        self._room.close_shares()
        self._memory.let_go()
        if not keep:
            self._begin_again(self._unfinished(), recompute=True)
            return
        for seq in sorted(self._prefilling + self._decoding, key=lambda seq: seq.rank):
            seq.keeps_kv = seq.row_ready or seq.parked is not None
            self._take_off(seq)

    def forget_parked(self) -> None:
        """KV that was kept of preempted sequences is of no use: they are computed again."""
        for seq in self._unfinished():
            self._memory.forget_parked(seq)
        for seq in [seq for seq in self._prefilling if seq.parked is not None]:
            self._take_off(seq)

    def _begin_again(self, seqs: list[Sequence], recompute: bool) -> list[Sequence]:
        """Have those of a change computed again that are not to go on; returns the rows that go on."""
        for seq in seqs:
            if recompute or not seq.versions:
                self._memory.forget_parked(seq)
        changed, rows = set(seqs), []
        for seq in [seq for seq in self._prefilling + self._decoding if seq in changed]:
            # What has launched nothing takes no old KV along but its own, and log-probs of a prompt are of one version.
            own = seq.row_ready or (seq.parked is not None and bool(seq.versions))
            if recompute or not own or seq.scores_prompt:
                self._take_off(seq)
            else:
                rows.append(seq)
        return rows

    def _unfinished(self) -> list[Sequence]:
        return [seq for group in self._groups.values() for seq in group.sequences if not seq.finalized]
