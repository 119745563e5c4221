"""The same bridge with a model and a trainer on a CUDA device: pinned memory, streams, events."""

from __future__ import annotations

import pytest
import torch
from weights_harness import TinyModel, Worker, new_tensors, serves

from trainer_bridge.publisher import WeightPublisher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def slow(seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * 1e9))


def test_gpu_tensors_are_read_after_the_work_before_publish_and_not_after_held() -> None:
    with Worker(model=TinyModel(device="cuda")) as worker:
        with WeightPublisher(worker.endpoint, bucket_bytes=192) as publisher:
            pointers = set()
            for version in range(1, 6):
                expected = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), version).items()}
                tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
                torch.cuda.synchronize()
                slow(0.05)  # the optimizer step that publish() comes right behind
                for name, tensor in tensors.items():
                    tensor.copy_(expected[name])
                handle = publisher.publish(tensors, version)
                handle.held(60)
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))
                handle.applied(60)
                torch.cuda.synchronize()
                assert serves(worker.model, expected)
                assert worker.receiver._staging._buffer.is_pinned()
                pointers.add(worker.receiver._staging._buffer.data_ptr())
            assert len(pointers) == 1


def test_staging_is_not_released_while_a_copy_on_the_device_may_read_it() -> None:
    with Worker(model=TinyModel(device="cuda")) as worker:
        worker.gate.clear()
        with WeightPublisher(worker.endpoint) as publisher:
            handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
            update = None
            while update is None:
                update = worker.receiver.take_ready()
            slow(0.2)
            update.copy_into()
            worker.receiver.applied(update, 0.0)
            assert not update.released  # the copies wait behind the stream's other work
            handle.applied(60)
            torch.cuda.synchronize()
            assert update.released
