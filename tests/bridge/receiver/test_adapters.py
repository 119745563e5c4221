"""Updates of adapters beside updates of the model, at a real receiver: an adapter's breaks off no other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.models import load_model
from rollout.models.lora_slots import AdapterSlots, corrected_modules
from rollout.models.peft_tensors import AdapterPacker
from rollout.models.spec import ModelSpec
from rollout.weights.adapter_updates import AdapterTarget
from scripts.bench.random_adapter import random_adapter
from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from tests.support.bridge.raw_publisher import RawPublisher, assert_rejected
from tests.support.engine.streams import InlineDevice
from tests.support.models.families import make_checkpoint

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
NAME = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = tmp_path_factory.mktemp("base")
    make_checkpoint("qwen3", folder)
    return load_model(ModelSettings(path=str(folder)), torch.device("cpu")).spec


@pytest.fixture(params=["staged", "in_place"])
def worker(request: pytest.FixtureRequest, spec: ModelSpec) -> Iterator[Worker]:
    target = AdapterTarget(spec, 4, torch.float32, AdapterRegistry(8), AdapterPacker())
    with Worker(adapters=target, apply=request.param) as worker:
        yield worker


@pytest.fixture
def table(spec: ModelSpec) -> AdapterTable:
    """Room for one adapter."""
    device = InlineDevice()
    memory = AdapterSlots(spec, 1, 4, torch.float32, device.torch_device)
    return AdapterTable(AdapterRegistry(1), memory, device, (device.stream("loads"), device.stream("compute")))


@pytest.fixture
def full(spec: ModelSpec, table: AdapterTable) -> Iterator[Worker]:
    """Its table has room for one adapter."""
    with Worker(adapters=AdapterTarget(spec, 4, torch.float32, table.registry, AdapterPacker())) as worker:
        yield worker


class RawAdapter(RawPublisher):
    """Sends an adapter by hand."""

    def __init__(self, worker: Worker, spec: ModelSpec, name: str, value: float = 1.0) -> None:
        shape = corrected_modules(spec)["model.layers.0.self_attn.k_proj"]
        tensors = {
            NAME.format("A"): torch.full((2, shape.inputs), value),
            NAME.format("B"): torch.ones(shape.outputs, 2),
        }
        super().__init__(worker, tensors)
        self._adapter = {"name": name, "config": CONFIG}

    def begin_fields(self, **changes: Any) -> dict[str, Any]:
        return super().begin_fields(**changes) | {"adapter": self._adapter}


def finish(raw: RawPublisher) -> dict[str, Any]:
    raw.send_all()
    return raw.commit()


def test_an_adapter_waits_for_an_update_of_the_model(worker: Worker, spec: ModelSpec) -> None:
    """Broken off in place, the model would be half written, and the worker stale."""
    model, adapter = RawPublisher(worker, tensors := new_tensors(worker.model, 2)), RawAdapter(worker, spec, "a")
    model.begin()
    model.send(0)
    model.answer()
    begun = worker.ask(**adapter.begin_fields())
    assert worker.status()["state"] == "receiving" and begun.empty()
    for index in range(1, len(model.buckets)):
        model.send(index)
        model.answer()
    assert model.commit()["op"] == "ok" and serves(worker.model, tensors)
    adapter.token = bytes.fromhex(begun.get(timeout=20)["token"])
    assert finish(adapter)["op"] == "ok"
    assert worker.updates[-1].name == "a" and worker.status()["stale"] is None


def test_adapters_wait_for_one_another_and_a_newer_begin_takes_the_place_of_its_own(
    worker: Worker, spec: ModelSpec
) -> None:
    first, again, other = (RawAdapter(worker, spec, name) for name in "aab")
    first.begin()
    waits, newer = worker.ask(**other.begin_fields()), worker.ask(**other.begin_fields())
    assert_rejected(waits.get(timeout=20), "newer begin")
    assert again.begin()["op"] == "ok"
    assert_rejected(first.commit(), "before this update was complete")
    assert newer.empty() and finish(again)["op"] == "ok"
    other.token = bytes.fromhex(newer.get(timeout=20)["token"])
    assert finish(other)["op"] == "ok"
    assert [update.name for update in worker.updates] == ["a", "b"]


def test_the_model_need_not_wait_for_an_adapter_that_does_not_come(worker: Worker, spec: ModelSpec) -> None:
    dead, late = RawAdapter(worker, spec, "a"), RawAdapter(worker, spec, "b")
    dead.begin()
    waits = worker.ask(**late.begin_fields())
    model = RawPublisher(worker, tensors := new_tensors(worker.model, 3))
    model.begin()
    assert finish(model)["op"] == "ok" and serves(worker.model, tensors)
    wait_for(lambda: not waits.empty(), "the adapter's turn")
    assert_rejected(dead.commit(), "before this update was complete")


def test_one_adapter_too_many_is_refused_before_a_byte_comes(
    full: Worker, spec: ModelSpec, table: AdapterTable
) -> None:
    table.put("first", 0, random_adapter(spec, 4, torch.float32, seed=0))
    refused = RawAdapter(full, spec, "a").begin()
    assert_rejected(refused, "1 adapters are loaded, as many as engine.max_adapters allows: unload one first")
    assert refused["field"] == "adapter"
    newer = RawAdapter(full, spec, "first")
    assert newer.begin()["op"] == "ok" and finish(newer)["op"] == "ok", "it takes the place of the older one"


def test_an_adapter_that_others_came_before_is_refused_when_it_is_whole(
    full: Worker, spec: ModelSpec, table: AdapterTable
) -> None:
    late, later = RawAdapter(full, spec, "a"), RawAdapter(full, spec, "a")
    assert late.begin()["op"] == "ok"
    table.put("first", 0, random_adapter(spec, 4, torch.float32, seed=0))
    assert_rejected(finish(late), "engine.max_adapters")
    assert full.updates == [] and full.status()["state"] == "idle"
    table.drop("first")
    assert later.begin()["op"] == "ok" and finish(later)["op"] == "ok"


def test_an_adapter_that_is_not_finite_is_refused_when_it_is_whole(worker: Worker, spec: ModelSpec) -> None:
    good = RawAdapter(worker, spec, "a")
    good.begin()
    assert finish(good)["op"] == "ok"
    bad = RawAdapter(worker, spec, "b", value=float("nan"))
    bad.begin()
    assert_rejected(finish(bad), "lora_A.weight has NaN")
    assert [update.name for update in worker.updates] == ["a"] and worker.status()["state"] == "idle"
