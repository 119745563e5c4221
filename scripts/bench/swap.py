"""Measures weight updates of a worker whose rows decode: bytes, publish to applied, pause, and the floor of the copy.

    PYTHONPATH=.:kernels python -m scripts.bench.swap --shape qwen3-8b --transport cuda_ipc shm zmq --out FILE
    ... --shape qwen3-30b-a3b --apply in_place --transport cuda_ipc        one GPU: the model does not fit twice
    ... --trainer-device cuda:1 --transport nccl --plain-broadcast         two GPUs, compared with a plain broadcast
    ... --trainer-device cuda:0 cuda:1 --worker-device cuda:2 cuda:3       a trainer of two ranks, two workers
    ... --tensor-parallel 2 --trainer-device cuda:0                        a worker of two ranks, on the first two GPUs
    ... --tensor-parallel 4 --trainer-layers 1                             a trainer with memory for one layer
    ... --updates 100 --new 16384                                          tokens that reveal their version

A worker (`rollout serve` with random weights of the shape) and a trainer with its own tensors run as one process each.
With several worker devices there is a worker for each; the first is measured. With several trainer devices there is a
rank for each, with its part of every tensor as in FSDP2. An update is applied when all workers use it. The pause is the
extra time between two steps, from the times of the worker's steps (`scripts.bench.swap_pause`); `reported` is the
worker's own figure. The floor is 2 x bytes over the bandwidth of a device copy, measured in the same run before the
rows decode. If updates wait in pinned host memory, it is the bytes over the bandwidth of an upload. The ranks of a
worker copy their parts at the same time: the floor of N ranks is that of an N-th of the bytes. `ready_s` is the time
from the start of the worker until it serves.

With --trainer-layers N the trainer has memory for the first N layers only, and layer i has the tensors of layer i mod
N. All names are sent, so `bytes` is that of the whole model; `held_bytes` is what one rank of the trainer has. On a
CPU, or if a warning says so, the other ranks' parts cross host memory: a large model then needs a longer --limit-s.

With --updates, greedy rows then run under weights that draw a different token for each version, and every token is
compared with the version in its completion. The exit status is 1 if an update or a request failed, a token is wrong, or
memory grew.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout.metrics.recording import MAX_STEPS, Recording
from scripts.bench.driver import random_prompt
from scripts.bench.memory import resident_mib
from scripts.bench.output import write_results
from scripts.bench.plain_broadcast import plain_seconds
from scripts.bench.shapes import SHAPES, kv_pages, model_config, write_checkpoint
from scripts.bench.swap_pause import pause_of, usual_step
from scripts.bench.swap_rows import Rows
from scripts.bench.swap_trainer import Order, Trainer
from scripts.bench.swap_weights import held_names, tensor_shapes, wrong_tokens
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess, start_worker
from trainer_bridge.transports.registry import TRANSPORTS
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES

_PAGE = 16
_MEDIANS = (
    *("applied_ms", "held_ms", "gb_per_s", "pause_ms", "floor_ms", "pause_over_floor"),
    *("step_ms", "step_during_ms"),
)
_MOST_GROWTH_MIB = 64.0  # allowed growth of a process, over the second half of --updates
_MOST_DEVICE_GROWTH = 64 << 20  # bytes


class Bench:
    """The workers (the first is measured), the trainer and the rows of one run."""

    def __init__(self, args: argparse.Namespace, workers: Sequence[WorkerProcess], trainer: Trainer) -> None:
        self.args, self.worker, self.trainer = args, workers[0], trainer
        self.client, *others = self.clients = [RolloutClient(one.endpoint, timeout_s=args.limit_s) for one in workers]
        self.rows = Rows(self.client, rows_asked(args), args.limit_s)
        self.other_rows = [Rows(client, rows_asked(args), args.limit_s) for client in others]
        self.version = 0
        weights = self.client.status()["weights"]
        self.facts = {**trainer.facts, "apply": weights["apply"], "staging": weights["staging"]}
        self.facts |= trainer.ask("bandwidth")

    @property
    def floor_s(self) -> float:
        """Seconds to copy the weights from the memory of a staged update."""
        nbytes = self.facts["bytes"] / self.args.tensor_parallel
        if self.facts["staging"] == "host" and "upload_bytes_per_s" in self.facts:
            return nbytes / self.facts["upload_bytes_per_s"]
        return 2 * nbytes / self.facts["copy_bytes_per_s"]

    def publish(self, transport: str) -> dict[str, Any]:
        """Publish an update; returns its times. Raises RuntimeError if it failed."""
        self.version += 1
        answer = self.trainer.ask("publish", version=self.version, transport=transport)
        if "error" in answer:
            raise RuntimeError(f"update {self.version} failed: {answer['error']}")
        return answer

    def measured(self, transport: str) -> dict[str, Any]:
        """Publish an update while rows decode; returns a row of the table."""
        for rows in (*self.other_rows, self.rows):
            rows.keep_running()
        usual_s = usual_step(self.recording())
        answer = self.publish(transport)
        self.rows.decode(4)
        report = answer["report"]
        row = {
            "version": self.version,
            "transport": report["transport"],
            "bytes": report["nbytes"],
            "applied_ms": 1e3 * report["seconds"],
            "held_ms": 1e3 * answer["held_s"],
            "gb_per_s": report["nbytes"] / report["seconds"] / 1e9,
            "reported_ms": 1e3 * report["pause_s"],
            "floor_ms": 1e3 * self.floor_s,
        }
        row |= {f"{name}_ms": 1e3 * seconds for name, seconds in report["phases"].items()} | {"why": report["why"]}
        return row | {"step_ms": 1e3 * usual_s} | self.pause(usual_s, answer["published_at_s"])

    def pause(self, usual_s: float, published_at_s: float) -> dict[str, Any]:
        """The pause of the last update from the worker's steps, or the reason why it is unknown."""
        try:
            pause = pause_of(self.recording(), self.version, usual_s, published_at_s)
        except ValueError as error:
            return {"error": str(error)}
        return {
            "pause_ms": 1e3 * pause.pause_s,
            "pause_over_floor": pause.pause_s / self.floor_s,
            "step_during_ms": 1e3 * pause.during_s,
            "steps_during": pause.steps_during,
        }

    def recording(self) -> Recording:
        """The worker's last steps."""
        (trace,) = self.client.control("trace", steps=MAX_STEPS)
        return Recording.from_fields(trace)

    def memory(self) -> dict[str, Any]:
        """Memory of both processes and the device."""
        trainer = self.trainer.ask("memory")
        return {
            "worker_mib": resident_mib(self.worker.pid),
            "trainer_mib": trainer["resident_mib"],
            "device_bytes": trainer["device_bytes"],
        }

    def close(self) -> None:
        """End the rows and the clients."""
        self.stop_rows()
        for client in self.clients:
            client.close()

    def stop_rows(self) -> None:
        """End them."""
        for rows in (self.rows, *self.other_rows):
            rows.stop()


def rows_asked(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The requests during the updates: sampled, unless `more` says otherwise."""
    prompt = random_prompt(model_config(args.shape)["vocab_size"], args.prompt, 0)
    asked = {"prompt": prompt, "n": args.rows, "max_tokens": args.new, "stop": {"ignore_eos": True}}
    return asked | {"sampling": {"temperature": 1.0, "seed": 0}} | more


def measure(bench: Bench, show: Callable[[dict[str, Any]], None]) -> bool:
    """Some updates with each transport, a row for each. The first one includes the setup of memory and connections.

    True if all were measured.
    """
    well = True
    for transport in bench.args.transport:
        rows = [bench.measured(transport)]
        show(rows[0])
        for _ in range(bench.args.repeat):
            rows.append(bench.measured(transport))
            show(rows[-1])
        whole = [row for row in rows[1:] if "pause_ms" in row]
        medians = {name: statistics.median(row[name] for row in whole) for name in _MEDIANS if whole}
        show({"median_of": len(whole), "transport": rows[-1]["transport"], **medians})
        well &= len(whole) == bench.args.repeat
    return well


def plain_broadcast(args: argparse.Namespace, nbytes: int) -> dict[str, float]:
    """Seconds of torch.distributed for as many bytes, after the workers and the trainer have ended."""
    bucket_bytes = MAX_BUCKET_BYTES if args.bucket_mib is None else args.bucket_mib << 20
    seconds = plain_seconds((args.trainer_device[0], args.worker_device[0]), nbytes, bucket_bytes)
    return {"plain_broadcast_ms": 1e3 * seconds, "gb_per_s": nbytes / seconds / 1e9}


def many(bench: Bench, show: Callable[[dict[str, Any]], None]) -> bool:
    """Publish updates while long completions run. True if none failed, versions are right and memory is flat."""
    bench.rows.stop()
    bench.trainer.ask("visible")
    bench.publish(bench.args.transport[0])  # from now on tokens reveal their version
    asked = rows_asked(bench.args, sampling={"temperature": 0.0}, min_version=bench.version)
    bench.rows = Rows(bench.client, asked, bench.args.limit_s)
    shown_every, updates = max(1, bench.args.updates // 10), []
    memories = []
    for number in range(1, bench.args.updates + 1):
        bench.rows.keep_running()
        report = bench.publish(bench.args.transport[number % len(bench.args.transport)])["report"]
        updates.append((report["seconds"], report["pause_s"]))
        bench.rows.decode(1)
        if number % shown_every == 0:
            applied, pauses = zip(*updates[-shown_every:], strict=True)
            memories.append(bench.memory())
            times = {"applied_ms": 1e3 * statistics.median(applied), "reported_ms": 1e3 * statistics.median(pauses)}
            show({"updates": number, **times, "reported_most_ms": 1e3 * max(pauses), **memories[-1]})
    bench.rows.stop()
    ended = bench.rows.ended
    failed = [completion for completion in ended if completion.finish_reason not in ("length", "cancelled")]
    wrong = sum(wrong_tokens(completion.token_ids.tolist(), completion.versions) for completion in ended)
    middle = memories[len(memories) // 2]
    growth = {name: (memories[-1][name] or 0) - (middle[name] or 0) for name in middle}
    flat = max(growth["worker_mib"], growth["trainer_mib"]) < _MOST_GROWTH_MIB
    flat &= growth["device_bytes"] < _MOST_DEVICE_GROWTH
    row = {
        "updates": bench.args.updates,
        "completions": len(ended),
        "failed": len(failed),
        "tokens": sum(map(len, ended)),
        "wrong_tokens": wrong,
        "most_versions": max(len(completion.versions) for completion in ended),
        "applied_ms": 1e3 * statistics.median(seconds for seconds, _ in updates),
        "flat": flat,
        **{f"grown_{name}": value for name, value in growth.items()},
    }
    show(row)
    return flat and not failed and not wrong


def run(args: argparse.Namespace, folder: Path, show: Callable[[dict[str, Any]], None]) -> bool:
    """Start worker and trainer, measure, and end them."""
    checkpoint = write_checkpoint(args.shape, folder / args.shape)
    held_names(tensor_shapes(checkpoint), args.trainer_layers)  # raises ValueError before a large worker starts
    context = args.prompt + args.new
    settings = {
        "load_format": "random",
        "max_rows": args.rows,
        "max_context_tokens": context,
        "page_size": _PAGE,
        "kv_pages": kv_pages(args.rows, context, _PAGE),
        "apply": args.apply,
        "staging": args.staging,
        "wandb": False,
        "tensor_parallel": args.tensor_parallel,
    }
    with ExitStack() as stack:
        began_s = time.monotonic()
        workers = [
            stack.enter_context(
                start_worker(checkpoint, log_file=folder / f"worker-{i}.log", device=device, **settings)
            )
            for i, device in enumerate(args.worker_device)
        ]
        ready_s = time.monotonic() - began_s
        order = Order(
            folder=str(checkpoint),
            endpoints=[worker.endpoint for worker in workers],
            device="",  # each rank's own
            bucket_bytes=None if args.bucket_mib is None else args.bucket_mib << 20,
            disk=str(folder / "updates"),
            limit_s=args.limit_s,
            store=str(folder / "store"),
            layers=args.trainer_layers,
        )
        trainer = Trainer(order, args.trainer_device)
        try:
            bench = Bench(args, workers, trainer)
            places: dict[str, Any] = {"workers": len(workers), "ranks": len(args.trainer_device)}
            places |= {"tensor_parallel": args.tensor_parallel, "ready_s": ready_s}
            places |= {"trainer_layers": args.trainer_layers} if args.trainer_layers else {}
            show({"shape": args.shape, "rows": args.rows, **places, **bench.facts})
            well = measure(bench, show) if args.repeat else True
            well &= many(bench, show) if args.updates else True
            bench.close()
        except BaseException:
            for worker in workers:
                print(worker.log_path.read_text()[-4000:], flush=True)
            raise
        finally:
            trainer.close()
    if args.plain_broadcast:
        show(plain_broadcast(args, bench.facts["bytes"]))
    return well


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print each row at once, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=4096, help="tokens of a completion")
    parser.add_argument("--repeat", type=int, default=5, help="measured updates, after a warm-up; 0: none")
    parser.add_argument("--updates", type=int, default=0, help="further updates in a row, with every token checked")
    parser.add_argument(
        "--transport",
        nargs="+",
        choices=("auto", *TRANSPORTS),
        default=["auto"],
        help="transports to measure, one after the other",
    )
    parser.add_argument("--apply", choices=("auto", "staged", "in_place"), default="auto")
    parser.add_argument(
        "--staging", choices=("auto", "device", "host"), default="auto", help="memory of staged updates"
    )
    parser.add_argument("--bucket-mib", type=int, help="absent: as publishers choose")
    parser.add_argument(
        "--plain-broadcast", action="store_true", help="also measure a plain broadcast of as many bytes"
    )
    parser.add_argument(
        "--device", default=None, help="device of worker and trainer: cuda:N or cpu; default: cuda:0 if available"
    )
    parser.add_argument(
        "--worker-device", nargs="+", default=None, help="devices of the workers, if they differ; a worker for each"
    )
    parser.add_argument(
        "--trainer-device", nargs="+", default=None, help="devices of the trainer, if they differ; a rank for each"
    )
    parser.add_argument(
        "--trainer-layers",
        type=int,
        default=0,
        help="layers that the trainer has memory for; the others have the same tensors; 0: all",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of the worker, a device each")
    parser.add_argument("--limit-s", type=float, default=120.0, help="time limit of each operation, seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.updates and model_config(args.shape)["tie_word_embeddings"]:
        parser.error(
            f"{args.shape} cannot reveal its version, because its output layer is its embedding; take another shape"
        )
    if args.trainer_layers < 0:
        parser.error("--trainer-layers is a number of layers, or 0 for all")
    device = args.device or _device()
    if args.tensor_parallel > 1 and args.worker_device:
        parser.error("the ranks of --tensor-parallel take the first devices: leave --worker-device out")
    args.worker_device = args.worker_device or [device if args.tensor_parallel == 1 else device.partition(":")[0]]
    args.trainer_device = args.trainer_device or [device]
    if args.updates and len(args.worker_device) + len(args.trainer_device) > 2:
        parser.error("--updates is for one worker and a trainer of one rank")
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        write_results(args.out, rows)

    with tempfile.TemporaryDirectory(prefix="bench-swap-") as folder:
        well = run(args, Path(folder), show)
    return 0 if well else 1


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
