"""Adapters of a real worker: from folders at start and by message, named in requests, told in results."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from tests.support.models.families import make_checkpoint
from tests.support.peft_adapters import make_adapter, merged
from tests.support.worker.harness import launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import BadRequest, WeightsRejected

PROMPT = [5, 40, 7, 66, 23, 9, 31, 2, 50]
FLAGS: dict[str, Any] = {"dtype": "float32", "max_rows": 8, "page_size": 4, "adapter_slots": 2, "adapter_rank": 8}
GREEDY: dict[str, Any] = {"temperature": 0.0, "stop": {"ignore_eos": True}}


class Adapted:
    """A worker, and what it should say."""

    def __init__(self, worker: WorkerProcess, reference: Any, root: Path) -> None:
        self.worker, self.reference, self.root = worker, reference, root

    def agrees(self, completion: Any, folder: str | None) -> bool:
        """Each token is the likeliest by PEFT's merged model, or within rounding of it."""
        model = self.reference if folder is None else merged(self.reference, self.root / folder)
        tokens = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
        took = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        return bool((logits.max(-1).values - took).max() < 1e-3)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    reference = make_checkpoint("qwen3", folder / "base")
    for i in range(3):
        make_adapter(reference, folder / "adapters" / f"f{i}", i)
    make_adapter(reference, folder / "outside", 9)
    flags = FLAGS | {"adapter_root": str(folder / "adapters"), "adapters": f"first={folder / 'adapters' / 'f0'}"}
    with launch(folder / "base", log=folder / "log", **flags) as worker:
        yield Adapted(worker, reference, folder / "adapters")


@pytest.fixture
def caller(adapted: Adapted) -> Iterator[RolloutClient]:
    with RolloutClient(adapted.worker.endpoint, timeout_s=60.0) as client:
        yield client


def test_requests_name_adapters_that_came_at_start_and_by_path(adapted: Adapted, caller: RolloutClient) -> None:
    assert {"adapter", "load_adapter"} <= set(caller.status()["capabilities"])
    caller.load_adapter("second", "f1", version=7)
    calls = {None: None, "first": "f0", "second": "f1"}
    results = {name: caller.generate(PROMPT, max_tokens=10, adapter=name, **GREEDY) for name in calls}
    for name, folder in calls.items():
        assert adapted.agrees(results[name].completions[0], folder)
    said = [result.completions[0].token_ids.tolist() for result in results.values()]
    assert said[0] != said[1] != said[2] != said[0]
    assert [result.completions[0].adapter_versions for result in results.values()] == [[], [(0, 0)], [(0, 7)]]
    told = {a["name"]: a["version"] for a in caller.status()["adapters"]}
    assert (told["first"], told["second"]) == (0, 7)


def test_a_newer_version_amid_a_stream_is_told_with_its_first_token(adapted: Adapted, caller: RolloutClient) -> None:
    caller.load_adapter("grows", "f1")

    def amid(version: int) -> tuple[list[Any], Any]:
        stream = caller.generate(PROMPT, max_tokens=400, adapter="grows", stream="tokens", stream_every=4, **GREEDY)
        chunks = [next(stream)]
        caller.pause()  # it is not to be over before the adapter is there
        caller.load_adapter("grows", "f2", version=version)
        caller.resume()
        chunks += list(stream)
        return chunks, stream.result.completions[0]

    # On a busy machine a stream may be over before the pause comes.
    tries = ((version, *amid(version)) for version in range(1, 20))
    version, chunks, whole = next(found for found in tries if len(found[2].adapter_versions) == 2)
    (zero, first), (at, newer) = whole.adapter_versions
    assert zero == 0 and first < newer == version and 0 < at < 400
    assert [mark for chunk in chunks for mark in chunk.part.adapter_versions] == whole.adapter_versions
    again = caller.generate(PROMPT, max_tokens=8, adapter="grows", **GREEDY).completions[0]
    assert adapted.agrees(again, "f2") and again.adapter_versions == [(0, version)]
    caller.unload_adapter("grows")
    with pytest.raises(BadRequest, match="grows"):
        caller.generate(PROMPT, max_tokens=8, adapter="grows", **GREEDY)


def test_versions_of_an_adapter_rise_and_end(caller: RolloutClient) -> None:
    last = 2**63 - 1
    for version, refused_ones in ((5, (5, 4)), (last, (last, 5, None))):
        caller.load_adapter("old", "f1", version=version)
        for wrong in refused_ones:
            with pytest.raises(BadRequest, match=f"version {version}|the last version") as refused:
                caller.load_adapter("old", "f2", version=wrong)
            assert refused.value.field == "version"
    caller.unload_adapter("old")


def test_an_adapter_comes_over_the_bridge_while_rows_run(adapted: Adapted, caller: RolloutClient) -> None:
    model = PeftModel.from_pretrained(copy.deepcopy(adapted.reference), str(adapted.root / "f1"))
    options = {"adapter": "sent", "adapter_config": model.peft_config["default"]}
    version = caller.status()["weights_version"]
    with WeightPublisher(adapted.worker.endpoint) as publisher:
        running = caller.generate(PROMPT, max_tokens=400, adapter="first", stream="tokens", stream_every=4, **GREEDY)
        next(running)
        publisher.publish(get_peft_model_state_dict(model), 4, **options).applied(60)
        sent = caller.generate(PROMPT, max_tokens=8, adapter="sent", **GREEDY).completions[0]
        assert adapted.agrees(sent, "f1") and sent.adapter_versions == [(0, 4)]
        newer = PeftModel.from_pretrained(copy.deepcopy(adapted.reference), str(adapted.root / "f2"))
        publisher.publish(get_peft_model_state_dict(newer), 5, **options).applied(60)
        sent = caller.generate(PROMPT, max_tokens=8, adapter="sent", **GREEDY).completions[0]
        assert adapted.agrees(sent, "f2") and sent.adapter_versions == [(0, 5)]
        assert caller.status()["weights_version"] == version, "the model's own version is another matter"
        publisher.publish(adapted.reference.state_dict(), version + 1).applied(60)
        assert caller.status()["weights_version"] == version + 1
        with pytest.raises(WeightsRejected, match="version 5 is not newer"):
            publisher.publish(get_peft_model_state_dict(newer), 5, **options).applied(60)
        with pytest.raises(WeightsRejected, match="lora_B"):
            some = dict(list(get_peft_model_state_dict(newer).items())[:3])
            publisher.publish(some, 6, **options).applied(60)
        wrong = options | {"adapter_config": LoraConfig(use_dora=True, target_modules=["q_proj"])}
        with pytest.raises(WeightsRejected, match="use_dora"):
            publisher.publish(get_peft_model_state_dict(newer), 6, **wrong).applied(60)
        list(running)
    assert running.result.completions[0].finish_reason == "length"


@pytest.mark.parametrize("path", ["../outside", "/etc", "f0/../../outside", "nothing", "link"])
def test_a_path_that_leads_out_or_nowhere_is_refused(adapted: Adapted, caller: RolloutClient, path: str) -> None:
    if path == "link":
        (adapted.root / "link").symlink_to(adapted.root.parent / "outside")
    with pytest.raises(BadRequest) as error:
        caller.load_adapter("bad", path)
    assert error.value.field == "path"
    assert "bad" not in [adapter["name"] for adapter in caller.status()["adapters"]]


def test_a_newer_version_must_be_newer(caller: RolloutClient) -> None:
    with pytest.raises(BadRequest, match="version 0"):
        caller.load_adapter("first", "f0", version=0)


def test_the_status_shows_an_adapter_as_soon_as_its_load_is_confirmed(adapted: Adapted, caller: RolloutClient) -> None:
    """Also while steps run, when the loop renews its snapshot every 0.1 s."""
    model = PeftModel.from_pretrained(copy.deepcopy(adapted.reference), str(adapted.root / "f1"))
    tensors = get_peft_model_state_dict(model)
    options = {"adapter": "seen", "adapter_config": model.peft_config["default"]}

    def seen() -> int | None:
        return {a["name"]: a["version"] for a in caller.status()["adapters"]}.get("seen")

    running = caller.generate(PROMPT, max_tokens=400, stream="tokens", stream_every=4, **GREEDY)
    next(running)
    with WeightPublisher(adapted.worker.endpoint) as publisher:
        for version in range(0, 20, 2):
            caller.load_adapter("seen", "f1", version=version)
            assert seen() == version
            publisher.publish(tensors, version + 1, **options).applied(60)
            assert seen() == version + 1
    caller.unload_adapter("seen")
    assert seen() is None
    list(running)
