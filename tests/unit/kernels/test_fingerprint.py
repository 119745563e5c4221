"""The fingerprint of bytes: the kernel against the twin, the twin against plain Python."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from trainer_bridge.transports import triton_fingerprint
from trainer_bridge.transports.fingerprint import _K, fingerprint
from trainer_bridge.transports.triton_fingerprint import add_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [0, 1, 3, 4, 5, 64, 4096 * 4, 4096 * 4 + 6, (1056 + 3) * 4096 * 4 + 8]


def some_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(nbytes)).to(torch.uint8)


def by_hand(data: torch.Tensor) -> int:
    raw = bytes(data.tolist()) + bytes(-len(data) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    return (sum(word * (2 * i + 1) * _K for i, word in enumerate(words)) + len(data)) % 2**64


@pytest.mark.parametrize("nbytes", SIZES[:-1])
def test_the_twin_computes_the_sum_that_the_protocol_defines(nbytes: int) -> None:
    assert fingerprint(data := some_bytes(nbytes)).item() % 2**64 == by_hand(data)


@pytest.mark.parametrize("nbytes", [size for size in SIZES if size >= 4])
def test_the_kernel_computes_the_sum_of_the_twin(nbytes: int) -> None:
    data = some_bytes(nbytes)[: nbytes // 4 * 4]
    total = torch.full((), 5, dtype=torch.int64, device=DEVICE)
    add_words(data.view(torch.int32).to(DEVICE), total, _K)
    assert total.item() == fingerprint(data).item() - len(data) + 5
    add_words(data.view(torch.int32).to(DEVICE), total.zero_(), _K, 1 << 33)
    assert total.item() == fingerprint(data, 1 << 33).item() - len(data)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_gpu_and_a_host_find_the_same_fingerprint(nbytes: int) -> None:
    data = some_bytes(nbytes)
    assert fingerprint(data.cuda()).item() == fingerprint(data).item()


def test_the_kernel_is_launched_on_the_device_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. For a new thread this is the first device, not the model's."""
    inside: list[torch.device] = []
    launched = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        inside.append(where)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        triton_fingerprint, "add_words", lambda words, total, factor, first: launched.append(list(inside))
    )
    data = some_bytes(64).as_subclass(OnGpu)
    fingerprint(data)
    assert launched == [[data.device]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_thread_takes_the_fingerprint_of_bytes_on_the_second_gpu() -> None:
    data, found = some_bytes(4096 * 4 + 6), []
    there = data.to("cuda:1")
    thread = threading.Thread(target=lambda: found.append(fingerprint(there).item()))
    thread.start()
    thread.join()
    assert found == [fingerprint(data).item()]
