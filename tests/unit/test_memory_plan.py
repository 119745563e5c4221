"""Plans of memory: the same figures as an engine that is there, close to the pools that workers measured on GPUs."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings, Settings, WeightsSettings
from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.features.images.encoder import image_buffer_bytes
from rollout.engine.kv.allocator import pages_for
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.sizing import (
    DeviceTarget,
    PoolSize,
    kv_dtype,
    page_bytes_of,
    state_pool_bytes,
    weight_bytes,
)
from rollout.memory_plan import GIB, GPUS, Machine, MemoryPlan, Outline, outline, plan_memory, plan_outline
from rollout.models import load_model
from rollout.weights.kept_memory import parameter_bytes
from scripts.bench.shapes import write_checkpoint
from tests.support.engine.harness import Bench
from tests.support.engine.images import encoder_of
from tests.support.models import fallback, images
from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.mtp_layers import make_predicting
from tests.support.settings import settings_of

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "scripts" / "bench" / "results"
#: The share by which a plan may differ from a measured pool.
TOLERANCE = 0.08


class Told(CpuDevice):
    """A device that has so much free memory."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def settings_for(folder: Path, model: dict[str, Any] | None = None, **engine: Any) -> Settings:
    return Settings(
        model=ModelSettings(path=str(folder), **{"device": "cpu", **(model or {})}),
        engine=settings_of(EngineSettings, **engine),
    )


def counted(model: Any, engine: EngineSettings) -> dict[str, int]:
    return {
        "weights": weight_bytes(model),
        "update": parameter_bytes(model.hf_views()),
        "page": page_bytes_of(engine, model, kv_dtype(engine, model, DeviceTarget("cpu"))),
        "states": state_pool_bytes(engine, model),
        "context": model.spec.max_positions,
    }


# --- the outline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_an_outline_counts_what_the_loaded_model_counts(name, tmp_path):
    EVERY_FAMILY[name](tmp_path, 0)
    settings = settings_for(tmp_path)
    shapes, headers, *_ = outline(settings, tmp_path)
    loaded = load_model(settings.model, CPU, folder=tmp_path).model
    assert headers and all(parameter.is_meta for parameter in shapes.parameters())
    assert counted(shapes, settings.engine) == counted(loaded, settings.engine)


@pytest.mark.parametrize("experts", ["mxfp8", "fp8_row", "fp8_block"])
def test_coded_experts_are_counted(experts, tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint("qwen3_moe", tmp_path, **sizes, head_dim=32, intermediate_size=96)
    settings = settings_for(tmp_path, weight_dtype=experts)
    shapes, *_ = outline(settings, tmp_path)
    loaded = load_model(settings.model, CPU, folder=tmp_path, weights=experts).model
    assert counted(shapes, settings.engine) == counted(loaded, settings.engine)
    assert weight_bytes(shapes) < weight_bytes(outline(settings_for(tmp_path), tmp_path)[0])


def test_the_largest_product_of_codes_is_counted_as_it_is_decoded(tmp_path):
    make_checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=512)
    on_gpu = {"device": "cuda", "dtype": "bfloat16"}
    plain, coded = (
        plan_memory(settings_for(tmp_path, on_gpu, weight_dtype=format), Machine.gpu("h200"), tmp_path)
        for format in ("bf16", "fp8_block")
    )
    assert coded.steps - plain.steps == 2 * 512 * 128 * 2


@pytest.mark.parametrize("name", ["Glm4Moe", "Qwen3_5"])
def test_a_layer_that_drafts_is_counted_where_it_does(name, tmp_path):
    make_predicting(name, tmp_path)
    settings = settings_for(tmp_path, speculation="heads")
    shapes = outline(settings, tmp_path)
    loaded = load_model(settings.model, CPU, folder=tmp_path, mtp="needed").model
    assert counted(shapes.model, settings.engine) == counted(loaded, settings.engine)
    assert shapes.weights > outline(settings_for(tmp_path), tmp_path).weights


def test_a_draft_model_in_another_folder_is_counted(tmp_path):
    target = make_checkpoint("qwen3", tmp_path / "model").config
    config = head_config(target)
    draft = save_head(tmp_path / "head", config, random_head(config))
    settings = settings_for(tmp_path / "model", speculation="heads", speculation_model=str(draft))
    shapes = outline(settings, tmp_path / "model", draft)
    loaded = load_model(settings.model, CPU, folder=tmp_path / "model", draft=draft).model
    assert counted(shapes.model, settings.engine) == counted(loaded, settings.engine)
    assert shapes.weights > outline(settings_for(tmp_path / "model"), tmp_path / "model").weights


def test_a_model_that_transformers_runs_has_no_plan(tmp_path):
    fallback.make_checkpoint("GPTNeoXForCausalLM", tmp_path)
    with pytest.raises(ValueError, match="GPTNeoXForCausalLM runs through transformers' own code"):
        outline(settings_for(tmp_path), tmp_path)


def test_without_safetensors_the_sizes_follow_from_the_config(tmp_path):
    make_checkpoint("qwen3", tmp_path)
    whole = plan_memory(settings_for(tmp_path), Machine.gpu("l4"), tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    bare = plan_memory(settings_for(tmp_path), Machine.gpu("l4"), tmp_path)
    assert whole.from_headers and not bare.from_headers
    assert (whole.weights, whole.pool) == (bare.weights, bare.pool)


def test_only_the_headers_of_the_weights_are_read(tmp_path):
    """The file has the size of 16 GB of weights, and no block of a disk behind them."""
    write_checkpoint("qwen3-8b", tmp_path)
    shapes, *_ = outline(settings_for(tmp_path, {"dtype": "bfloat16"}), tmp_path)
    header, end = {}, 0
    for name, view in shapes.hf_views().items():
        size = 2 * math.prod(view.shape)
        header[name] = {"dtype": "BF16", "shape": list(view.shape), "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    plan = plan_memory(Settings(model=ModelSettings(path=str(tmp_path))), Machine.gpu("h200"), tmp_path)
    assert plan.from_headers and plan.weights == end and plan.dtype == "bfloat16"


@pytest.mark.parametrize("split", ["heads", "context"])
def test_a_part_of_a_tensor_group_is_counted_for_each_gpu(split, tmp_path):
    """Pages have half of the heads, or all heads of half of the positions."""
    write_checkpoint("qwen3-8b", tmp_path)
    one, two = (
        plan_memory(settings_for(tmp_path, {"device": "auto"}, **ranks), Machine.gpu("h100"), tmp_path)
        for ranks in ({}, {"tensor_parallel": 2, "attention_split": split})
    )
    kept_whole = 0.01 if split == "heads" else 0.05  # the products that make keys and values, too
    assert two.weights == pytest.approx(one.weights / 2, rel=kept_whole)
    assert two.page_bytes * 2 == one.page_bytes


# --- the pool --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("qwen3", {}),
        ("qwen3", {"kv_dtype": "fp8_e4m3"}),
        ("qwen3", {"speculation": "ngram"}),
        ("qwen3", {"kv_memory_fraction": 0.6, "max_context_tokens": 200}),
        ("qwen3", {"kv_pages": 77}),
        ("qwen3", {"host_kv_gib": 0.002, "host_kv_piece_mib": 0.1}),
        ("qwen3", {"adapter_slots": 2, "adapter_rank": 8, "host_kv_gib": 0.002, "host_kv_piece_mib": 0.1}),
        ("Gemma3", {}),
        ("DeepseekV3", {}),
        ("Qwen3_5", {"state_snapshots": 3}),
        ("Qwen3_5", {"host_kv_gib": 0.01, "host_kv_piece_mib": 0.1}),
        ("Qwen3_5", {"speculation": "suffix", "speculation_rows": 4}),
    ],
)
def test_a_plan_has_the_pages_of_an_engine_with_the_same_free_memory(name, engine, tmp_path):
    EVERY_FAMILY[name](tmp_path, 0)
    fields = {"max_rows": 8, "page_size": 4, "kv_pages": None, **engine}
    settings = settings_for(tmp_path, **fields)
    free = 16 << 20
    bench = Bench(load_model(settings.model, CPU, folder=tmp_path).model, Told(free), **fields)
    shapes = outline(settings, tmp_path)
    plan = plan_outline(settings, machine_with(free, settings, shapes), shapes)
    mover, states = bench.engine.executor.mover, bench.engine.executor.state_mover
    assert plan.pool is not None
    assert plan.pool.pages == bench.engine.roster.allocator.pool.total + 1
    assert plan.host_kv_tokens == (0 if mover is None else mover.host_memory.pages * 4)
    assert plan.host_states == (0 if states is None else states.host_memory.pages)
    bench.close()


def machine_with(free: int, settings: Settings, shapes: Outline) -> Machine:
    """A CPU that has `free` bytes left when an engine with these settings asks."""
    before = plan_outline(settings, Machine("cpu", 1 << 40, DeviceTarget("cpu")), shapes)
    return Machine("cpu", free + before.before_kv - before.kv_buffers, DeviceTarget("cpu"))


def test_the_parts_of_a_plan_are_as_large_as_what_an_engine_allocates(tmp_path):
    make_hybrid("Qwen3_5", tmp_path)
    engine = {"max_rows": 6, "adapter_slots": 3, "adapter_rank": 4, "state_snapshots": 5, "kv_pages": 64}
    settings = settings_for(tmp_path, **engine)
    bench = Bench(load_model(settings.model, CPU, folder=tmp_path).model, page_size=16, **engine)
    step = bench.engine.executor.step
    plan = plan_memory(settings, Machine("cpu", 1 << 34, DeviceTarget("cpu")), tmp_path)
    adapters = find_feature(step.features, AdapterMemory)
    assert adapters is not None and plan.adapters == adapters.slots.nbytes
    assert plan.states == sum(tensor.nbytes for tensor in step.kv.states.tensors)
    assert plan.kv_pool == sum(tensor.nbytes for tensor in step.kv.tensors)
    bench.close()


def test_the_buffer_for_images_is_counted(tmp_path):
    name = next(iter(images.MODELS))
    images.make_model(name, tmp_path)
    settings = settings_for(tmp_path, {"images": True}, image_tokens=100, image_patches=64)
    model = load_model(settings.model, CPU, folder=tmp_path).model
    bench = Bench(model, image_tokens=100, image_patches=64)
    plan = plan_memory(settings, Machine("cpu", 1 << 34, DeviceTarget("cpu")), tmp_path)
    assert plan.images == encoder_of(bench).buffer_PW.nbytes
    assert plan.images == image_buffer_bytes(settings.engine, model.tower.spec, model.embed.dtype)
    assert plan.weights == weight_bytes(model)
    bench.close()


# --- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "host", "weights", "expected"),
    [
        ("h200", math.inf, {}, "device"),
        ("l4", math.inf, {}, "host"),
        ("l4", 30 * GIB, {}, "host"),
        ("l4", 15 * GIB, {}, "in_place"),
        ("h200", 15 * GIB, {"staging": "host", "apply": "staged"}, "host"),
        ("h200", math.inf, {"apply": "in_place"}, "in_place"),
    ],
)
def test_an_update_is_staged_where_there_is_room(gpu, host, weights, expected, tmp_path):
    write_checkpoint("qwen3-8b", tmp_path)
    settings = Settings(
        model=ModelSettings(path=str(tmp_path)),
        weights=WeightsSettings(**weights),
        engine=EngineSettings(max_context_tokens=2048),
    )
    assert plan_memory(settings, Machine.gpu(gpu)._replace(host=host), tmp_path).staging == expected


def test_an_update_that_was_asked_for_in_a_full_gpu_is_a_problem(tmp_path):
    write_checkpoint("qwen3-8b", tmp_path)
    settings = Settings(model=ModelSettings(path=str(tmp_path)), weights=WeightsSettings(staging="device"))
    plan = plan_memory(settings, Machine.gpu("l4"), tmp_path)
    assert plan.problem is not None and "weights.staging" in plan.problem and not plan.fits


# --- GPUs ------------------------------------------------------------------------------------------------------------


def measured() -> Iterator[tuple[str, str, int, int, int, int, str]]:
    """KV pools of workers that measured their steps: file, shape, GPUs, tokens, rows, context, and the GPU.

    Those that all rows fill are left out, since they say nothing of the memory; so are shapes that had other settings.
    """
    for file in sorted(RESULTS.glob("*.json")):
        content = json.loads(file.read_text())
        facts = [fact for fact in content.get("facts", ()) if fact.get("engine") in ("ours", "service")]
        for fact in facts:
            if "kv_tokens" not in fact or not file.name.startswith(("contexts_", "peers_gpt_oss_20b_plans")):
                continue
            rows = fact.get("rows_of_a_worker") or max(row.get("rows", 1) for row in content["rows"])
            context, tokens = fact.get("max_context", 16_449), fact["kv_tokens"]
            if tokens < rows * pages_for(context, 16) * 16 and not fact["shape"].startswith("qwen3.5"):
                gpu = "h100" if "h100" in file.name else "h200"
                yield f"{file.stem}-{fact['run']}", fact["shape"], fact.get("gpus", 1), tokens, rows, context, gpu


#: This worker had room for an update in GPU memory, and staged it on the host; the run of the day before did not.
ELSEWHERE = "contexts_30b_a3b_tp2_h200-2026-11-27T06:50:58Z"
#: A run with contexts of 1K alone.
SHORT = "contexts_235b_a22b_tp4_h200-2026-11-27T21:27:03Z"


def test_plans_are_close_to_the_pools_that_workers_measured(tmp_path):
    compared = {}
    for name, shape, gpus, tokens, rows, context, gpu in measured():
        if name == SHORT:
            continue
        folder = write_checkpoint(shape, tmp_path / shape)
        engine = EngineSettings(
            max_rows=rows, max_context_tokens=context, kv_memory_fraction=0.88, tensor_parallel=gpus
        )
        # Benchmarks in this process have no receiver of updates.
        staging = "auto" if gpus > 1 and name != ELSEWHERE else "host"
        settings = Settings(
            model=ModelSettings(path=str(folder)), engine=engine, weights=WeightsSettings(staging=staging)
        )
        plan = plan_memory(settings, Machine.gpu(gpu), folder)
        assert plan.pool is not None
        compared[name] = (plan.pool.tokens, tokens)
    off = {name: planned / found - 1 for name, (planned, found) in compared.items()}
    assert len(off) >= 9
    assert all(abs(share) < TOLERANCE for share in off.values()), off


def test_the_table_of_gpus_in_the_docs_is_what_plans_say(tmp_path):
    page = (RESULTS.parents[2] / "docs" / "deployment.md").read_text()
    lines = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| \d[\w.-]*B", line)]
    gpus = [name.lower().replace(" ", "") for name in re.findall(r"GB \(([\w ]+)\)", page)]
    checked = 0
    for name, *cells in lines:
        size, weights = re.fullmatch(r"(\S+) \(([\d.]+) GiB\)", name.strip()).groups()
        if size not in ("0.6B", "1.7B", "8B", "32B", "30B-A3B"):  # the benchmarks have these shapes
            continue
        folder = write_checkpoint(f"qwen3-{size.lower()}", tmp_path / size)
        settings = settings_for(folder, {"device": "auto"}, max_context_tokens=16_384, max_rows=64)
        shapes = outline(settings, folder)
        assert round(shapes.weights / GIB, 1) == float(weights)
        for gpu, cell in zip(gpus, cells, strict=True):
            plan = plan_outline(settings, Machine.gpu(gpu), shapes)
            assert cell.strip() == str(plan.rows_of(16_384)) if plan.fits else "x" in cell
            checked += 1
    assert checked == 20


@pytest.mark.parametrize(("shape", "gpu"), [("8b", "h200"), ("8b", "h100"), ("30b-a3b", "h200")])
def test_less_stays_free_than_the_8_percent_of_vllms_default(shape, gpu, tmp_path):
    """So that at equal settings, without memory for staged updates, KV has as much room as there."""
    folder = write_checkpoint(f"qwen3-{shape}", tmp_path)
    settings = settings_for(folder, {"device": "auto"}, max_rows=1024)
    settings = settings.model_copy(update={"weights": WeightsSettings(staging="host")})
    plan = plan_memory(settings, Machine.gpu(gpu), folder)
    share = plan.fields()["bytes_a_rank"]["kept_free"] / plan.total
    assert 0.01 < share < 0.08


def test_more_of_anything_leaves_less_for_kv(tmp_path):
    write_checkpoint("qwen3-8b", tmp_path)

    def tokens(gpu: str = "h100", **engine: Any) -> int:
        plan = plan_memory(settings_for(tmp_path, {"device": "auto"}, **engine), Machine.gpu(gpu), tmp_path)
        assert plan.pool is not None
        return plan.pool.tokens

    plain = tokens()
    assert tokens(max_rows=512) < plain and tokens(prefill_chunk_tokens=32_768) < plain
    assert tokens(adapter_slots=8) < plain and tokens(host_kv_gib=8.0) < plain
    assert tokens("h200") > plain > tokens("l40s") > tokens("l4")
    assert tokens(kv_dtype="fp8_e4m3") > 1.8 * plain


def test_rows_count_what_memory_holds_and_not_what_settings_allow(tmp_path):
    write_checkpoint("qwen3-0.6b", tmp_path)
    plan = plan_memory(settings_for(tmp_path, {"device": "auto"}, max_rows=2), Machine.gpu("h200"), tmp_path)
    assert isinstance(plan.pool, PoolSize) and plan.pool.full_rows == 2 < plan.rows_of(plan.pool.context)


def test_fp8_is_refused_where_the_gpu_has_none(tmp_path):
    write_checkpoint("qwen3-8b", tmp_path)
    settings = settings_for(tmp_path, {"device": "auto"}, kv_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="capability"):
        plan_memory(settings, Machine.gpu("a100-80"), tmp_path)
    assert plan_memory(settings, Machine.gpu("l40s"), tmp_path).fits


def test_weights_that_are_larger_than_the_gpu_leave_no_pool(tmp_path):
    write_checkpoint("qwen3-32b", tmp_path)
    plan = plan_memory(settings_for(tmp_path, {"device": "auto"}), Machine.gpu("a100-40"), tmp_path)
    assert isinstance(plan, MemoryPlan) and plan.pool is None and not plan.fits and plan.problem is not None


@pytest.mark.parametrize(("name", "gib"), [("H200", GPUS["h200"].gib), ("47.5", 47.5)])
def test_a_gpu_is_named_or_has_a_size(name, gib):
    assert Machine.gpu(name).total == int(gib * GIB)


@pytest.mark.parametrize("name", ["v100", "-3", "0", "nan", "inf", ""])
def test_another_gpu_is_an_error(name):
    with pytest.raises(ValueError, match="GPU"):
        Machine.gpu(name)
