"""KV on disk with two ranks: the same tokens as one rank with room, whatever is wrong with a rank's files."""

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.worker.harness import assert_idle, launch
from tests.support.worker.rank_pair import Pair
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher

VOCAB, PROMPTS = 83, 10
ROOM: dict[str, Any] = {
    **{"dtype": "float32", "max_rows": 4, "page_size": 8, "prefill_chunk_tokens": 16, "device": "cpu"},
    **{"max_context_tokens": 128, "kv_pages": 400, "sleep": True},
}
#: The pool and the host have room for a third of the prompts' KV.
LITTLE: dict[str, Any] = {
    **{"tensor_parallel": 2, "check_ranks": True, "kv_pages": 40, "host_kv_gib": 0.0002, "disk_kv_gib": 0.1}
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "stop": {"ignore_eos": True}}
LATE_S = 0.02


@dataclass
class SlowFiles:
    """Files whose first reads wait until `go_on`, and then get their content a little late."""

    contents: dict[Path, bytes] = field(default_factory=dict)
    ends: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def slow_down(self, paths: list[Path]) -> None:
        for path in paths:
            self.contents[path] = path.read_bytes()
            path.unlink()
            os.mkfifo(path)

    def go_on(self) -> None:
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.ends.wait(0.001):
            for path, content in self.contents.items():
                try:
                    if stat.S_ISFIFO(path.stat().st_mode):
                        self._answer(path, os.open(path, os.O_WRONLY | os.O_NONBLOCK), content)
                except OSError:  # nobody reads the file, or it is deleted
                    continue

    @staticmethod
    def _answer(path: Path, end: int, content: bytes) -> None:
        time.sleep(LATE_S)
        try:
            whole = path.with_suffix(".whole")
            whole.write_bytes(content)
            whole.replace(path)  # for later reads
            os.write(end, content)
        finally:
            os.close(end)

    def close(self) -> None:
        if self.thread is not None:
            self.ends.set()
            self.thread.join()


@dataclass(frozen=True)
class OnDisk(Pair):
    """One rank that has room for all KV, and two that keep most of it in a folder."""

    slow: SlowFiles = field(default_factory=SlowFiles)

    def files(self, rank: int) -> list[Path]:
        """The pages and states that a rank has written."""
        paths = (self.folder / "kv").glob("rollout-kv-*/*" if rank == 0 else f"rollout-kv-*/rank{rank}/*")
        return [path for path in paths if len(path.name) == 32]

    def kept(self) -> dict[str, int]:
        """What the two ranks tell about known prefixes."""
        with RolloutClient(self.several.endpoint, timeout_s=60) as client:
            return client.status()["kept"]

    def ask(self, times: int = 1) -> None:
        """Ask for all prompts in turn; what both workers say is the same."""
        for _ in range(times):
            for i in range(PROMPTS):  # one after the other: the host is not full of rows
                self.check(self.both([{"prompt": self.prompt(60, i), **GREEDY}]))


def started(name: str, folder: Path) -> Iterator[OnDisk]:
    """Both workers, which end without a file or page left."""
    if name == "qwen3":
        make_checkpoint(name, folder / "base", 0, num_key_value_heads=2, vocab_size=VOCAB)
    else:
        make_hybrid(name, folder / "base", 0)
    one = launch(folder / "base", log=folder / "one", wait=False, **ROOM)
    other = launch(folder / "base", log=folder / "two", wait=False, **ROOM | LITTLE, disk_kv_folder=folder / "kv")
    with one, other:
        for worker in (one, other):
            worker.wait_ready(240)
        pair = OnDisk(folder, VOCAB, one, other, tolerance=1e-4 if name == "qwen3" else 1e-3)
        yield pair
        with RolloutClient(other.endpoint, timeout_s=60) as client:
            client.sleep()  # which empties the caches: snapshots keep pages
            client.wake()
        assert_idle(other)
    pair.slow.close()
    assert list((folder / "kv").iterdir()) == [], "the files of both ranks are deleted"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[OnDisk]:
    yield from started("qwen3", tmp_path)


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[OnDisk]:
    yield from started("Qwen3_5", tmp_path)


def test_pages_that_left_the_host_come_back_from_both_ranks_files_until_the_weights_are_new(
    pair: OnDisk, tmp_path: Path
) -> None:
    pair.ask(3)
    kept = pair.kept()
    assert kept["disk_read"] > 20 and kept["disk_failed"] == 0
    assert len(pair.files(0)) == len(pair.files(1)) == kept["disk_pages"]
    make_checkpoint("qwen3", tmp_path / "new", 1, num_key_value_heads=2, vocab_size=VOCAB)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    for worker in (pair.one, pair.several):
        with WeightPublisher(worker.endpoint) as publisher:
            publisher.publish(tensors, 1).applied(60)
    read = pair.kept()["disk_read"]
    pair.ask()
    assert pair.kept()["disk_read"] == read
    pair.ask(2)
    assert pair.kept()["disk_read"] > read and pair.kept()["disk_failed"] == 0


def test_states_that_left_the_host_come_back_from_both_ranks_files(hybrid: OnDisk) -> None:
    hybrid.ask(3)
    assert hybrid.kept()["disk_read"] > 10 and hybrid.kept()["disk_failed"] == 0
    assert len(hybrid.files(0)) == len(hybrid.files(1)) > hybrid.kept()["disk_pages"]


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("hangs", 1),
        *(pytest.param(how, 1, marks=pytest.mark.nightly) for how in ("spoiled", "lost", "slow")),
        *(pytest.param(how, 0, marks=pytest.mark.nightly) for how in ("spoiled", "lost", "slow", "hangs")),
    ],
)
def test_a_fault_of_one_ranks_files_costs_hits_alone(pair: OnDisk, how: str, rank: int) -> None:
    pair.ask(2)
    read, files = pair.kept()["disk_read"], pair.files(rank)
    match how:
        case "spoiled":
            for path in files:
                data = path.read_bytes()
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "lost":
            shutil.rmtree(files[0].parent)
        case _:
            pair.slow.slow_down(files)
            if how == "slow":
                pair.slow.go_on()
    pair.ask(2)
    kept = pair.kept()
    assert (kept["disk_failed"] == 0) == (how == "slow")
    assert (kept["disk_read"] > read) == (how in ("slow", "spoiled")), "what is spoiled is written again"
    if how == "hangs":
        pair.slow.go_on()
