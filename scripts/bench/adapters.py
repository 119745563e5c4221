"""Measures LoRA adapters of many tenants: the times of a load and a switch, and tokens/s under load.

    PYTHONPATH=.:kernels python -m scripts.bench.adapters --shape qwen3-8b --rows 64 --slots 8 --out FILE

Random weights of the real shapes; adapters of rank 16 in all modules of dense layers.

    load     an adapter's folder is read, checked and packed on the host (`load_adapter`)
    switch   an adapter is copied from the host to a slot on the idle device; `host_ms` of it keep the loop's thread

Floors: `load_floor_ms` reads the file alone, `switch_floor_ms` copies as many bytes in one piece.

Then each number of --adapters serves --requests requests, sent at once in turn for each adapter; 0 are requests without
adapters. Lengths are spread evenly from half of --new to all of it. `switches` counts copies to slots during the run;
`rows_mean` is the mean number of decode rows of a step, and steps of prompts have none.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.lora import padded_rank
from safetensors.torch import save_file

from rollout.engine.features.adapters.feature import AdaptersFeature
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.messages.to_engine import DropAdapter, PutAdapter
from rollout.engine.schedule.step_feature import find_feature
from rollout.models.lora_slots import AdapterWeights, corrected_modules
from rollout.models.peft_tensors import CONFIG, WEIGHTS, AdapterPacker, load_peft_folder
from rollout.models.spec import ModelSpec
from scripts.bench.output import spread, write_results
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import ADAPTER_RANK, OursEngine
from scripts.bench.peers.workloads import Work, random_prompts

_REPEATS = 5


def write_adapter(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Write a random adapter of all modules as PEFT does."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module in corrected_modules(spec).items():
        shapes = {"A": (ADAPTER_RANK, module.whole_inputs), "B": (module.whole_outputs, ADAPTER_RANK)}
        for letter, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * 1e-3
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values.to(dtype)
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({name.rpartition(".")[2] for name in corrected_modules(spec)})
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))


def measure_load(engine: OursEngine, spec: ModelSpec, on_gpu: bool) -> tuple[AdapterWeights, dict[str, Any]]:
    """An adapter from its folder, and the times of reading it. Each repetition keeps its memory, as a worker does."""
    dtype, times, kept = engine.dtype, [], []
    packer = AdapterPacker(pinned=on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), spec, dtype)
        began_s = time.perf_counter()
        (Path(folder) / WEIGHTS).read_bytes()
        floor_ms = (time.perf_counter() - began_s) * 1e3
        for _ in range(_REPEATS):
            began_s = time.perf_counter()
            kept.append(load_peft_folder(Path(folder), spec, ADAPTER_RANK, dtype, packer))
            times.append((time.perf_counter() - began_s) * 1e3)
    return kept[0], {"mib": kept[0].nbytes / 2**20, "load_ms": spread(times), "load_floor_ms": floor_ms}


def measure_switch(engine: OursEngine, weights: AdapterWeights, on_gpu: bool) -> dict[str, Any]:
    """The time of a copy to a slot, and the part of it that the host's thread takes."""
    memory = find_feature(engine.engine.executor.step.features, AdapterMemory)
    assert memory is not None
    host, whole = [], []
    for _ in range(_REPEATS + 1):
        began_s = time.perf_counter()
        memory.slots.write(1, weights)
        host.append((time.perf_counter() - began_s) * 1e3)
        if on_gpu:
            torch.cuda.synchronize()
        whole.append((time.perf_counter() - began_s) * 1e3)
    found = {"switch_ms": spread(whole[1:]), "switch_host_ms": statistics.median(host[1:])}
    return found | {"switch_floor_ms": measure_copy(weights.nbytes, on_gpu)}


def measure_copy(size: int, on_gpu: bool) -> float:
    """Milliseconds of one copy of so many bytes to the device, without the first one."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=on_gpu)
    target, times = torch.empty_like(source, device="cuda" if on_gpu else "cpu"), []
    for _ in range(_REPEATS + 1):
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began_s) * 1e3)
    return min(times[1:])


def measure_unload(engine: OursEngine, weights: AdapterWeights) -> float:
    """Milliseconds until the loop has forgotten an adapter that no request names."""
    engine.engine.inbox.put(PutAdapter("unloaded", weights))
    engine.engine.tick()
    engine.engine.inbox.put(DropAdapter("unloaded", 0))
    began_s = time.perf_counter()
    engine.engine.tick()
    return (time.perf_counter() - began_s) * 1e3


def work_of(requests: int, job: Job, vocab: int, seed: int) -> Work:
    """Requests in random order of lengths, the same for each seed."""
    order = torch.randperm(requests, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [job.new // 2 + place * (job.new - job.new // 2) // max(1, requests - 1) for place in order]
    return Work(random_prompts(requests, job.prompt, vocab, seed), lengths)


def measure_rate(engine: OursEngine, job: Job, adapters: int, requests: int, seed: int) -> dict[str, Any]:
    """The tokens/s of requests that name `adapters` adapters in turn."""
    feature = find_feature(engine.engine.roster.features, AdaptersFeature)
    assert feature is not None
    engine.use_adapters = adapters
    work, roster = work_of(requests, job, engine.vocab, seed), engine.engine.roster
    switches, steps, rows = feature.table.counts.loaded, engine.engine.meter.steps, roster.counters.decode_rows
    began_s = time.perf_counter()
    finished = engine.generate(work)
    took_s = time.perf_counter() - began_s
    steps = engine.engine.meter.steps - steps
    return {
        "adapters": adapters,
        "tokens_per_s": work.tokens / took_s,
        "steps": steps,
        "rows_mean": (roster.counters.decode_rows - rows) / max(1, steps),
        "switches": feature.table.counts.loaded - switches,
        "ends_s": spread(finished.ends_s),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="only the first layers; 0: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32, 100])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    job = Job(
        shape=args.shape,
        layers=args.layers,
        rows=(args.rows,),
        prompt=args.prompt,
        new=args.new,
        device=args.device,
    )
    most = max(1, *args.adapters)
    engine = OursEngine(job, 2, changes={"adapter_slots": args.slots, "max_adapters": most + 1})
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    assert isinstance(engine.spec, ModelSpec)
    weights, facts = measure_load(engine, engine.spec, on_gpu)
    facts |= measure_switch(engine, weights, on_gpu) | {"unload_ms": measure_unload(engine, weights)}
    print(json.dumps(facts), flush=True)
    for number in range(most):  # the same memory for all: a switch copies all the same
        engine.engine.inbox.put(PutAdapter(f"adapter{number}", weights))
    measure_rate(engine, job, 1, args.rows, seed=0)
    results = []
    for seed, adapters in enumerate(args.adapters, 1):
        row = measure_rate(engine, job, adapters, args.requests, seed)
        print(json.dumps(row), flush=True)
        results.append(row)
    named = {"rank": padded_rank(ADAPTER_RANK), "rows_max": args.rows, "slots": args.slots, "requests": args.requests}
    write_results(args.out, results, **engine.facts(), **facts, **named)


if __name__ == "__main__":
    main()
