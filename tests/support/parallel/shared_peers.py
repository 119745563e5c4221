"""Peer buffers in memory that processes share: what NVLink is to GPUs, for kernels in Triton's interpreter."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.peer_buffers import TURNS, PeerBuffers


def share_buffers(
    group: TensorGroup, folder: Path, rows: int, words: int, fault: torch.Tensor | None = None
) -> PeerBuffers:
    """Connected buffers, with the flag of others if it is given; all ranks call this with an empty folder."""
    shape = (TURNS, group.size, rows, words)
    group.all_gather(torch.zeros(1))  # the folder is empty on every rank
    mapped = []
    for rank in range(group.size):
        file = folder / f"rank-{rank}"
        if rank == group.rank:
            file.write_bytes(bytes(8 * math.prod(shape)))
        group.all_gather(torch.zeros(1))  # the file has its size before others map it
        whole = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.int64)
        mapped.append(whole.view(shape))
    return PeerBuffers.of(group.rank, mapped[group.rank], [memory.data_ptr() for memory in mapped], mapped, fault)
