"""Updates that send changes, with a trainer and a worker on a CUDA device: codes are made and applied there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.fault_server import changed
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from tests.support.bridge.tensor_group import GroupWorker
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.changed_words import changed_words, find_words
from trainer_bridge.transports.fingerprint import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS: dict[str, dict[str, Any]] = {
    "staged on the device": {"apply": "staged", "staging": "device"},
    "staged on the host": {"apply": "staged", "staging": "host"},
    "in place": {"apply": "in_place"},
    "two ranks": {"staging": "device"},
    "two ranks, staged on the host": {"staging": "host"},
    "two ranks in place": {"apply": "in_place"},
}


def worker_of(layout: str) -> Worker:
    if layout.startswith("two"):
        return GroupWorker(2, relay_bytes=1 << 10, block_bytes=256, device="cuda", **LAYOUTS[layout])
    return Worker(model=TinyModel(device="cuda"), **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("transport", ["zmq", "shm", "disk"])  # the others need two processes, and one GPU for each
def test_a_worker_that_has_the_last_update_gets_the_changes(
    tmp_path: Path, layout: str, place: Any, transport: str
) -> None:
    how = {"transport": transport, "folder": str(tmp_path), "bucket_bytes": 192}
    with worker_of(layout) as worker, WeightPublisher(worker.endpoint, deltas=place, **how) as publisher:
        tensors = new_tensors(TinyModel(), 1)
        for version in range(1, 7):
            on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
            handle = publisher.publish(on_gpu, version)
            handle.held(60)
            for tensor in on_gpu.values():
                tensor.fill_(float("nan"))  # the trainer's next step
            (report,) = handle.applied(60)
            torch.cuda.synchronize()
            if isinstance(worker, GroupWorker):
                assert worker.serve(tensors)
            else:
                assert serves(worker.model, {name: tensor.cuda() for name, tensor in tensors.items()})
            assert (report.sent_nbytes == report.nbytes) == (version == 1)
            tensors = changed(tensors, version, 0.05)


@pytest.mark.parametrize("layout", ["two ranks", "two ranks, staged on the host"])
def test_a_base_that_was_changed_behind_a_rank_s_back_is_found_and_sent_whole(layout: str) -> None:
    with worker_of(layout) as worker, WeightPublisher(worker.endpoint, transport="zmq", deltas="host") as publisher:
        assert isinstance(worker, GroupWorker)
        tensors = new_tensors(TinyModel(), 1)
        for version, whole in enumerate((True, False, True, False), 1):
            (report,) = publisher.publish({name: tensor.cuda() for name, tensor in tensors.items()}, version).applied(
                60
            )
            # Whole, it goes in a section for each rank, and both sections have the norms.
            assert worker.serve(tensors) and (report.sent_nbytes >= report.nbytes) == whole
            if version == 2:
                worker.stagings[-1].base.parts(0, 64)[0][1][2] ^= 1
                torch.cuda.synchronize()
            tensors = changed(tensors, version, 0.05)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.12, 0.3, 0.97, 1.0])
def test_codes_and_fingerprints_of_a_large_bucket_are_those_of_a_cpu(share: float) -> None:
    draw = torch.Generator("cuda").manual_seed(3)
    count = (64 << 20) // 2
    old = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, device="cuda", generator=draw)
    places = torch.rand(count, device="cuda", generator=draw) < share
    new = torch.where(places, old + 1, old)
    on_gpu = changed_words(old.view(torch.uint8), new.view(torch.uint8))
    on_cpu = changed_words(old.cpu().view(torch.uint8), new.cpu().view(torch.uint8))
    assert list(on_gpu) == list(on_cpu)
    assert all(torch.equal(on_gpu[part].cpu().view(torch.int16), on_cpu[part].view(torch.int16)) for part in on_cpu)
    if "words" in on_gpu:
        found = find_words(on_gpu, count)
        assert found is not None
        old[found[0]] = found[1]
        assert torch.equal(old, new)
    assert int(fingerprint(new.view(torch.uint8))) == int(fingerprint(new.cpu().view(torch.uint8)))
