"""Adapters of a tensor group in one process: real memory, ring and reports; followers are called by the test."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgpack
import pytest
import torch
from safetensors.torch import load_file

from rollout.checkpoint_folder import CheckpointError, read_json
from rollout.config import EngineSettings, ModelSettings
from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.models import load_model
from rollout.models.lora_slots import AdapterSlots, AdapterWeights
from rollout.models.peft_config import read_peft_config
from rollout.models.peft_tensors import CONFIG, WEIGHTS, AdapterPlan, load_peft_folder, plan_adapter
from rollout.models.shard import shard_spec, spec_of_rank
from rollout.ranks.adapters import AdapterCopies, RankAdapters
from rollout.ranks.orders import OrderWriter
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory
from rollout.service.adapter_loading import AdapterFolders
from rollout.service.connections import ReplyAddress
from rollout.service.slow_answers import SlowAnswers
from rollout.weights.adapter_updates import AdapterTarget
from tests.support.bridge.harness import Worker
from tests.support.engine.streams import InlineDevice
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.latent import make_latent
from tests.support.peft_adapters import make_adapter
from tests.support.worker.harness import until
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import InternalError, Overloaded, RolloutTimeout, WeightsRejected

CPU = torch.device("cpu")
SIZE, MOST = 2, 2
TARGETS = {
    "qwen3": ("q_proj", "o_proj", "up_proj", "down_proj"),
    "Qwen3Next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "Glm4MoeLite": ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


class Group:
    """Rank 0's end of the adapters, and one follower that carries out orders when the test says so."""

    def __init__(self, spec: Any, blind: bool = False) -> None:
        self.spec = spec
        self.lost = ""  # why
        self.reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), SIZE - 1)
        self.memory, ring = SharedMemory.create("adapters", 0), SharedMemory.create("ring", 1 << 18)
        eventfd = os.eventfd(0)
        writer = RingWriter(ring, [eventfd], lambda: self.reports.get("position"))
        self.orders = OrderWriter(writer, 0, self.reports, lambda: None)
        self.reader = RingReader(ring, eventfd, lambda position: self.reports.set(0, "position", position))
        engine, shard = EngineSettings(adapter_slots=1, adapter_rank=4, max_adapters=MOST), shard_spec(spec, 0, SIZE)
        orders, lost = lambda: self.orders, lambda: self.lost
        self.adapters = RankAdapters(self.memory, shard, engine, torch.float32, CPU, orders, lost)
        memory = SharedMemory.create("empty", 4096) if blind else SharedMemory(self.memory.descriptor)
        self.follower = AdapterCopies(memory, 1, torch.float32, CPU, self.reports)
        self.kinds: list[str] = []
        self.writes: list[int] = []
        self.forget_order = 0
        self.report = LaneReport(self.reports, 0, "adapters")
        self.copies = LaneReport(self.reports, 0, "adapter_copies")
        self.forgets = True

    def pack(self, plan: AdapterPlan, tensors: Any) -> AdapterWeights:
        """An adapter in a place; the follower forgets others meanwhile."""

        def packed() -> AdapterWeights | None:
            self.carry_out()
            return self.adapters.pack(plan, tensors, time.monotonic())

        return until(packed, "a place")

    @property
    def memory_bytes(self) -> int:
        """What the adapters take of the machine's memory."""
        return 512 * os.fstat(self.memory.descriptor).st_blocks

    def carry_out(self) -> None:
        """Have the follower take the orders that there are."""
        while self.reader.wait(0.0):
            head, body = self.reader.read()
            lane, number, *fields = msgpack.unpackb(body[: head.layout])
            self.kinds.append(fields[0] if lane == "adapters" else lane)
            if lane == "adapter_copies":
                self.writes.append(number)  # its copy goes on until the test says that it is done
            elif fields[0] == "prepare" or self.forgets:
                self.follower.carry_out(number, *fields)
            else:
                self.forget_order = number
            body.release()
            self.reader.done(head)

    def ready(self, weights: AdapterWeights) -> None:
        """Wait until the follower has its part."""

        def asked() -> bool:
            found = self.adapters.ready(weights)
            self.carry_out()
            return found

        until(asked, "the follower's part")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The spec of a model, and the folder of an adapter of it."""
    known: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in known:
            folder = tmp_path_factory.mktemp("model")
            sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
            makers: dict[str, Callable[[], Any]] = {
                "qwen3": lambda: make_checkpoint("qwen3", folder, **sizes),
                "Qwen3Next": lambda: make_hybrid("Qwen3Next", folder, num_experts=8),
                "Glm4MoeLite": lambda: make_latent("Glm4MoeLite", folder),
            }
            adapter = make_adapter(makers[name](), folder / "adapter", 0, TARGETS[name])
            known[name] = load_model(ModelSettings(path=str(folder)), CPU).spec, adapter
        return known[name]

    return make


def plan_of(spec: Any, folder: Path) -> tuple[AdapterPlan, dict[str, torch.Tensor]]:
    tensors = load_file(folder / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = read_peft_config(read_json(folder / CONFIG), "adapter")
    return plan_adapter(config, shapes, spec, 4, torch.float32, "adapter"), tensors


@pytest.fixture
def start(made: Callable[[str], tuple[Any, Path]]) -> Iterator[Callable[..., tuple[Group, AdapterPlan, Any]]]:
    groups: list[Group] = []

    def start_one(name: str = "qwen3", blind: bool = False) -> tuple[Group, AdapterPlan, Any]:
        spec, folder = made(name)
        group = Group(spec, blind)
        groups.append(group)
        return group, *plan_of(shard_spec(spec, 0, SIZE), folder)

    gc.freeze()  # collections of a test look at its own objects, not at all that other tests have left
    yield start_one  # nothing is unfrozen: that would make every later collection slow
    for group in groups:
        group.lost = "the test is over"
        os.close(group.memory.descriptor)


def test_no_rank_is_waited_for_once_the_group_is_lost(start: Any) -> None:
    group, plan, tensors = start("qwen3")
    weights = group.pack(plan, tensors)
    assert not group.adapters.ready(weights)
    group.lost = "rank 1 has hung"
    with pytest.raises(InternalError, match="the tensor group is lost: rank 1 has hung"):
        group.adapters.ready(weights)
    with pytest.raises(InternalError, match="the tensor group is lost: rank 1 has hung"):
        group.adapters.pack(plan, tensors, time.monotonic())


@pytest.mark.parametrize("name", ["qwen3", "Qwen3Next", "Glm4MoeLite"])
def test_each_rank_has_the_part_that_it_would_cut_itself(name: str, start: Any, made: Any) -> None:
    group, plan, tensors = start(name)
    weights = group.pack(plan, tensors)
    group.ready(weights)
    spec, folder = made(name)
    for rank, found in enumerate((weights, group.follower.weights(1))):
        own, _ = plan_of(shard_spec(spec, rank, SIZE), folder)
        expected = own.pack(tensors)
        assert found.parts.keys() == expected.parts.keys()
        for key, pair in expected.parts.items():
            assert all(torch.equal(a, b) for a, b in zip(found.parts[key], pair, strict=True)), key
        assert any(tensor.count_nonzero() for pair in expected.parts.values() for tensor in pair)


@pytest.mark.parametrize("name", ["qwen3", "Qwen3Next", "Glm4MoeLite"])
def test_the_spec_of_another_rank_is_that_of_its_shard(name: str, made: Any) -> None:
    spec, _ = made(name)
    shards = [shard_spec(spec, rank, SIZE) for rank in range(SIZE)]
    assert [spec_of_rank(shards[0], rank) for rank in range(SIZE)] == shards
    assert shards[0] != shards[1]


def test_an_adapter_that_a_follower_refuses_is_dropped_by_all(start: Any) -> None:
    group, plan, tensors = start(blind=True)  # the follower has other memory, which is too small
    weights = group.pack(plan, tensors)
    with pytest.raises(CheckpointError, match="rank 1: ValueError"):
        group.ready(weights)
    del weights
    gc.collect()
    for _ in range(3 * MOST + 20):  # more than there are places
        refused = group.pack(plan, tensors)
        with pytest.raises(CheckpointError):
            group.ready(refused)
        del refused
        gc.collect()
        group.carry_out()


def test_a_place_is_used_again_once_the_follower_has_forgotten_it(start: Any) -> None:
    group, plan, tensors = start()
    held = group.pack(plan, tensors)
    group.ready(held)
    before = {key: [tensor.clone() for tensor in pair] for key, pair in held.parts.items()}
    for i in range(12):
        weights = group.pack(plan, {name: tensor + i for name, tensor in tensors.items()})
        group.ready(weights)
        del weights
        gc.collect()
    assert group.kinds.count("forget") > 5
    for key, pair in before.items():
        assert all(torch.equal(a, b) for a, b in zip(held.parts[key], pair, strict=True)), "a place was used twice"


def test_without_an_answer_of_the_follower_no_place_is_used_again(start: Any) -> None:
    group, plan, tensors = start()
    held = [packed(group, plan, tensors) for _ in range(MOST + 8)]
    group.forgets = False
    held.clear()
    until(lambda: group.carry_out() or "forget" in group.kinds, "an order to forget")
    assert group.adapters.pack(plan, tensors, time.monotonic()) is None
    with pytest.raises(Overloaded, match="in a moment") as refused:
        group.adapters.pack(plan, tensors, time.monotonic() - 11.0)
    assert refused.value.retry_after_s == 1.0
    group.report.end(group.forget_order)
    until(lambda: group.adapters.pack(plan, tensors, time.monotonic()), "the place of the forgotten one")


def test_a_dropped_adapter_gives_its_memory_back_at_once(start: Any) -> None:
    """Ended requests may refer to it, in cycles that the collector finds later."""
    group, plan, tensors = start()
    table, request = table_of(group), []
    gc.disable()
    try:
        before = group.memory_bytes
        for _ in range(2 * (MOST + 8)):  # more than there are places
            adapter = table.put("one", 0, packed(group, plan, tensors))
            request += [adapter, request]
            assert group.memory_bytes > before
            table.drop("one")
            until(lambda: group.carry_out() or group.memory_bytes == before, "the memory to be given back")
    finally:
        gc.enable()


def test_two_threads_may_have_an_adapter_each(start: Any) -> None:
    """The second one is asked about when the first one is answered."""
    group, plan, tensors = start()
    first, second = (group.pack(plan, tensors) for _ in range(2))
    assert not group.adapters.ready(second) and not group.adapters.ready(first)
    group.carry_out()
    until(lambda: group.adapters.ready(second), "the second one")
    assert group.kinds == ["prepare"]
    group.ready(first)
    assert group.kinds == ["prepare", "prepare"] and group.adapters.ready(second)


def test_a_refusal_is_known_though_another_adapter_was_refused_since(start: Any) -> None:
    group, plan, tensors = start(blind=True)
    first, second = (group.pack(plan, tensors) for _ in range(2))
    assert not group.adapters.ready(first)
    with pytest.raises(CheckpointError, match="rank 1: ValueError"):
        group.ready(second)  # asked about when the first one is answered
    for weights in (first, second, first):
        with pytest.raises(CheckpointError, match="rank 1: ValueError"):
            group.adapters.ready(weights)


# --- who takes adapters waits for all ranks --------------------------------------------------------------------------

EARLY_S = 0.3  # in which one that does not wait has long come back


def rank_1_has(group: Group, number: int) -> bool:
    try:
        group.follower.weights(number)
    except KeyError:
        return False
    return True


def test_a_folder_is_loaded_when_all_ranks_have_their_parts(start: Any, made: Any) -> None:
    group, *_ = start()
    spec, folder = made("qwen3")
    loaded: list[tuple[AdapterWeights, bool]] = []

    def load() -> None:
        shard = shard_spec(spec, 0, SIZE)
        weights = load_peft_folder(folder, shard, 4, torch.float32, packer=group.adapters)
        loaded.append((weights, rank_1_has(group, 1)))

    loads = threading.Thread(target=load, daemon=True)
    loads.start()
    loads.join(EARLY_S)
    assert not loaded, "the follower has taken no order"

    def taken() -> bool:
        group.carry_out()
        return bool(loaded)

    until(taken, "the load")
    ((weights, everywhere),) = loaded
    assert everywhere and group.kinds == ["prepare"]
    assert weights.parts.keys() == group.follower.weights(1).parts.keys()


@contextmanager
def sent_by_the_bridge(group: Group, spec: Any, folder: Path) -> Iterator[tuple[Worker, Any]]:
    """A worker that receives an adapter from a publisher, and the update; the follower has its order."""
    tensors, config = load_file(folder / WEIGHTS), read_json(folder / CONFIG)
    shard = shard_spec(spec, 0, SIZE)
    target = AdapterTarget(shard, 4, torch.float32, AdapterRegistry(MOST), group.adapters)
    with Worker(adapters=target) as worker, WeightPublisher(worker.endpoint) as publisher:
        update = publisher.publish(tensors, 1, adapter="sent", adapter_config=config)
        until(lambda: group.reader.wait(0.0), "the order to the follower")
        yield worker, update


def test_an_adapter_by_the_bridge_is_in_use_when_all_ranks_have_their_parts(start: Any, made: Any) -> None:
    group, *_ = start()
    with sent_by_the_bridge(group, *made("qwen3")) as (worker, update):
        with pytest.raises(RolloutTimeout):
            update.applied(EARLY_S)
        assert worker.updates == [] and worker.status()["state"] == "receiving"
        group.carry_out()
        until(lambda: rank_1_has(group, 1), "the follower's part")
        update.applied(60)
        assert [taken.name for taken in worker.updates] == ["sent"]


def test_an_adapter_by_the_bridge_that_a_follower_refuses_comes_into_use_nowhere(start: Any, made: Any) -> None:
    group, *_ = start(blind=True)
    with sent_by_the_bridge(group, *made("qwen3")) as (worker, update):
        group.carry_out()
        with pytest.raises(WeightsRejected, match="rank 1: ValueError"):
            update.applied(60)
        assert worker.updates == [] and worker.status()["state"] == "idle"


def table_of(group: Group, slots: int = 1) -> AdapterTable:
    """The slots of rank 0, whose own copies are done at once."""
    device = InlineDevice()
    memory = AdapterSlots(shard_spec(group.spec, 0, SIZE), slots, 4, torch.float32, device.torch_device)
    streams = device.stream("loads"), device.stream("compute")
    return AdapterTable(AdapterRegistry(MOST), memory, device, streams, group.orders)


def packed(group: Group, plan: AdapterPlan, tensors: Any) -> AdapterWeights:
    weights = group.pack(plan, tensors)
    group.ready(weights)
    return weights


def test_no_row_is_admitted_before_all_ranks_have_the_adapter_in_its_slot(start: Any) -> None:
    group, plan, tensors = start()
    table = table_of(group)
    adapter = table.put("one", 0, packed(group, plan, tensors))
    assert not table.ready([adapter])
    group.carry_out()
    assert group.writes == [1] and not table.ready([adapter]), "the follower still copies"
    group.copies.end(1)
    assert table.ready([adapter])


def test_who_waits_for_an_adapter_waits_for_all_ranks(start: Any) -> None:
    group, plan, tensors = start()
    table = table_of(group)
    adapter = table.put("one", 0, packed(group, plan, tensors))
    assert not table.ready([adapter])
    waits = threading.Thread(target=table.wait, daemon=True)
    waits.start()
    waits.join(EARLY_S)
    assert waits.is_alive(), "the follower still copies"
    group.copies.end(1)
    waits.join(60)
    assert not waits.is_alive() and table.ready([adapter])


def test_weights_that_a_rank_still_copies_are_not_let_go(start: Any) -> None:
    group, plan, tensors = start()
    table = table_of(group)
    assert not table.ready([table.put("one", 0, packed(group, plan, tensors))])
    table.drop("one")
    time.sleep(EARLY_S)
    group.carry_out()
    assert "forget" not in group.kinds
    group.copies.end(1)
    assert not table.let_go()
    until(lambda: group.carry_out() or "forget" in group.kinds, "the order to forget the first one")


@pytest.mark.parametrize("idle", [True, False])
def test_places_of_replaced_adapters_come_free_without_a_further_load(start: Any, idle: bool) -> None:
    """Where all places are read by copies, no load can be the occasion to let go of them."""
    group, plan, tensors = start()
    table = table_of(group)
    adapter = table.put("one", 0, packed(group, plan, tensors))
    table.ready([adapter]), group.carry_out(), group.copies.end(1)
    assert table.ready([adapter])
    table.take(adapter)
    for version in range(1, MOST + 8):
        table.put("one", version, packed(group, plan, tensors))
    group.carry_out()
    assert table.let_go() and group.adapters.pack(plan, tensors, time.monotonic()) is None
    group.copies.end(max(group.writes))
    if idle:
        table.wait()
    else:
        table.let_go()
    group.pack(plan, tensors)


def test_a_place_whose_memory_stays_taken_is_used_again(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    group, plan, tensors = start()

    class Stubborn:
        def madvise(self, *_: Any) -> None:
            raise OSError("no such advice")

    for _ in range(2 * (MOST + 8)):
        group.pack(plan, tensors)  # it is dropped at once
        group.adapters._map, memory = Stubborn(), group.adapters._map  # type: ignore[assignment]
        until(lambda: group.carry_out() or len(group.adapters.free_blocks) == MOST + 8, "the block")
        group.adapters._map = memory
    assert "cannot be given back" in caplog.text


def test_a_refused_load_leaves_nothing_to_the_collector(start: Any, made: Any) -> None:
    group, *_ = start(blind=True)
    spec, folder = made("qwen3")
    posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
    shard = shard_spec(spec, 0, SIZE)

    def read(folder: Path, asked_s: float) -> AdapterWeights:
        return load_peft_folder(folder, shard, 4, torch.float32, packer=group.adapters, asked_s=asked_s)

    folders, refusals = AdapterFolders(folder.parent, read), []
    loads = SlowAnswers("adapters", 64, posted.put, lambda _, error: refusals.append(f"{error}"))
    peer = ReplyAddress(b"a", False, "1")
    gc.disable()
    try:
        for _ in range(3):
            loads.begin(peer, folders.reading(folder.name), lambda _: None)
            until(lambda: group.carry_out() or not posted.empty(), "the refusal")
            finish = posted.get()
            finish()
            until(lambda: group.carry_out() or len(group.adapters.free_blocks) == MOST + 8, "the block")
    finally:
        gc.enable()
        loads.close()
    assert len(refusals) == 3 and all("rank 1: ValueError" in refusal for refusal in refusals)
