"""A second book of KV: which weights wrote it, position by position, told from the steps alone."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import DynamicCache

from rollout.engine.kv.tiers.disk_files import DiskJob
from rollout.engine.kv.tiers.fetches import KnownMove
from rollout.engine.kv.tiers.host_tier import HostTier
from rollout.engine.kv.tiers.offload import in_host_tier
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Sequence
from tests.support.engine.harness import Bench


@dataclass(eq=False, slots=True)
class Slot:
    """The KV of one position."""

    version: int  # of the weights that wrote it
    oldest: int  # of these, and of all KV that was read for it
    before: Slot | None = field(repr=False)  # of the position before, when it was written


class KVShadow:
    """Follows every launched step of a bench. Asserts that no KV older than the bound is used, and that all is told."""

    def __init__(self, bench: Bench) -> None:
        self.older = 0  # positions that rows found with KV of older weights
        self.of: dict[tuple[str, int], list[Slot]] = {}  # the KV of each completion, as it is now
        self.since: dict[tuple[str, int], int] = {}  # the tokens that each had when that KV was begun
        self._pages: dict[int, list[Slot]] = {}
        self._host: dict[int, list[Slot]] = {}  # known pages on the host
        self._disk: dict[bytes, list[Slot]] = {}  # and on disk, by key
        self._allocator = bench.engine.roster.allocator
        tier = bench.engine.parts.tier
        if isinstance(tier, HostTier):
            known, disk = tier.known, tier.known.host.disk
            self._moves = known.page_moves
            known.page_moves = known.page_moves._replace(out_ended=self.copied_out, in_ended=self.copied_in)
            self._disk_keep, self._disk_finished = disk.keep, disk.finished
            if disk.total:
                disk.keep, disk.finished = self.disk_keep, self.disk_finished
        bench.observer.at_launch.append(self.launched)

    def launched(self, plan: Plan) -> None:
        for seq, start, tokens_in, _, prompt in plan.spans:
            self._write(seq, start, start + tokens_in, plan.version, begins=prompt is not None and not seq.row_ready)

    def copied_out(self, moves: list[KnownMove], failed: bool) -> list[Sequence]:
        for move in moves:
            self._host[move.host_place] = self._pages[move.place]
        return self._moves.out_ended(moves, failed)

    def copied_in(self, moves: list[KnownMove], failed: bool) -> list[Sequence]:
        for move in moves:
            self._pages[move.place] = self._host[move.host_place]
        return self._moves.in_ended(moves, failed)

    def disk_keep(self, job: DiskJob, good: bool) -> None:
        if good and not job.failure:
            self._disk[job.key] = self._host[job.page]
        self._disk_keep(job, good)

    def disk_finished(self) -> Seq[DiskJob]:
        ended = self._disk_finished()
        for job in ended:
            if job.kind == "read" and not job.failure:
                self._host[job.page] = self._disk[job.key]
        return ended

    def _write(self, seq: Sequence, start: int, end: int, version: int, begins: bool) -> None:
        kv, size, name = seq.kv, self._allocator.page_size, (seq.group.key[1], seq.index)
        if begins and not kv.own:
            self.of[name], self.since[name] = self._found(seq, start, version), len(seq.tokens)
        slots = self.of[name] = self.of[name][:start]
        assert len(slots) == start, "KV is missing"
        if begins and kv.is_offloaded:
            self._check_own(seq, slots)
        oldest = min((version, *(slot.oldest for slot in slots)))
        for _ in range(start, end):
            slots.append(Slot(version, oldest, slots[-1] if slots else None))
        for index in range(0 if begins else start // size, -(-end // size)):
            self._pages[kv.pages[index]] = slots[index * size : (index + 1) * size]

    def _check_own(self, seq: Sequence, slots: list[Slot]) -> None:
        """A restored sequence has its own KV: what does not come from the host is in the pages that it had."""
        size, from_host = self._allocator.page_size, {page for _, page in in_host_tier(seq).offloaded.restored}
        for index, page in enumerate(seq.kv.pages[: -(-len(slots) // size)]):
            own = slots[index * size : (index + 1) * size]
            pairs = zip(self._pages[page], own, strict=False)
            same = page in from_host or all((a.version, a.oldest) == (b.version, b.oldest) for a, b in pairs)
            assert same, f"a restored row has {self._pages[page]} in place of {own}"

    def _found(self, seq: Sequence, start: int, version: int) -> list[Slot]:
        kv, size = seq.kv, self._allocator.page_size
        pages = [*kv.pages[: start // size], *([kv.copy_source] if start % size else [])]
        slots = [slot for page in pages for slot in self._pages[page]][:start]
        assert len(slots) == start, "pages are shared whose KV is not written"
        asked, most = seq.group.request.max_kv_age, self._allocator.prefixes.max_age
        least = version - (most if asked is None else min(asked, most))
        assert all(slot.oldest >= least for slot in slots), f"{slots} is used under version {version}"
        told = [oldest for at, oldest, count in kv.found if at == len(seq.tokens) for _ in range(count)]
        assert len(told) == (start if most else 0), "not all of it is told"
        assert all(said <= slot.oldest for said, slot in zip(told, slots, strict=False)), f"{told} for {slots}"
        self.older += sum(slot.oldest < version for slot in slots)
        return slots


def in_one_line(slots: list[Slot]) -> bool:
    """True if each position was computed after exactly the ones before it, not after others of equal content."""
    return all(after.before is before for before, after in pairwise(slots))


def follows(weights: Mapping | Seq, prompt: list[int], tokens: list[int], versions: list[int], since: int = 0) -> bool:
    """True if each token from `since` on is the likeliest one after KV that was written under `versions`.

    These are by position; `weights` are transformers' models by version.
    """
    history = [*prompt, *tokens[:-1]]
    assert len(versions) == len(history)
    cache, start, likeliest = DynamicCache(config=weights[versions[0]].config), 0, list[int]()
    while start < len(history):
        version = versions[start]
        end = next((i for i in range(start, len(history)) if versions[i] != version), len(history))
        with torch.inference_mode():
            logits = weights[version](torch.tensor([history[start:end]]), past_key_values=cache, use_cache=True).logits
        likeliest += logits[0].argmax(-1).tolist()
        start = end
    return likeliest[len(prompt) - 1 + since :] == tokens[since:]
