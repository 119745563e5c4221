"""Peer buffers in memory that processes share: what NVLink is to GPUs, for kernels in Triton's interpreter."""

import math
from pathlib import Path

import torch
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.peer_buffers import PeerBuffers, buffer_layout


def share_buffers(
    group: TensorGroup,
    folder: Path,
    rows: int,
    words: int,
    flagged: bool = False,
    beside: PeerBuffers | None = None,
) -> PeerBuffers:
    """Connected buffers, beside others if they are given; all ranks call this with a folder that has no others."""
    shape, dtype = buffer_layout(group.size, rows, words, flagged)
    group.all_gather(torch.zeros(1))  # the folder is ready on every rank
    mapped = []
    for rank in range(group.size):
        file = folder / f"rank-{rank}-{'rows' if flagged else 'words'}"
        if rank == group.rank:
            file.write_bytes(bytes(dtype.itemsize * math.prod(shape)))
        group.all_gather(torch.zeros(1))  # the file has its size before others map it
        whole = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype)
        mapped.append(whole.view(shape))
    return PeerBuffers.of(group.rank, mapped[group.rank], [memory.data_ptr() for memory in mapped], mapped, beside)
