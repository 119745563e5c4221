"""The benchmark of swaps: what it reads off the steps, weights that show their version, whole runs at a toy shape."""

import importlib
import json
import math
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import make_device
from rollout.engine.messages.requests import SamplingParams
from rollout.metrics.recording import Recording
from rollout.metrics.step_timing import StepTiming
from rollout.models import load_model
from scripts.bench.driver import Driver
from scripts.bench.plain_broadcast import plain_seconds
from scripts.bench.shapes import write_checkpoint
from scripts.bench.swap_pause import pause_of, usual_step
from scripts.bench.swap_trainer import Order, Trainer
from scripts.bench.swap_weights import (
    held_names,
    make_visible,
    shape_tensors,
    show,
    tensor_shapes,
    token_of,
    wrong_tokens,
)
from trainer_bridge.transports.payload import Payload

ORIGIN_S = 1_000_000.0


def step(end_s: float, version: int, rows: int = 4, kind: str = "decode") -> StepTiming:
    return StepTiming(
        kind=kind, rows=rows, zombie_rows=0, tokens=rows, plan_s=0.0, launch_s=0.0, commit_s=0.0,
        start_s=end_s - 0.001, end_s=end_s, version=version,
    )  # fmt: skip


def recorded(*steps: StepTiming) -> Recording:
    return Recording(steps, (), ORIGIN_S)


def test_the_pause_is_what_two_steps_are_further_apart_than_usual() -> None:
    before = [step(0.005 * i, 7) for i in range(20)]  # the last one ends at 0.095
    slower = [step(0.095 + 0.006 * i, 7) for i in range(1, 6)]  # while the update arrives; the last at 0.125
    after = [step(0.145 + 0.005 * i, 8) for i in range(5)]
    usual_s = usual_step(recorded(*before, step(0.2, 7, rows=3), step(0.201, 7, kind="prefill")))
    assert usual_s == pytest.approx(0.005)
    found = pause_of(recorded(*before[10:], *slower, *after), 8, usual_s, ORIGIN_S + 0.0955)
    assert found.pause_s == pytest.approx(0.145 - 0.125 - 0.005)
    assert found.during_s == pytest.approx(0.006) and found.steps_during == 5


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([step(0.01, 7), step(0.02, 7)], "not among"),
        ([step(0.01, 8), step(0.02, 8)], "not among"),
        ([step(0.01, 7), step(0.02, 7), step(0.03, 8, rows=3)], "came or went"),
        ([step(0.01, 7), step(0.02, 7), step(0.03, 8, kind="prefill")], "came or went"),
    ],
)
def test_a_swap_that_cannot_be_compared_is_not(steps: list[StepTiming], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pause_of(recorded(*steps), 8, 0.005, ORIGIN_S + 0.025)


def test_without_steps_there_is_nothing_usual() -> None:
    with pytest.raises(ValueError, match="no two decode steps"):
        usual_step(recorded(step(0.01, 7)))


@pytest.mark.parametrize(("shape", "layers"), [("toy", 0), ("toy-moe", 0), ("toy-moe", 1)])
def test_visible_weights_draw_the_token_of_their_version_and_a_mixture_another_one(
    shape: str, layers: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(shape, tmp_path)
    device = make_device("cpu")
    model = load_model(ModelSettings(path=str(folder), load_format="random"), device.torch_device).model
    engine = EngineSettings(max_rows=2, kv_pages=64, max_context_tokens=64, prefix_cache=False)
    driver = Driver(Settings(engine=engine), device, model)
    tensors = shape_tensors(folder, torch.device("cpu"), layers)
    make_visible(tensors)

    def drawn(name: str, version: int, leave_out: str = "") -> set[int]:
        show(tensors, version)
        views = model.hf_views()
        for tensor_name, tensor in tensors.items():
            if tensor_name != leave_out:
                views[tensor_name].copy_(tensor)
        driver.submit(name, [3, 4, 5], 12, SamplingParams(temperature=0.0))
        driver.finish()
        return set(driver.completions[name].tokens)

    with torch.inference_mode():
        assert [drawn(f"v{version}", version) for version in (1, 2, 17)] == [{token_of(v)} for v in (1, 2, 17)]
        assert token_of(1) == token_of(17) != token_of(2)
        for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
            drawn("whole", 3)
            (token,) = drawn(left_out, 4, leave_out=left_out)
            assert token not in (token_of(3), token_of(4))
    driver.close()


def test_wrong_tokens_are_counted_by_the_runs_of_versions() -> None:
    told = [(1, 3), (2, 2)]
    right = [token_of(1)] * 3 + [token_of(2)] * 2
    assert wrong_tokens(right, told) == 0
    assert wrong_tokens(right, [(1, 2), (2, 3)]) == 1
    assert wrong_tokens([*right[:4], 5], told) == 1


def test_a_tied_model_cannot_show_a_version(tmp_path: Path) -> None:
    tensors = shape_tensors(write_checkpoint("toy", tmp_path), torch.device("cpu"))
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="another shape"):
        make_visible(tensors)


def test_layers_without_memory_have_the_tensors_of_others_and_are_sent_all_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint("toy-moe", tmp_path)
    whole, few = (shape_tensors(folder, torch.device("cpu"), layers) for layers in (0, 1))
    assert list(few) == list(whole) and all(few[name].shape == whole[name].shape for name in whole)
    first = {name for name in few if ".layers.0." in name}
    for name in first:
        other = name.replace(".layers.0.", ".layers.1.")
        assert few[other].data_ptr() == few[name].data_ptr() and whole[other].data_ptr() != whole[name].data_ptr()
    storages = {tensor.untyped_storage().data_ptr() for tensor in few.values()}
    assert len(storages) == len(few) - len(first) == len({tensor.data_ptr() for tensor in whole.values()}) - len(first)

    payload = Payload(few, 1, 1 << 20)
    manifest = payload.manifest
    assert manifest.tensor_bytes == sum(tensor.nbytes for tensor in whole.values())
    out = torch.empty(manifest.total_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        payload.pack_bucket(index, out[manifest.bucket_span(index)[0] :])
    for entry in manifest.tensors:
        assert torch.equal(out[entry.offset : entry.end], few[entry.name].view(-1).view(torch.uint8))


def test_only_one_tensor_is_whole_at_a_time(tmp_path: Path) -> None:
    whole: list[weakref.ref[torch.Tensor]] = []

    def part(tensor: torch.Tensor) -> torch.Tensor:
        assert all(before() is None for before in whole)
        whole.append(weakref.ref(tensor))
        return tensor.chunk(2)[0].clone()

    tensors = shape_tensors(write_checkpoint("toy", tmp_path), torch.device("cpu"), layers=1, part=part)
    assert len(whole) == len({tensor.data_ptr() for tensor in tensors.values()}) < len(tensors)


@pytest.mark.parametrize(
    ("shape", "layers", "fits"),
    [
        ("qwen3-235b-a22b", 1, True),
        ("qwen3-235b-a22b", 1000, True),
        ("glm-4.5-air", 1, False),  # the first layer is dense
        ("qwen3.5-27b", 4, True),  # three linear layers before each one of full attention
        ("qwen3.5-27b", 3, False),
    ],
)
def test_layers_share_memory_only_if_they_are_alike(shape: str, layers: int, fits: bool, tmp_path: Path) -> None:
    shapes = tensor_shapes(write_checkpoint(shape, tmp_path))
    if not fits:
        with pytest.raises(ValueError, match="--trainer-layers"):
            held_names(shapes, layers)
        return
    held = held_names(shapes, layers)
    assert list(held) == list(shapes) and all(shapes[name] == shapes[source] for name, source in held.items())
    layers_held = {name.split(".layers.")[1].split(".")[0] for name in held.values() if ".layers." in name}
    assert len(layers_held) == min(layers, 94)


def run(out: Path, *arguments: str) -> tuple[int, list[dict]]:
    script = importlib.import_module("scripts.bench.swap")
    sizes = ("--device", "cpu", "--shape", "toy", "--rows", "4", "--prompt", "8", "--bucket-mib", "1")
    return script.main(["--out", str(out), *sizes, *arguments]), json.loads(out.read_text())["rows"]


@pytest.mark.nightly
def test_updates_are_measured_beside_rows_that_decode_and_then_come_many_in_a_row(tmp_path: Path) -> None:
    arguments = (
        "--transport",
        "nccl",
        "auto",
        "--plain-broadcast",
        "--repeat",
        "1",
        "--updates",
        "5",
        "--new",
        "20000",
    )
    status, found = run(tmp_path / "swap.json", *arguments)
    assert status == 0
    facts, first, second, medians, *others = found[:7]
    assert (facts["apply"], facts["staging"]) == ("staged", "host")
    assert [row["transport"] for row in (first, second, medians, *others)] == ["nccl"] * 3 + ["shm"] * 3
    for number, row in enumerate((first, second, *others[:2]), 1):
        assert (row["version"], row["bytes"]) == (number, facts["bytes"])
        assert min(row[name] for name in ("applied_ms", "held_ms", "step_ms", "receive_ms", "reported_ms")) > 0
        assert row["floor_ms"] == pytest.approx(2e3 * facts["bytes"] / facts["copy_bytes_per_s"])
        assert row["pause_over_floor"] == pytest.approx(row["pause_ms"] / row["floor_ms"])
    assert medians["median_of"] == 1 and medians["pause_ms"] == second["pause_ms"]
    *some, last, plain = found[7:]
    assert [row["updates"] for row in some] == [1, 2, 3, 4, 5]
    assert last["failed"] == last["wrong_tokens"] == 0 and last["tokens"] > 0 and last["flat"]
    assert last["completions"] % 4 == 0 and 2 <= last["most_versions"] <= 6
    assert plain["gb_per_s"] == pytest.approx(facts["bytes"] / plain["plain_broadcast_ms"] / 1e6)


@pytest.mark.nightly
def test_an_update_of_several_ranks_is_applied_when_all_workers_use_it(tmp_path: Path) -> None:
    places = ("--trainer-device", "cpu", "cpu", "--worker-device", "cpu", "cpu")
    status, found = run(tmp_path / "swap.json", *places, "--transport", "nccl", "--repeat", "1", "--new", "20000")
    facts, *rows, medians = found
    assert status == 0 and (facts["workers"], facts["ranks"]) == (2, 2)
    assert [(row["version"], row["transport"], row["bytes"]) for row in rows] == [
        (version, "nccl", facts["bytes"]) for version in (1, 2)
    ]
    assert medians["median_of"] == 1
    with pytest.raises(SystemExit):
        run(tmp_path / "swap.json", *places, "--updates", "5")


@pytest.mark.nightly
def test_a_rank_that_cannot_begin_is_reported_and_leaves_no_other_waiting(tmp_path: Path) -> None:
    def children() -> set[str]:
        lists = (thread / "children" for thread in Path("/proc/self/task").iterdir())
        return {pid for each in lists for pid in each.read_text().split()}

    before = children()
    folder = write_checkpoint("toy", tmp_path / "model")
    order = Order(str(folder), ["tcp://127.0.0.1:1"], "", None, "", limit_s=10.0, store=str(tmp_path / "store"))
    with pytest.raises(RuntimeError, match="a trainer process ended with status 1"):
        Trainer(order, ["cpu", "cuda:99"])
    assert children() <= before


def test_the_figure_of_a_plain_broadcast_is_not_the_last_word_of_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = "import atexit, sys; atexit.register(lambda: print('Warning: line 12', file=sys.stderr))"
    (tmp_path / "sitecustomize.py").write_text(last)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert plain_seconds(("cpu", "cpu"), 1 << 20, 1 << 18) != 12.0


def test_a_shape_that_cannot_show_its_version_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "swap.json", "--shape", "qwen3-0.6b", "--updates", "5")


@pytest.mark.nightly
def test_a_trainer_without_memory_for_the_model_updates_all_of_a_worker_of_two_ranks(tmp_path: Path) -> None:
    places = ("--shape", "toy-moe", "--tensor-parallel", "2", "--trainer-device", "cpu", "cpu", "--apply", "in_place")
    more = ("--transport", "shm", "--repeat", "1", "--new", "2000", "--trainer-layers", "1")
    status, (facts, *rows, _) = run(tmp_path / "swap.json", *places, *more)
    assert status == 0 and (facts["ranks"], facts["tensor_parallel"], facts["trainer_layers"]) == (2, 2, 1)
    tensors = shape_tensors(write_checkpoint("toy-moe", tmp_path / "model"), torch.device("cpu"))
    held = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.1." not in name)
    assert facts["bytes"] == sum(tensor.nbytes for tensor in tensors.values()) and facts["held_bytes"] == held / 2
    assert [row["bytes"] for row in rows] == [facts["bytes"]] * 2


@pytest.mark.nightly
def test_a_trainer_may_have_more_ranks_than_a_tensor_has_rows(tmp_path: Path) -> None:
    folder = write_checkpoint("toy-moe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 2}))
    order = Order(str(folder), ["tcp://127.0.0.1:1"], "", None, "", limit_s=60.0, store=str(tmp_path / "store"))
    trainer = Trainer(order, ["cpu"] * 3)
    try:
        shapes = tensor_shapes(folder).values()
        assert trainer.facts["bytes"] == 2 * sum(math.prod(shape) for shape in shapes)
    finally:
        trainer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_updates_wait_in_its_own_memory(tmp_path: Path) -> None:
    arguments = ("--device", "cuda:0", "--shape", "qwen3-0.6b", "--bucket-mib", "64", "--repeat", "2", "--new", "20000")
    status, (facts, *rows) = run(tmp_path / "swap.json", *arguments, "--transport", "auto", "shm")
    assert status == 0 and facts["staging"] == "device" and facts["upload_bytes_per_s"] > 0
    assert [row["transport"] for row in rows] == ["cuda_ipc"] * 4 + ["shm"] * 4
    assert all(row["pause_ms"] > 0 for row in rows)


@pytest.mark.nightly
def test_a_worker_of_two_ranks_is_measured(tmp_path: Path) -> None:
    arguments = ("--tensor-parallel", "2", "--transport", "shm", "nccl", "--repeat", "1", "--updates", "3")
    status, found = run(tmp_path / "swap.json", *arguments, "--new", "20000")
    facts, first, *_ = found
    assert status == 0 and facts["tensor_parallel"] == 2 and facts["ready_s"] > 0
    assert first["floor_ms"] == pytest.approx(1e3 * facts["bytes"] / facts["copy_bytes_per_s"])
    assert found[-1]["updates"] == 3 and found[-1]["failed"] == found[-1]["wrong_tokens"] == 0
