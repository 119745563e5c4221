"""Measures a plain broadcast between two devices, for comparison with `nccl` updates.

    python -m scripts.bench.plain_broadcast RANK STORE_FILE DEVICE BYTES BUCKET_BYTES

Two processes in torch.distributed's default group (NCCL between two GPUs, otherwise gloo) broadcast one bucket after
the other, without packing or checks. Rank 0 prints the seconds of the best of a few runs.
"""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

_RUNS = 4  # the first one connects
_TIMEOUT_S = 120.0
_POLL_S = 0.1


def plain_seconds(devices: tuple[str, str], nbytes: int, bucket_bytes: int) -> float:
    """Run both ranks. Raises RuntimeError with their output if they fail, ValueError if both are on one GPU."""
    if devices[0] == devices[1] and devices[0] != "cpu":
        raise ValueError(f"a broadcast needs two GPUs, both are {devices[0]}: NCCL does not connect one with itself")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        outputs, errors = ([folder / f"{what} {rank}" for rank in range(2)] for what in ("output", "errors"))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), f"{folder}/store", device, str(nbytes), str(bucket_bytes)],
                stdout=stack.enter_context(outputs[rank].open("wb")),
                stderr=stack.enter_context(errors[rank].open("wb")),  # warnings may follow the result
            )
            for rank, device in enumerate(devices)
        ]
        until_s = time.monotonic() + _TIMEOUT_S
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > until_s:
                    break
                time.sleep(_POLL_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said, *words = (file.read_text(errors="replace") for file in (outputs[0], *errors))
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("the plain broadcast failed or took too long: " + " | ".join(text[-500:] for text in words))
    return float(said.split()[-1])


def main(rank: int, store: Path, device_name: str, nbytes: int, bucket_bytes: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    how = {"backend": "nccl", "device_id": device} if on_gpu else {"backend": "gloo"}
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit, **how)
    data = torch.zeros(min(bucket_bytes, nbytes), dtype=torch.uint8, device=device)
    best_s = float("inf")
    for _ in range(_RUNS):
        # Not `barrier`: it may use the GPU with the rank's number instead of the rank's own.
        dist.all_reduce(data[:1])
        if on_gpu:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        for start in range(0, nbytes, bucket_bytes):
            dist.broadcast(data[: min(bucket_bytes, nbytes - start)], 0)
        if on_gpu:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    if rank == 0:
        print(best_s, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
