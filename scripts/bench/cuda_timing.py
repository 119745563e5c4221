"""Timing on a CUDA machine, and the bandwidth and matrix rate from which floors are computed.

The read bandwidth is measured by a kernel that only reads. A sum over a large tensor also spends instructions on
additions and is some percent slower; the floor would be too high, and results would look too good.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_READ_BYTES = 4 << 30
_BLOCK = 2048
_LOADS = 8  # of a program


def graph_us(*works: Callable[[], object], runs: int = 12) -> float:
    """Median microseconds of one of `works`, which are captured in turn in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        works[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times = []
    for _ in range(runs + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[runs // 2] / len(works)


@triton.jit
def _read_kernel(data_ptr, out_ptr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * LOADS
    seen = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(LOADS):
        seen |= tl.load(data_ptr + first + i * BLOCK + tl.arange(0, BLOCK))
    # Without a use of the data the compiler would remove the loads.
    tl.store(out_ptr + tl.program_id(0), tl.max(seen, 0))


def read_all(data: torch.Tensor, out: torch.Tensor, num_warps: int = 8) -> None:
    """Read an int32 tensor once. `data` is a multiple of 16,384 elements; `out`: int32, one element for each of these.

    Each element of `out` becomes the largest bitwise-or of its share's columns; the value has no meaning.
    """
    programs = data.numel() // (_BLOCK * _LOADS)
    assert data.dtype == torch.int32 and data.numel() == programs * _BLOCK * _LOADS and out.numel() == programs
    _read_kernel[(programs,)](data, out, BLOCK=_BLOCK, LOADS=_LOADS, num_warps=num_warps)


def read_bandwidth() -> float:
    """Bytes per second of a kernel that only reads, over 4 GiB; the better of two numbers of warps."""
    data = torch.zeros(_READ_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    out = torch.empty(data.numel() // (_BLOCK * _LOADS), dtype=torch.int32, device="cuda")
    best_us = min(graph_us(lambda warps=warps: read_all(data, out, warps)) for warps in (4, 8))  # type: ignore[misc]
    return _READ_BYTES / best_us * 1e6


def sum_bandwidth() -> float:
    """Bytes per second of torch's sum over 4 GiB, for comparison with results that used it."""
    data = torch.empty(_READ_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    return _READ_BYTES / graph_us(data.sum) * 1e6


def matrix_rate() -> float:
    """Operations per second of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / graph_us(lambda: a @ b) * 1e6
