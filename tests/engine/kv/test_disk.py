"""KV on disk: pages that leave host memory come back from a folder, and what is wrong with it costs hits alone."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.config.engine import EngineSettings
from rollout.engine.build import rebuild_engine
from rollout.engine.device.streams import CpuDevice
from rollout.engine.inspect import Inspector
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.tiers.disk_files import DiskFiles
from rollout.engine.kv.tiers.disk_pages import DiskPages
from rollout.engine.kv.tiers.fetches import Fetches
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.moves import CopyCosts
from rollout.engine.kv.tiers.page_mover import HostMemory
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.sequence.sequence_kv import PrefixEnd
from tests.support.engine.agents import Agents
from tests.support.engine.conversation import Conversation
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load
from tests.support.engine.offloading import PAGE, copies_pay, offloading
from tests.support.engine.routing import assert_routed, routing_of
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import BrokenBus, LateDevice, random_delays
from tests.support.engine.updated import Load, Updated
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint

SMALL = 110  # pages: a third of what the agents hold


def with_disk(model, folder: Path, host_pages: int = 60, **fields) -> Bench:
    """An engine whose host memory is small, with a folder that is not."""
    bench = offloading(model, host_pages, **{"disk_kv_gib": 0.01, "disk_kv_folder": str(folder), **fields})
    copies_pay(bench)
    return bench


def settle(bench: Bench) -> None:
    """Until all writes that are due have ended."""
    tier = bench.engine.parts.tier.known
    until_s = time.perf_counter() + 20
    while tier.host.short and not tier.host.disk.failure and time.perf_counter() < until_s:
        tier.use_disk()
        time.sleep(0.001)
    while tier.host.disk.writing and time.perf_counter() < until_s:
        tier.use_disk()
        time.sleep(0.001)


def push_out(bench: Bench, prompt_of, *prompts: list[int], others: int = 12) -> None:
    """Compute prompts, and others until neither the pool nor the host has their pages."""
    for prompt in [*prompts, *(prompt_of(60, 5000 + i) for i in range(others))]:
        bench.complete(f"before{len(bench.done)}", prompt, 1)
        settle(bench)


def back(bench: Bench, prompt: list[int], tokens: int = 8) -> int:
    """Ask for a prompt again; returns how many tokens of it were found."""
    bench.complete("back", prompt, tokens)
    return bench.done["back"].cached_tokens


@pytest.fixture(scope="module")
def undisturbed(folders) -> dict[int, Agents]:
    """By seed, agents that never ran short of pages."""
    made: dict[int, Agents] = {}
    for seed in range(3):
        bench = Bench(load(folders[0]), kv_pages=1000)
        made[seed] = Agents(bench, seed=seed)
        made[seed].run()
        bench.close()
    return made


# --- pages come back ---


def test_pages_that_left_the_host_come_back_from_disk(model, prompt_of, greedy, tmp_path):
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    tier = bench.engine.parts.tier.known
    assert tier.host.disk.pages > 100 and tier.host.counts.disk_read == 0
    assert back(bench, prompt) == 49 and tier.host.counts.disk_read == 13
    assert bench.tokens("back") == greedy(prompt, 8)
    bench.close()
    assert list(tmp_path.iterdir()) == [], "its files are deleted"


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 12))])
def test_agents_have_the_tokens_of_an_engine_with_room(model, undisturbed, tmp_path, seed):
    rng, rng_late = random.Random(seed), random.Random(seed)
    late = {name: lambda: rng_late.random() * 0.001 for name in ("compute", "d2h", "kv_out", "kv_in")}
    bench = with_disk(
        model,
        tmp_path,
        rng.choice([20, 60]),
        piece_pages=rng.choice([1, 3, 20]),
        device=LateDevice(late),
        disk_kv_gib=rng.choice([0.0003, 0.01]),
        kv_pages=rng.choice([70, SMALL]),
        max_rows=rng.choice([2, 8]),
        pipeline_depth=1 + seed % 2,
    )
    agents = Agents(bench, sessions=rng.random() < 0.5, seed=seed % 3)
    agents.run()
    bench.close()
    assert agents.said == undisturbed[seed % 3].said
    for some, others in zip(agents.logprobs, undisturbed[seed % 3].logprobs, strict=True):
        assert some == pytest.approx(others, abs=1e-4)


def test_a_session_that_left_the_host_goes_on(model, prompt_of, greedy, tmp_path):
    bench = with_disk(model, tmp_path)
    talk = Conversation(bench, "talk", prompt_of)
    talk.say(50)
    assert bench.engine.roster.allocator.sessions.evict_one()
    push_out(bench, prompt_of)
    said = [*talk.said, *prompt_of(7, 1000 * 2 + 4)]
    talk.say(7)
    assert talk.reused == 58 and talk.said == [*said, *greedy(said, 9)]


def test_the_experts_of_tokens_come_back_with_their_page(tmp_path, prompt_of):
    hf_model = make_checkpoint("qwen3_moe", tmp_path / "model", 0)
    bench = with_disk(load(tmp_path / "model"), tmp_path / "kv", routing=True)
    prompt = [token % 71 for token in prompt_of(50, 1)]
    push_out(bench, lambda length, salt: [token % 71 for token in prompt_of(length, salt)], prompt)
    bench.complete("back", prompt, 8, routing_from=0)
    assert bench.done["back"].cached_tokens == 49 and bench.engine.parts.tier.known.host.counts.disk_read == 13
    assert_routed(hf_model, prompt, bench.tokens("back"), routing_of(bench, "back"), 0)


# --- other weights ---


@pytest.mark.parametrize("level", [0, 1, 2])
def test_new_weights_use_nothing_that_is_on_disk(model, folders, prompt_of, tmp_path, level):
    page_bytes = model.spec.kv_bytes_per_token(torch.float32) * PAGE
    fields = {"kv_pages": 40, "page_size": PAGE, "host_kv_gib": 60 * page_bytes / 2**30, "disk_kv_gib": 0.01}
    bench = Sleeping(model, None, Mailbox(), disk_kv_folder=str(tmp_path), **fields)
    copies_pay(bench)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    if level:
        bench.sleep(level=level)
        bench.wake()
    if level != 1:
        bench.links.receiver.ready = Update(1, load(folders[1]), bench.engine.executor.step.model)
        bench.tick_while(lambda: bench.engine.roster.version == 0)
    assert back(bench, prompt) == (49 if level == 1 else 0)
    alone = Bench(load(folders[level != 1]))
    alone.complete("back", prompt, 8)
    assert bench.tokens("back") == alone.tokens("back")
    alone.close(), bench.close()


@pytest.mark.parametrize(("seed", "age"), [(0, 2), *nightly((1, 1), (2, 4), (3, 9))])
def test_no_kv_older_than_the_bound_comes_from_disk(model, folders, hf_models, prompt_of, tmp_path, seed, age):
    rng = random.Random(seed)
    sources = [load(folder) for folder in folders]
    run = Updated(
        model,
        sources,
        lambda model, **fields: with_disk(model, tmp_path, 30, **fields),
        max_kv_age=age,
        kv_pages=50,
        max_rows=5,
        device=random_delays(seed, 0.001),
    )
    agents = Load(run, rng, prompt_of, 30)
    agents.go_on()
    assert run.bench.engine.parts.tier.known.host.counts.disk_written > 0
    agents.check(hf_models)
    run.bench.close()


def test_a_rebuilt_engine_begins_with_an_empty_folder(model, prompt_of, greedy, tmp_path):
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    bench.complete("found", prompt, 8)
    assert bench.done["found"].cached_tokens == 49
    bench.submit("runs", prompt_of(5, 2), 30)
    bench.engine.tick()
    fail_a_step(bench)
    rebuild_engine(bench.engine, bench.settings)
    assert bench.status().kept.disk_read == 13, "totals go on"
    assert bench.engine.parts.tier.known.host.disk.pages == 0 and len(list(tmp_path.iterdir())) == 1
    assert back(bench, prompt) == 0 and bench.tokens("back") == greedy(prompt, 8)


# --- what is wrong with a folder ---


def spoil(path: Path, how: str, folder: Path) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "flipped":
            data[-1] ^= 1
        case "identity":
            data[20] ^= 1
        case "other page":
            other = next(file for file in folder.glob("*/*") if file.name not in (path.name, "lock"))
            data = bytearray(other.read_bytes())
        case "short":
            data = data[:-3]
        case "empty":
            data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "identity", "other page", "short", "empty"])
def test_a_file_with_another_content_is_not_used(model, prompt_of, greedy, tmp_path, how):
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    for path in [path for path in tmp_path.glob("*/*") if path.name != "lock"]:
        spoil(path, how, tmp_path)
    bench.complete("back", prompt, 8)
    assert bench.tokens("back") == greedy(prompt, 8)
    assert bench.engine.parts.tier.known.host.counts.disk_failed >= 1
    Inspector(bench.engine).set_gauges()
    assert bench.engine.meter.report()["kv/disk_failed_pages"] >= 1


@pytest.mark.parametrize("when", ["before writes", "before reads"])
def test_a_folder_that_is_deleted_costs_hits_alone(model, prompt_of, greedy, tmp_path, when, caplog):
    bench = with_disk(model, tmp_path / "kv")
    prompt = prompt_of(50, 1)
    if when == "before writes":
        shutil.rmtree(tmp_path / "kv")
    push_out(bench, prompt_of, prompt)
    if when == "before reads":
        shutil.rmtree(tmp_path / "kv")
    bench.complete("back", prompt, 8)
    assert bench.done["back"].cached_tokens == 0 and bench.tokens("back") == greedy(prompt, 8)
    assert bench.engine.parts.tier.known.host.counts.disk_failed >= 1
    assert ("KV is no longer written" if when == "before writes" else "KV could not be read") in caplog.text


def test_a_full_disk_ends_writing_and_says_so(model, prompt_of, greedy, tmp_path, monkeypatch, caplog):
    def full(self, job, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskFiles, "_write", full)
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    assert back(bench, prompt) == 0 and bench.tokens("back") == greedy(prompt, 8)
    disk = bench.engine.parts.tier.known.host.disk
    assert "No space left" in disk.failure and disk.failure in caplog.text and disk.pages == 0


def test_a_read_that_hangs_is_given_up_and_rows_run_meanwhile(model, prompt_of, greedy, tmp_path):
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    push_out(bench, prompt_of, prompt)
    files = HangingFiles(tmp_path)
    bench.submit("runs", prompt_of(5, 2), 60)
    bench.tick_until(lambda: bench.engine.roster.decoding)
    bench.submit("back", prompt, 8)
    bench.tick_while(lambda: "runs" not in bench.done)
    assert "back" not in bench.done and bench.tokens("runs") == greedy(prompt_of(5, 2), 60)
    disk = bench.engine.parts.tier.known.host.disk
    disk.patience_s = 0.05
    bench.run()
    assert bench.done["back"].cached_tokens == 0 and bench.tokens("back") == greedy(prompt, 8) and disk.failure
    files.go_on()


class HangingFiles:
    """Pages on disk whose reads hang until `go_on`, and fail then."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, int] = {}
        for path in [path for path in folder.glob("*/*") if path.name != "lock"]:
            path.unlink()
            os.mkfifo(path)
            self._files[path] = os.open(path, os.O_RDWR)

    def go_on(self) -> None:
        for path, file in self._files.items():
            path.unlink(missing_ok=True)
            os.close(file)


@pytest.mark.parametrize("what", ["update", "broken bus", "cancel", "rows need the host"])
def test_a_read_is_under_way_when_its_fetch_is_of_no_use_any_more(model, folders, prompt_of, greedy, tmp_path, what):
    bus = BrokenBus("kv_out", 10**9)
    bench = with_disk(model, tmp_path, device=bus, receiver=Mailbox())
    prompt, engine = prompt_of(50, 1), bench.engine
    push_out(bench, prompt_of, prompt)
    files = HangingFiles(tmp_path)
    bench.submit("back", prompt, 8)
    while not engine.parts.tier.known.host.disk.reading:
        engine.tick()
    match what:
        case "update":
            bench.links.receiver.ready = Update(1, load(folders[1]), engine.executor.step.model)
            while engine.roster.version == 0:
                engine.tick()
        case "broken bus":
            bus.left = 0
            bench.submit("other", prompt_of(120, 77), 1)
            while not engine.parts.tier.failure:
                engine.tick()
        case "cancel":
            engine.inbox.put(Cancel(("c", "back")))
        case "rows need the host":
            for i in range(6):
                bench.submit(f"r{i}", prompt_of(10, i), 60)
            while not all(f"r{i}" in bench.done for i in range(6)):
                engine.tick()
    files.go_on()
    bench.run()
    if what != "cancel":
        assert bench.done["back"].cached_tokens == 0
    if what in ("broken bus", "rows need the host"):
        assert bench.tokens("back") == greedy(prompt, 8)


def test_a_write_that_hangs_delays_nothing(model, prompt_of, greedy, tmp_path, monkeypatch):
    gate, write = threading.Event(), DiskFiles._write
    monkeypatch.setattr(DiskFiles, "_write", lambda self, job, content: (gate.wait(), write(self, job, content)))
    bench = with_disk(model, tmp_path)
    prompt = prompt_of(50, 1)
    for i in range(12):
        bench.complete(f"r{i}", prompt_of(60, 5000 + i), 1)
    assert back(bench, prompt) == 0 and bench.tokens("back") == greedy(prompt, 8)
    gate.set()


class Pages:
    """Pages on disk, and host memory without an engine."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = HostMemory(CpuDevice(), 32, 64)
        for page in range(8):
            self.memory.memory_of(page)[:] = bytes([page]) * 64
        self.disk = DiskPages(str(folder), 1 << 20, self.memory, clock=clock)
        self.folder = folder

    def write(self, page: int) -> bytes:
        key = bytes([page]) * 16
        self.disk.write(key, page, 0, b"")
        self.ended(1)
        return key

    def hang(self, key: bytes) -> tuple[Path, bytes]:
        """Have the read of this file hang until its content is written to it. Returns path and content."""
        (path,) = self.folder.glob(f"*/{key.hex()}")
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        return path, content

    def ended(self, count: int) -> list:
        ended, until_s = [], time.perf_counter() + 20
        while len(ended) < count and time.perf_counter() < until_s:
            ended += (new := self.disk.finished())
            for job in new:
                self.disk.keep(job, True) if job.kind == "write" else None
        return ended


def test_the_check_sees_what_the_disk_still_reads_and_what_it_writes_of_pages_given_up(tmp_path):
    pages, host = Pages(tmp_path), HostPageBooks(2)
    pages.disk.read(pages.write(1), 7, None)
    with pytest.raises(AssertionError, match="read from disk"):
        pages.disk.check()
    pages.ended(1)
    pages.disk.check(), pages.disk.close()
    host.end_write(host.begin_write(), b"k")
    host.spills.begin(1, object())
    with pytest.raises(AssertionError, match="written to disk"):
        host.check()


@pytest.mark.parametrize("left_out", ["page", "state"])
def test_an_end_is_brought_by_one_fetch_at_a_time_also_if_the_host_has_no_room_for_half_of_it(tmp_path, left_out):
    """Its state and its half-full page have one key: while one is copied, nobody else may read it."""
    pages, pool = Pages(tmp_path), PagePool(9)
    snapshots, key = Snapshots(1, 2, pool), pages.write(1)
    on_disk, there = HostPageBooks(2, disk=pages.disk), HostPageBooks(2)
    there.end_write(there.begin_write(), key)
    fetches = Fetches(pool, snapshots, *((on_disk, there) if left_out == "page" else (there, on_disk)), CopyCosts(4))

    def begin():
        page = pool.allocate()
        return fetches.begin([page], [(key, page)], 0, PrefixEnd(b"", 2, key), snapshots.take())

    taken, fetch = [on_disk.take() for _ in range(2)], begin()
    fetches.begin_reads(on_disk)
    for page in taken:
        on_disk.give_back(page)
    next_moves, end = fetches.next_states, fetches.states_ended
    if left_out == "state":
        next_moves, end = fetches.next_pages, fetches.pages_ended
    moves = next_moves(2)
    assert len(moves) == 1 and fetches.of(key) is fetch and not fetches.take_ended()
    end(moves, False)
    assert fetches.take_ended() == [fetch] and fetches.of(key) is None and pool.used == snapshots.used == 0
    again = begin()
    fetches.begin_reads(on_disk)
    for job in pages.ended(1):
        fetches.read_ended(job)
    fetches.states_ended(fetches.next_states(2), False)
    fetches.pages_ended(fetches.next_pages(2), False)
    assert fetches.take_ended() == [again] and snapshots.find(key, 0) is not None
    fetches.check(), pages.disk.close()


def test_patience_is_for_each_read_and_for_time_in_which_this_process_runs(tmp_path):
    now_s = 0.0
    pages = Pages(tmp_path, lambda: now_s)

    def looks(*seconds: float) -> list:
        nonlocal now_s
        ended = []
        for gap in seconds:
            now_s += gap
            ended += pages.disk.finished()
        return ended

    keys = [pages.write(page) for page in range(5)]
    files = [pages.hang(key) for key in keys]
    looks(3600.0)  # before the first read
    jobs = [pages.disk.read(key, 7, None) for key in keys]
    for job, (path, content) in zip(jobs, files[:4], strict=False):
        assert looks(1.0, 1.0, 1.0, 1.0) == []
        path.write_bytes(content)  # waits for the read
        assert pages.ended(1) == [job] and not job.failure
    assert looks(3600.0, 1.0, 1.0) == [] and not pages.disk.failure  # it was stopped, too
    assert looks(1.0, 1.0, 1.0) == jobs[4:] and "longer than 5 s" in pages.disk.failure
    files[4][0].write_bytes(b"")
    pages.disk.close()


def test_a_read_that_hangs_at_the_end_writes_to_no_memory(tmp_path):
    earlier = threading.enumerate()
    pages = Pages(tmp_path)
    pages.disk.patience_s = 0.05
    threads = [thread for thread in threading.enumerate() if thread not in earlier]
    path, content = pages.hang(key := pages.write(1))
    pages.disk.read(key, 7, None)
    with path.open("wb") as file:  # the read is there
        pages.disk.close()
        file.write(content)
    assert len(threads) == 2
    for thread in threads:
        thread.join()
    assert pages.memory.memory_of(7) == bytes([7]) * 64


def test_the_end_comes_twice(tmp_path):
    pages = Pages(tmp_path)
    pages.disk.close()
    other = os.open(tmp_path, os.O_RDONLY)  # has the number that the lock had
    pages.disk.close()
    os.fstat(other), os.close(other)


def test_a_worker_that_is_killed_while_it_deletes_leaves_what_the_next_one_deletes(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        pages = Pages(tmp_path)
        pages.write(1)
        (own,) = tmp_path.iterdir()
        (own / "more").mkdir()
        (own / "more" / "00").write_bytes(b"x")
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        pages.disk.close()
    assert {path.name for path in own.iterdir()} == {"lock", "more"}
    Pages(tmp_path).disk.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rebuilt_engine_does_without_a_folder_that_cannot_be_used(model, prompt_of, greedy, tmp_path, caplog):
    bench = with_disk(model, tmp_path / "kv")
    bench.submit("runs", prompt_of(5, 2), 30)
    bench.engine.tick()
    fail_a_step(bench)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_bytes(b"")
    rebuild_engine(bench.engine, bench.settings)
    assert "KV is no longer written to disk" in caplog.text
    bench.complete("after", prompt_of(50, 1), 8)
    assert bench.tokens("after") == greedy(prompt_of(50, 1), 8)


# --- settings and folders ---


def test_what_a_worker_left_behind_is_deleted_and_what_one_uses_is_not(model, tmp_path, prompt_of):
    bench = with_disk(model, tmp_path)
    push_out(bench, prompt_of, prompt_of(50, 1))
    left = tmp_path / "rollout-kv-left"
    left.mkdir()
    for name in ("lock", "00"):
        (left / name).write_bytes(b"x")
    (tmp_path / "mine").write_bytes(b"x")
    files = len(list(tmp_path.glob("*/*")))
    other = with_disk(model, tmp_path)
    until_s = time.perf_counter() + 20
    while left.exists() and time.perf_counter() < until_s:
        time.sleep(0.01)
    assert not left.exists() and (tmp_path / "mine").exists()
    assert len(list(tmp_path.glob("*/*"))) == files - 2 + 1
    other.close(), bench.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"disk_kv_gib": 1.0, "host_kv_gib": 1.0}, "disk_kv_folder"),
        ({"disk_kv_gib": 1.0, "disk_kv_folder": "x"}, "host_kv_gib"),
        ({"disk_kv_gib": 1.0, "disk_kv_folder": "x", "host_kv_gib": 1.0, "prefix_cache": False}, "prefix_cache"),
    ],
)
def test_settings_that_exclude_each_other_are_an_error(fields, named):
    with pytest.raises(ValueError, match=named):
        EngineSettings(**fields)


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(model, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"disk_kv_folder = .*file"):
        with_disk(model, tmp_path / "file")
    with pytest.raises(ValueError, match="disk_kv_gib holds no page"):
        with_disk(model, tmp_path, disk_kv_gib=1e-9)
