"""Decode steps on two GPUs with attention split by contexts and by heads: captured, over KV of random values.

No prompt is computed, so contexts of 64K fit into seconds. `latent` has five layers with the sizes of DeepSeek-V3 and
32 experts; `one_kv_head` twelve layers with the sizes of Qwen3-8B and one KV head, of which both ranks have a copy with
`heads`. Run: `python -m scripts.bench.context_split --out FILE`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rollout_kernels.parallel import TensorGroup

from rollout.config import ModelSettings
from rollout.config.engine import AttentionSplit
from rollout.models import Decoder, load_model
from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.fused import FusedDecoder, supports
from rollout.models.spec import WHOLE
from scripts.bench.output import write_results
from scripts.bench.shapes import model_config

_PAGE, _STEPS = 32, 20
_ROWS = (1, 8, 32)
_CONTEXTS = (16384, 65536)
_LATENT = {
    **{"num_hidden_layers": 5, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 32},
    **{"n_shared_experts": 1, "max_position_embeddings": 131072},
}
SHAPES = {
    "one_kv_head": model_config("qwen3-8b", 12) | {"num_key_value_heads": 1, "max_position_embeddings": 131072},
    "latent": model_config("moonlight-16b-a3b") | _LATENT,
}


def _captured_ms(step: Callable[[], object]) -> float:
    """Milliseconds of a step, the mean of 20 replays. Only this thread is captured: NCCL's own asks for events."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    begin.record()
    for _ in range(_STEPS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / _STEPS


def _measure(
    folder: Path, shape: str, split: AttentionSplit, device: torch.device, group: TensorGroup
) -> list[dict[str, Any]]:
    settings = ModelSettings(path=str(folder / shape), dtype="bfloat16", load_format="random")
    model = load_model(settings, device, group=group, split=split).model
    assert isinstance(model, Decoder) and supports(model)
    forward = FusedDecoder(model)
    pages = max(_ROWS) * max(_CONTEXTS) // _PAGE + 1
    cut = model.spec.shard if split == "context" else WHOLE
    kv = KVCache.allocate(model.spec, pages, _PAGE, torch.bfloat16, device, split=cut)
    for pool in kv.tensors:
        for part in pool.split(4096):
            part.normal_()
    found = []
    for context in _CONTEXTS:
        for rows in _ROWS:
            width = context // _PAGE
            table = torch.randperm(pages - 1, device=device)[: rows * width].int().view(rows, width) + 1
            dist.broadcast(table, 0)
            lens = torch.full((rows,), context, dtype=torch.int32, device=device)
            ids = torch.arange(rows, dtype=torch.int32, device=device)
            batch = AttentionBatch(lens - 1, (table[:, -1] * _PAGE + _PAGE - 1).int(), table, lens, context)
            step_ms = _captured_ms(lambda ids=ids, batch=batch: forward(ids, batch, kv))
            found.append({"shape": shape, "rows": rows, "context": context, f"{split}_ms": step_ms})
            found[-1][f"{split}_kv_bytes"] = sum(pool.nbytes for pool in kv.tensors) // pages // _PAGE
    return found


def _run_rank(rank: int, folder: str, out: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    world = dist.group.WORLD
    assert world is not None
    group = TensorGroup.connected(world, device)
    table = []
    for shape in SHAPES:
        heads = _measure(Path(folder), shape, "heads", device, group)
        context = _measure(Path(folder), shape, "context", device, group)
        table += [one | other for one, other in zip(heads, context, strict=True)]
    if rank == 0:
        write_results(Path(out), table)
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Measure both shapes on two GPUs and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file of the summary")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name, config in SHAPES.items():
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").write_text(json.dumps(config))
        mp.spawn(_run_rank, (folder, given.out), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
