"""`deterministic` through the engine: refused where it cannot be kept, and on a GPU the same bits in any batching."""

import random

import pytest
import torch

from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import HYBRIDS, make_hybrid

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
HYBRID = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
REQUESTS = 16


def test_it_is_refused_on_a_cpu(model):
    with pytest.raises(ValueError, match="needs the fused kernels"):
        Bench(model, deterministic=True)


def completed(model, order: random.Random | None, **engine) -> list[tuple[list[int], list[float]]]:
    """Run the requests in a random order, at random times, with others that are not looked at; or one by one."""
    from rollout.engine.device.streams import make_device

    bench = Bench(model, make_device("cuda"), page_size=16, deterministic=True, **engine)
    for place, i in enumerate(order.sample(range(REQUESTS), REQUESTS) if order else range(REQUESTS)):
        generator = torch.Generator().manual_seed(i)
        prompt = torch.randint(0, 70, (3 + 41 * i % 300,), generator=generator).tolist()
        shared = list(range(40)) if i % 3 == 0 else []  # prompts that begin alike meet in the prefix cache
        settings = {"temperature": 1.0, "seed": i, **({"top_p": 0.9} if i % 4 == 1 else {})}
        bench.submit(f"r{i}", shared + prompt, 40 + 11 * i, sampling=settings)
        if order is None:
            bench.run()
            continue
        if order.random() < 0.4:
            length = order.randint(1, 200)
            bench.submit(f"other{place}", [order.randrange(70) for _ in range(length)], order.randint(1, 150))
        bench.ticks(order.randint(0, 30))
    bench.run()
    found = [(bench.tokens(f"r{i}"), bench.completions[f"r{i}", 0].raw_logprobs) for i in range(REQUESTS)]
    bench.close()
    return found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize(
    ("family", "kv"),
    [("qwen3", "auto"), ("qwen3", "fp8_e4m3"), ("mixtral", "auto"), ("Qwen3_5", "auto"), ("Qwen3_5Moe", "auto")],
)
def test_on_a_gpu_completions_are_the_same_in_any_batching(family, kv, tmp_path):
    """Neighbours, chunk sizes, rows, preemption, prefix hits, captured and launched steps, depth, a new engine."""
    from tests.support.engine.cuda_harness import load_bf16

    if family in HYBRIDS:
        make_hybrid(family, tmp_path, **SIZES, **HYBRID)
    else:
        make_checkpoint(family, tmp_path, **SIZES).bfloat16().save_pretrained(tmp_path)
    model = load_bf16(tmp_path)
    alone = completed(model, None, kv_pages=1024, kv_dtype=kv, prefix_cache=False)
    for seed in range(20):
        order = random.Random(seed)
        engine = {
            "max_rows": order.choice([3, 8, 16]),
            "kv_pages": order.choice([60, 120, 1024]),
            "prefill_chunk_tokens": order.choice([17, 64, 300]),
            "cuda_graph_rows": order.choice([0, 4, 256]),
            "pipeline_depth": order.choice([1, 2]),
            "prefix_cache": order.random() < 0.7,
            "kv_dtype": kv,
        }
        assert completed(model, order, **engine) == alone, engine
