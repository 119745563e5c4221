"""The steps of a GPU on a CPU, with Triton's kernels left out: torch checks there what the code around them indexes.

Torch's operations are the CPU's. Hopper's own kernels are not asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from rollout.engine.device.streams import CpuStream
from rollout.engine.step.graphs import DecodeGraphs

_H200 = SimpleNamespace(multi_processor_count=132)


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Within, all tensors claim to be on a GPU, and launches do nothing: the list gets the kernel of each."""
    launched: list[Any] = []

    def launch_of(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: launched.append(kernel)

    product = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return product(a, b) if out_dtype is None else product(a.to(out_dtype), b.to(out_dtype))

    def run(stream: CpuStream, work: Callable[[], object]) -> None:
        with torch.inference_mode():
            work()

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch, "mm", mm)  # on a CPU torch.mm has no out_dtype
        patch.setattr(InterpretedFunction, "__getitem__", launch_of)
        patch.setattr(CpuStream, "run", run)  # on this thread, as on a GPU
        patch.setattr(torch.cuda, "get_device_properties", lambda device: _H200)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(DecodeGraphs, "_stream", SimpleNamespace(synchronize=lambda: None))
        yield launched
