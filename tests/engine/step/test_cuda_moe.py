"""Mixtures of experts through the engine on a GPU: captured fused steps beside generic ones and transformers."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.engine.step.graphs import capturable
from rollout.models import load_model
from rollout.models.fused import FusedDecoder
from tests.support.engine.cuda_harness import assert_steady, load_bf16, use_modules, watch_compilation
from tests.support.engine.harness import Bench
from tests.support.engine.updates import Mailbox, Update, beside_a_fresh_engine
from tests.support.models import sigmoid_router
from tests.support.models.mxfp4 import make_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no measured plan")]
ROWS = 6
VOCAB, EXPERTS, TOP_K = 1031, 16, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 64,
            "num_experts": EXPERTS,
            "moe_intermediate_size": 128,
            "intermediate_size": 640,
            "mlp_only_layers": [1],  # a dense layer between sparse ones
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"head_dim": 64, "num_local_experts": EXPERTS, "intermediate_size": 160}),
    "sigmoid": (
        "Qwen3Moe",
        {"head_dim": 64, "num_experts": EXPERTS, "moe_intermediate_size": 128, "intermediate_size": 640},
    ),
    "shared_expert": (
        "Qwen2Moe",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 192,
            "intermediate_size": 640,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 64,
            "num_local_experts": EXPERTS,
            "intermediate_size": 128,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm": (
        "Glm4Moe",
        {
            "head_dim": 64,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "intermediate_size": 640,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    # Two shared experts, which are stored with the others.
    "latent": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 96,
            "n_routed_experts": EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 128,
            "intermediate_size": 640,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # With states in captured steps, and a shared expert with a gate that is stored with the others.
    "hybrid": (
        "Qwen3_5MoeText",
        {
            "head_dim": 64,
            "num_experts": EXPERTS,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    # Norms after blocks: torch runs what is between the experts.
    "afmoe": (
        "Afmoe",
        {
            "head_dim": 64,
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "moe_intermediate_size": 128,
            "intermediate_size": 640,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "intermediate_size": 128, "norm_topk_prob": False, "clip_qkv": 1.5}),
}


def save(kind: str, folder, seed: int):
    """A bf16 checkpoint, and the same weights in transformers, in float32 on the GPU."""
    import transformers

    stem, own = CONFIGS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **own})
    hf_model = transformers.AutoModelForCausalLM.from_config(config)
    hf_model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    hf_model.to(torch.bfloat16).save_pretrained(folder)
    # Read back: `to` has rounded the frequencies of rope as well.
    read = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    read = read.to("cuda").eval()
    if kind == "sigmoid":
        sigmoid_router.give_biases(folder, read)
    return read


def save_mxfp4(folder):
    """gpt-oss with experts in MXFP4 and the rest in bf16, and the same weights in float32."""
    stem, own = CONFIGS["gpt_oss"]
    assert stem == "GptOss"
    reference = make_mxfp4(folder, 3, **SIZES, **own)
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    return reference.to("cuda").eval()


@pytest.fixture(scope="module", params=[*CONFIGS, "mxfp4"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mxfp4":
        yield folder, save_mxfp4(folder)
        return
    with pytest.MonkeyPatch.context() as patch:
        sigmoid_router.declare(patch)
        yield folder, save(request.param, folder, 3)


@pytest.fixture(scope="module")
def mixtrals(tmp_path_factory):
    """Two checkpoints of one shape."""
    folders = [tmp_path_factory.mktemp(f"mixtral{seed}") for seed in (1, 2)]
    for seed, folder in enumerate(folders):
        save("mixtral", folder, seed)
    return folders


def prompt(length: int, salt: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(salt)).tolist()


def bench_of(model, **fields) -> Bench:
    return Bench(model, make_device("cuda"), **{"kv_pages": 1024, "page_size": 16, **fields})


def logprob_errors(bench: Bench, reference, prompts: dict[str, list[int]]) -> torch.Tensor:
    """Differences of the tokens' log-probs from the reference's on the same tokens."""
    differences = []
    for name, ids in prompts.items():
        done = bench.completions[name, 0]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + done.token_ids], device="cuda")).logits[0, len(ids) - 1 : -1]
        chosen = torch.tensor(done.token_ids, device="cuda")[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()
        differences.append((torch.tensor(done.logprobs) - expected).abs())
    return torch.cat(differences)


def test_logprobs_are_as_close_to_float32_as_those_of_the_generic_path(checkpoint, monkeypatch):
    """Few and many rows, prompts in chunks and whole: by all paths of the experts."""
    folder, reference = checkpoint
    prompts = {f"r{i}": prompt(5 + 37 * i, i) for i in range(12)}
    errors = {}
    for fused in (True, False):
        if not fused:
            use_modules(monkeypatch)
        model = load_bf16(folder)
        bench = bench_of(model, max_rows=12, prefill_chunk_tokens=300, cuda_graph_rows=256 * fused)
        assert isinstance(bench.engine.executor.step.forward, FusedDecoder) == fused
        assert bench.engine.executor.captures == fused and capturable(model)
        for i, (name, ids) in enumerate(prompts.items()):
            bench.submit(name, ids, 60 + 5 * i, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        errors[fused] = logprob_errors(bench, reference, prompts)
        bench.close()
    means = {fused: of.mean().item() for fused, of in errors.items()}
    medians = {fused: of.median().item() for fused, of in errors.items()}
    assert medians[True] < 1.3 * medians[False] + 1e-3, medians
    # A near tie between experts that rounding turns costs much more than rounding itself, by either path.
    assert means[True] < 1.5 * means[False] + 5e-3 and means[True] < 0.1, means


def test_depth_one_and_two_are_equal_bit_for_bit(checkpoint):
    runs = []
    for depth in (1, 2):
        bench = bench_of(load_bf16(checkpoint[0]), pipeline_depth=depth)
        for i in range(ROWS):
            bench.submit(f"r{i}", prompt(5 + 13 * i, i), 60, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        runs.append([(bench.tokens(f"r{i}"), bench.completions[f"r{i}", 0].logprobs) for i in range(ROWS)])
        bench.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rows", [2, 40])
def test_a_steady_step_neither_allocates_nor_synchronises(checkpoint, rows, monkeypatch):
    bench = bench_of(load_bf16(checkpoint[0]), max_rows=rows, prefill_chunk_tokens=512)
    for i in range(rows):
        bench.submit(f"r{i}", prompt(9, i), 200, sampling={"temperature": 1.0, "seed": i})
    assert_steady(bench, monkeypatch)


def test_nothing_is_compiled_while_serving(mixtrals, monkeypatch):
    """Steps of every size, captured and not: the plans of experts change with the number of tokens."""
    bench = bench_of(load_bf16(mixtrals[0]), max_rows=24, cuda_graph_rows=6, prefill_chunk_tokens=700)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 3, 7, 9, 30, 33, 65, 100, 129, 200, 300, 500, 690)):
        bench.complete(f"r{i}", prompt(length, i), 12)
    for i in range(24):
        bench.submit(f"s{i}", prompt(20 + i, i), 10 + i)
    bench.run()
    assert compiled == []


def test_a_swap_of_the_weights_is_seen_by_captured_steps(mixtrals):
    model, other = (load_bf16(folder) for folder in mixtrals)
    mailbox = Mailbox()
    bench = bench_of(model, receiver=mailbox, kv_on_swap="recompute")
    after, expected = beside_a_fresh_engine(
        bench, mailbox, Update(1, other, model), lambda: bench_of(load_bf16(mixtrals[1])), prompt(13, 1)
    )
    # One token at least; later ones may part by rounding, since the first came from another step.
    assert after[:3] == expected[:3]


def test_the_experts_of_a_captured_step_can_be_looked_at(checkpoint):
    bench = bench_of(load_bf16(checkpoint[0]), max_rows=4)
    for i in range(4):
        bench.submit(f"r{i}", prompt(9, i), 80, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    executor = bench.engine.executor
    sparse = len(executor.step.model.spec.sparse_layers)
    chosen = executor.graphs.chosen[4]
    assert len(chosen) == sparse
    for experts_TK in chosen:
        assert experts_TK.shape == (4, TOP_K)
        assert 0 <= experts_TK.min() and experts_TK.max() < EXPERTS
        assert all(row.unique().numel() == TOP_K for row in experts_TK)


def test_float32_takes_the_generic_path(checkpoint):
    folder, reference = checkpoint
    model = load_model(ModelSettings(path=str(folder), dtype="float32"), torch.device("cuda")).model
    bench = bench_of(model)
    assert not capturable(model) and not bench.engine.executor.captures
    bench.complete("a", prompt(20, 1), 30)
    assert logprob_errors(bench, reference, {"a": prompt(20, 1)}).max() < 1e-3


def told(bench: Bench, name: str) -> np.ndarray:
    return np.concatenate(bench.completions[name, 0].routing)


def experts_of(reference, tokens: list[int]) -> torch.Tensor:
    """What the routers of transformers choose for each token, [T, L, K]."""
    chosen: list[torch.Tensor] = []
    named = [module for name, module in reference.named_modules() if name.endswith((".gate", ".router"))]
    gates = [module for module in named if not isinstance(module, torch.nn.Linear)]  # a router may have one inside
    hooks = [gate.register_forward_hook(lambda _gate, _inputs, out: chosen.append(out[2])) for gate in gates]
    with torch.inference_mode():
        reference(torch.tensor([tokens], device="cuda"))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


def test_captured_steps_record_the_experts_that_they_ran(checkpoint):
    """The record of the last step is the input of its kernels; it is close to transformers in float32."""
    folder, reference = checkpoint
    bench = bench_of(load_bf16(folder), max_rows=4, routing=True)
    prompts = {f"r{i}": prompt(9, i) for i in range(4)}  # all begin and end in the same steps
    for i, (name, ids) in enumerate(prompts.items()):
        bench.submit(name, ids, 80, routing_from=0, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    executor = bench.engine.executor
    torch.cuda.synchronize()
    ran = torch.stack(executor.graphs.chosen[4], dim=1)  # of the slot that was captured first
    records = [slot.outputs["routing"].experts.experts_TLK[:4].int() for slot in bench.engine.pipeline.free_slots]
    assert any(torch.equal(record, ran) for record in records), "nothing ran in that slot afterwards"
    for name, ids in prompts.items():
        tokens, routing = bench.tokens(name), told(bench, name)
        top = experts_of(reference, (ids + tokens)[:-1]).cpu()
        assert routing.shape == tuple(top.shape) and routing.dtype == np.uint8
        same = (top[..., :, None] == torch.from_numpy(routing.astype(np.int64))[..., None, :]).any(-1)
        assert same.float().mean() > 0.85, "near ties turn by rounding, nothing else does"


def test_forwards_that_slots_share_hand_their_record_on(mixtrals):
    """Rows that are sampled outside the graph report the same as rows of a step without a graph."""
    runs = []
    for graphs in (True, False):
        bench = bench_of(load_bf16(mixtrals[0]), max_rows=4, routing=True, cuda_graph_rows=256 * graphs)
        for i in range(4):
            bench.submit(
                f"r{i}", prompt(9 + i, i), 12, routing_from=0, sampling={"temperature": 1.0, "top_k": 9, "seed": i}
            )
        bench.run()
        runs.append({f"r{i}": (bench.tokens(f"r{i}"), told(bench, f"r{i}")) for i in range(4)})
        bench.close()
    for name, (tokens, routing) in runs[0].items():
        other_tokens, other = runs[1][name]
        alike = next((i for i, pair in enumerate(zip(tokens, other_tokens, strict=True)) if pair[0] != pair[1]), 12)
        entries = len(routing) - 12 + alike
        assert alike > 3 and (routing[:entries] == other[:entries]).mean() > 0.97


def test_a_steady_step_with_routing_neither_allocates_nor_synchronises(checkpoint, monkeypatch):
    bench = bench_of(load_bf16(checkpoint[0]), max_rows=8, prefill_chunk_tokens=512, routing=True)
    for i in range(8):
        sampling = {"temperature": 1.0, "seed": i}
        bench.submit(f"r{i}", prompt(9, i), 200, routing_from=0, stream_every=16, sampling=sampling)
    assert_steady(bench, monkeypatch)


def test_nothing_is_compiled_while_serving_with_routing(mixtrals, monkeypatch):
    bench = bench_of(load_bf16(mixtrals[0]), max_rows=24, cuda_graph_rows=6, prefill_chunk_tokens=700, routing=True)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 3, 7, 9, 30, 65, 129, 200, 300, 690)):
        bench.complete(f"r{i}", prompt(length, i), 12, routing_from=0)
    assert compiled == []
