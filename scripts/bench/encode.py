"""The vision tower alone: milliseconds to encode images, with the floor, and the kernels that take the time.

    PYTHONPATH=.:kernels python -m scripts.bench.encode --out FILE

`device_ms` is the time of the compute stream, `enqueue_ms` what the host needs for a call, `copy_ms` what it needs to
bring the pixels of a call to pinned memory and to start their copy. `fresh_ms` is the time for an image of a size
that comes for the first time: a backend may have to plan for it. The floor counts the tower's products and its
attention at `--tflops`. Each backend of torch's attention is measured on its own; `default` is what the tower takes.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollout.models.checkpoint_config import read_config, read_tower
from rollout.models.vision import VisionTower, to_device
from scripts.bench.images import SHAPES, write_checkpoint
from scripts.bench.output import write_results

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_RUNS = 5
_FRESH = 4


def make_tower(shape: str, device: torch.device) -> VisionTower:
    """The tower of a shape, with random weights in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(shape, Path(folder))
        tower = VisionTower(read_tower(path, read_config(path)), torch.bfloat16, device)
    tower.fill_random(torch.Generator(device=device).manual_seed(1))
    return tower


def floor_ms(tower: VisionTower, patches: int, images: int, tflops: float) -> float:
    """Products of the weights with all patches, and attention within each image, at `tflops`."""
    values = dict(tower.spec.values)
    width, inner = values["hidden_size"], values["intermediate_size"]
    layer = 2 * (4 * width**2 + 2 * width * inner)
    merged = 2 * (width * tower.spec.merge**2) * (width * tower.spec.merge**2 + tower.spec.hidden)
    heads = 4 * patches * width
    each = patches * (values["depth"] * (layer + heads) + (1 + tower.spec.deepstack) * merged / tower.spec.merge**2)
    return images * each / tflops / 1e9


def timed(device: torch.device, call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the compute stream and of the host for a call; medians."""
    cuda, device_ms, host_ms = device.type == "cuda", [], []
    for _ in range(_RUNS + 2):
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # the device waits until the host has enqueued all
            start.record()
        began_s = time.perf_counter()
        call()
        host_ms.append((time.perf_counter() - began_s) * 1e3)
        if cuda:
            end.record()
            torch.cuda.synchronize()
            device_ms.append(start.elapsed_time(end))
    return statistics.median(device_ms[2:] or host_ms[2:]), statistics.median(host_ms[2:])


def fresh_ms(tower: VisionTower, device: torch.device, side: int, backend: int) -> float:
    """Milliseconds until the first call for a size has ended; the median of sizes that no other backend had."""
    merge, times = tower.spec.merge, []
    for i in range(_FRESH):
        grid = (1, side, max(merge, side - merge * (1 + _FRESH * backend + i)))
        patches = torch.zeros(grid[1] * grid[2], tower.spec.patch_values, dtype=torch.bfloat16, device=device)
        began_s = time.perf_counter()
        tower.embeddings(patches, [grid])
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(times)


def top_kernels(call: Callable[[], object], count: int = 14) -> list[dict[str, Any]]:
    """The kernels of a call that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:count]
    return [
        {"kernel": event.key[:110], "calls": event.count, "ms": round(event.self_device_time_total / 1e3, 3)}
        for event in events
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file to write")
    add("--shape", choices=SHAPES, default="qwen3-vl-8b")
    add("--device", default="cuda")
    add("--side", type=int, default=1024, help="pixels of an image's height and width")
    add("--images", type=int, nargs="+", default=[1, 4], help="of a call")
    add("--tflops", type=float, default=700.0)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    tower = make_tower(args.shape, device)
    side = args.side // dict(tower.spec.values)["patch_size"]
    rows: list[dict[str, Any]] = []
    for images in args.images:
        pixels = torch.randn(images * side**2, tower.spec.patch_values).to(torch.bfloat16)
        grids, patches = [(1, side, side)] * images, pixels.to(device)
        for number, backend in enumerate(("default", *(BACKENDS if device.type == "cuda" else ()))):
            row: dict[str, Any] = {"shape": args.shape, "images": images, "backend": backend}
            chosen = contextlib.nullcontext() if backend == "default" else sdpa_kernel([BACKENDS[backend]])
            try:
                with chosen:
                    device_ms, enqueue_ms = timed(device, lambda: tower.embeddings(patches, grids))  # noqa: B023
                    fresh = fresh_ms(tower, device, side, number) if images == args.images[0] else None
                row |= {"device_ms": round(device_ms, 2), "enqueue_ms": round(enqueue_ms, 2)}
                row |= {} if fresh is None else {"fresh_ms": round(fresh, 2)}
            except RuntimeError as error:  # a backend that does not take these sizes
                row |= {"error": str(error)[:200]}
            if backend == "default":
                row["floor_ms"] = round(floor_ms(tower, side**2, images, args.tflops), 2)
                row["copy_ms"] = round(timed(device, lambda: to_device(pixels, device))[1], 2)  # noqa: B023
            rows.append(row)
            print(json.dumps(row), flush=True)
        if device.type == "cuda":
            for kernel in top_kernels(lambda: tower.embeddings(patches, grids)):  # noqa: B023
                print(json.dumps(kernel), flush=True)
    if args.out is not None:
        write_results(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
