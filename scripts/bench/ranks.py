"""Processes that are the ranks of a tensor group, for benchmarks: one a GPU, or some on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rollout_kernels.parallel import TensorGroup

#: What a rank runs: its group, and the arguments of the command.
Work = Callable[[TensorGroup, Any], None]


def run_ranks(work: Work, args: Any, count: int, device: str = "cuda") -> int:
    """Run `work` on each rank. If one fails, its error is printed and all are killed: they wait for each other.

    Returns 0 if all ranks ended well, else 1.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, errors = os.path.join(folder, "store"), context.Queue()
        arguments = (work, args, count, device, store, errors)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(count)]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            if any(process.exitcode not in (None, 0) for process in processes):
                for process in processes:
                    process.kill()
        while not errors.empty():
            print(errors.get())
    return 0 if all(process.exitcode == 0 for process in processes) else 1


def _rank(rank: int, work: Work, args: Any, count: int, device: str, store: str, errors: Any) -> None:
    try:
        files = dist.FileStore(store, count)
        if device == "cuda":
            torch.cuda.set_device(rank)
            place = torch.device("cuda", rank)
            dist.init_process_group("nccl", store=files, rank=rank, world_size=count, device_id=place)
        else:
            place = torch.device("cpu")
            torch.set_num_threads(1)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=count)
        world = dist.group.WORLD
        assert world is not None
        group = TensorGroup.connected(world, place)
        work(group, args)
        group.all_gather(torch.zeros(1, device=place))
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        errors.close()
        errors.join_thread()
        os._exit(1)  # threads and kernels of this process may wait for the other ranks
