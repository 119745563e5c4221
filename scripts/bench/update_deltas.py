"""Times updates that send changes: to make them, to apply them, and from publish to applied over a link.

    PYTHONPATH=.:kernels python -m scripts.bench.update_deltas --shapes qwen3-8b qwen3-30b-a3b --out FILE
    ... --place host                                    the last update is kept in the trainer's host memory
    ... --staging in_place                              the parameters are changed, tensor by tensor
    ... --worker models/SmolLM2-135M-Instruct           a worker as well, by zmq: whole updates, then changes
    unshare -rn sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms; ...'

`make_s` compares an update with the last one, where the trainer's tensors are, and keeps it. `pack_s` copies the codes
to host memory, as a sender does. On the worker `take_s` copies them to theirs, `apply_s` makes the changes in staging
memory, and `check_s` compares the result's fingerprints. Changed places are drawn at random, so no bucket has fewer
changes than others; `--changed` are shares of all values. The result is compared with the trainer's tensors, bit by
bit. `links` has the seconds of the whole bytes, and of make, codes and apply one after the other, for each bandwidth in
Gbit/s; changes are faster up to `pays_below_gbit`.

With `--worker` the trainer's process is this one. Each row is the median of `--repeat` updates.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollout.weights.delta import DeltaStaging
from rollout.weights.kept_memory import InPlaceMemory, StagedMemory
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staging import WeightStaging
from scripts.bench.output import write_results
from scripts.bench.shapes import write_checkpoint
from scripts.bench.swap_weights import shape_tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
from trainer_bridge.publish.deltas import KeptDeltas
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload

_LINKS_GBIT = (1, 10, 25, 100, 400)
_BUCKET = 256 << 20


class Clock:
    """Seconds between calls of `lap`, once the device has done its work."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> float:
        """Seconds since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now_s, last_s = time.perf_counter(), getattr(self, "_last_s", 0.0)
        self._last_s = now_s
        return now_s - last_s


@torch.no_grad()
def change(tensors: Mapping[str, torch.Tensor], share: float, seed: int) -> None:
    """Add a unit in the last place to a share of the values, at the same random places for one seed."""
    for number, tensor in enumerate(tensors.values()):
        draw = torch.Generator(tensor.device).manual_seed(seed + number)
        flat = tensor.view(-1).view(torch.int16)
        for part in flat.split(1 << 27):
            part += torch.rand(part.shape, generator=draw, device=part.device) < share


def buckets(payload: Payload, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Each bucket's start in the stream and its bytes, in one memory."""
    out = torch.empty(payload.manifest.bucket_bytes, dtype=torch.uint8, device=device)
    for index in range(payload.manifest.bucket_count):
        start, end = payload.manifest.bucket_span(index)
        payload.pack_bucket(index, out)
        yield start, out[: end - start]


def empty() -> None:
    """Give back the memory of objects that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make(folder: Path, device: torch.device, place: Any, share: float, seed: int) -> tuple[dict[str, Any], Any]:
    """Make the changes of one update; their times, and (content of the base, manifest, delta, codes in host memory)."""
    tensors, kept, stop = shape_tensors(folder, device), KeptDeltas(place), threading.Event()
    kept.take(Payload(tensors, 1, _BUCKET), stop)
    change(tensors, share, seed)
    clock = Clock()
    kept.take(Payload(tensors, 2, _BUCKET), stop)
    times = {"make_s": clock.lap()}
    changes = kept.changes()
    assert changes is not None and changes.delta is not None and changes.update is not None
    codes = torch.empty(changes.manifest.total_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    clock.lap()
    for index in range(changes.manifest.bucket_count):
        start, end = changes.manifest.bucket_span(index)
        changes.pack_bucket(index, codes[start:end])
    times["pack_s"] = clock.lap()
    return times, (changes.update, changes.delta, codes)


def stage(tensors: Mapping[str, torch.Tensor], kind: str, manifest: Any, base: str) -> WeightStaging:
    """Memory that holds the base; in place the tensors themselves."""
    fit, device = ManifestFit(tuple(tensors), ()), next(iter(tensors.values())).device
    if kind == "in_place":
        staging = WeightStaging(InPlaceMemory(tensors))
        staging.open(manifest, fit)
    else:
        flat = {name: tensor.new_empty(1).expand(tensor.shape) for name, tensor in tensors.items()}
        memory = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device)
        staging = WeightStaging(
            StagedMemory(flat, "device" if device.type == "cuda" else "host", allocate=lambda _: memory)
        )
        staging.open(manifest, fit, on_device=device.type == "cuda")
    for start, data in buckets(Payload(tensors, 1, _BUCKET), device):
        staging.take(start, data)
        staging.abandon()  # the next bucket comes in the same memory
    staging.base.verified(base)
    return staging


def apply(folder: Path, device: torch.device, kind: str, made: Any, share: float, seed: int) -> dict[str, Any]:
    """Apply the changes, and compare the result with the trainer's tensors."""
    manifest, delta, codes = made
    tensors = shape_tensors(folder, device)
    staging = stage(tensors, kind, manifest, delta.base)
    clock = Clock()
    incoming = DeltaStaging(staging, manifest, delta)
    times = {"open_s": clock.lap()}
    for start in range(0, codes.numel(), _BUCKET):
        incoming.take(start, codes[start : start + _BUCKET])
    times["take_s"] = clock.lap()
    while not incoming.copied():
        pass
    times["apply_s"] = clock.lap()
    incoming.check()
    times["check_s"] = clock.lap()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if kind == "in_place":
        wanted = shape_tensors(folder, device)
        change(wanted, share, seed)
        same = all(torch.equal(tensors[name].view(torch.int16), wanted[name].view(torch.int16)) for name in wanted)
    else:
        change(tensors, share, seed)
        result, staged = Payload(tensors, 2, _BUCKET), staging.memory.blocks[0]
        same = all(torch.equal(staged[at : at + len(data)], data) for at, data in buckets(result, device))
    if not same:
        raise RuntimeError("the result is not what the trainer has")
    return {**times, "peak_bytes": peak}


def links(row: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds over links, one phase after the other."""
    work_s = row["make_s"] + row["pack_s"] + row["open_s"] + row["take_s"] + row["apply_s"] + row["check_s"]
    whole, codes = 8e-9 * row["bytes"], 8e-9 * row["codes_bytes"]
    pays = {"pays_below_gbit": (whole - codes) / work_s}
    return pays | {"links": {str(gbit): [whole / gbit, codes / gbit + work_s] for gbit in _LINKS_GBIT}}


def measure(args: argparse.Namespace, shape: str, layers: int, share: float) -> dict[str, Any]:
    """A row: one shape and one share of changed values."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as place:
        folder = write_checkpoint(shape, Path(place), layers)
        make(folder, device, args.place, share, 1)  # compiles kernels, and fills torch's cache
        empty()
        times, made = make(folder, device, args.place, share, 1)
        empty()
        more = apply(folder, device, args.staging, made, share, 1)
    row = {"shape": shape, "layers": layers, "changed": share, "place": args.place, "staging": args.staging}
    row |= {"bytes": made[0].total_bytes, "codes_bytes": made[1].codes.tensor_bytes, **times, **more}
    row["codes_over_bytes"] = row["codes_bytes"] / row["bytes"]
    return row | links(row)


def over_a_link(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows: updates of a worker by zmq, whole and as changes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.worker, dtype=torch.bfloat16)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with start_worker(args.worker, device=args.device, wandb=False, kv_memory_max_gib=0.5, max_rows=8) as worker:
        with RolloutClient(worker.endpoints) as client:
            version = 0
            for deltas in (None, args.place):
                with WeightPublisher(worker.endpoints, transport="zmq", deltas=deltas, stall_s=120) as publisher:
                    for share in args.changed:
                        reports = []
                        for number in range(args.repeat + 1):
                            version += 1
                            change(tensors, share, version)
                            (report,) = publisher.publish(tensors, version).applied(600)
                            reports += [report] if number else []  # the first one connects, or is whole
                        client.generate([1, 2, 3], max_tokens=2, min_version=version)
                        row: dict[str, Any] = {"model": Path(args.worker).name, "changed": share, "deltas": deltas}
                        row |= {"bytes": reports[0].nbytes, "sent_bytes": max(each.sent_nbytes for each in reports)}
                        for name in ("seconds", "pause_s"):
                            row[name] = statistics.median(getattr(each, name) for each in reports)
                        yield row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--layers", type=int, default=0, help="the first layers of each shape; 0: all")
    parser.add_argument("--changed", nargs="+", type=float, default=[0.0035, 0.01, 0.02])
    parser.add_argument("--place", choices=("host", "device"), default="device")
    parser.add_argument("--staging", choices=("staged", "in_place"), default="staged")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worker", help="folder of a model, for updates of a worker")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    made = (measure(args, shape, args.layers, share) for shape in args.shapes for share in args.changed)
    for row in made if args.shapes else over_a_link(args):
        print(row, flush=True)
        rows.append(row)
        empty()
        if args.out is not None:  # a run that is cut keeps what it has
            write_results(args.out, rows)


if __name__ == "__main__":
    main()
