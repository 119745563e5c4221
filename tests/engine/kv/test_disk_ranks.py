"""An engine whose pages on disk are those of two ranks: its books are whole, whatever happens to the other's files."""

import os
import random
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.config import Settings
from rollout.engine import build_steps
from rollout.engine.build_kv import open_disk
from rollout.engine.device.streams import CpuDevice
from rollout.engine.kv.tiers.page_mover import HostMemory
from rollout.ranks.copies import FollowerFiles
from rollout.ranks.follower import Follower
from rollout.ranks.orders import OrderWriter
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory
from tests.support.engine.agents import Agents
from tests.support.engine.harness import Bench, load
from tests.support.engine.offloading import copies_pay, offloading
from tests.support.kernels.grids import nightly


class SecondRank:
    """Takes the orders for its part of pages on disk in a thread, and has memory for them."""

    def __init__(self) -> None:
        self.ring, self.eventfd = SharedMemory.create("ring", 1 << 20), os.eventfd(0)
        self.reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
        writer = RingWriter(self.ring, [self.eventfd], lambda: self.reports.get("position"))
        self.orders = OrderWriter(writer, 0, self.reports, lambda: None)
        self.thread = Thread(target=self._serve, daemon=True)

    def open_disk(self, engine, mover, share, again, name, orders):  # type: ignore[no-untyped-def]
        """In the place of the function with this name."""
        if name == "kv":
            host = mover.host_memory
            lanes = LaneReport(self.reports, 0, "kv_write"), LaneReport(self.reports, 0, "kv_read")
            self.files = FollowerFiles(HostMemory(CpuDevice(), host.pages, host.page_bytes), 1, *lanes)
            self.thread.start()
        return open_disk(engine, mover, share, again, name, self.orders)

    def _serve(self) -> None:
        reader = RingReader(self.ring, self.eventfd, lambda position: self.reports.set(0, "position", position))
        executor: Any = SimpleNamespace(compute=SimpleNamespace(thread_id=0), check=lambda: None)
        carry_out = lambda lane, number, *fields: self.files.carry_out(number, *fields)  # noqa: E731
        copies: Any = SimpleNamespace(report=lambda: False, carry_out=carry_out)
        others: Any = None
        Follower(Settings(), 0, executor, [], others, copies, others).serve(reader, self.reports)

    def close(self) -> None:
        self.orders.end()
        self.thread.join()
        os.close(self.eventfd)


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 8))])
def test_agents_have_the_tokens_of_an_engine_with_room(model, folders, tmp_path: Path, monkeypatch, seed: int):
    rng, second = random.Random(seed), SecondRank()
    with monkeypatch.context() as patch:
        patch.setattr(build_steps, "open_disk", second.open_disk)
        bench = offloading(model, 20, disk_kv_gib=0.01, disk_kv_folder=str(tmp_path), kv_pages=70)
    tier, tick = copies_pay(bench), bench.engine.tick

    def tick_after_writes(*args: Any) -> Any:
        until_s = time.perf_counter() + 20
        while tier.host.disk.writing and time.perf_counter() < until_s:  # what is late is lost
            tier.use_disk()
            time.sleep(0.0002)
        if seed % 2 and rng.random() < 0.05:
            files = [path for path in tmp_path.glob("*/rank1/*") if len(path.name) == 32]
            for path in files[::2]:
                path.unlink(missing_ok=True)
        return tick(*args)

    bench.engine.tick = tick_after_writes
    agents = Agents(bench, seed=seed % 3)
    agents.run()
    assert tier.host.counts.disk_read > 0 and (tier.host.counts.disk_failed > 0) == (seed % 2)
    bench.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
    with_room = Bench(load(folders[0]), kv_pages=1000)
    undisturbed = Agents(with_room, seed=seed % 3)
    undisturbed.run()
    assert agents.said == undisturbed.said
    for some, others in zip(agents.logprobs, undisturbed.logprobs, strict=True):
        assert some == pytest.approx(others, abs=1e-4)
