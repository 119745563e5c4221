"""Benchmarks against peers: the same work for all, honest floors, and scripts that run before they cost GPU time."""

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench import compare_peers, shapes
from scripts.bench.peers.child import make_engine
from scripts.bench.peers.experiments import Finished, run_job
from scripts.bench.peers.floors import JobFloor, job_floor, step_floor_s
from scripts.bench.peers.job import EXPERIMENTS, Job
from scripts.bench.peers.ours_engine import (
    OursEngine,
    engine_settings,
    load_random,
    speculation_changes,
)
from scripts.bench.peers.repeating import places_of, repeating_prompts
from scripts.bench.peers.runs import Report, child_environment, run_child
from scripts.bench.peers.vllm_engine import capture_sizes, fill_like_a_model, repeat_like_a_text, speculative_config
from scripts.bench.peers.workloads import (
    FIRST_TOKEN,
    Work,
    completion_lengths,
    long_job,
    nested_prompts,
    uniform_work,
)
from scripts.bench.shapes import StepBytes, model_config, step_bytes
from tests.support.patience import PATIENCE_S

TOY = Job(
    shape="toy",
    device="cpu",
    rows=(1, 3),
    prompt=20,
    new=12,
    repeats=1,
    contexts=(64, 160),
    context_steps=4,
    post_rows=2,
    post_new=24,
    short_requests=6,
    short_prompt=20,
    short_new=(2, 4),
    job_rows=3,
    job_prompts=2,
    job_completions=2,
    job_prompt=20,
    job_scale=0.005,
    group_rows=(4,),
    group_prompts=(40,),
    group_sizes=(2,),
    group_new=6,
    prefill_requests=3,
    prefill_prompt=40,
    arrivals_per_s=(30.0,),
    arrivals_s=0.2,
    arrivals_prompt=40,
    arrivals_new=6,
    repeat_prompts=(160,),
    repeat_new=40,
    repeat_chances=(0.9,),
)


def toy(**changes) -> Job:
    return Job.of({**json.loads(TOY.to_json()), **changes})


# --- work ------------------------------------------------------------------------------------------------------------


def test_lengths_of_the_long_job_are_fixed():
    lengths = completion_lengths()
    assert len(lengths) == 256 and sum(lengths) == 984_729
    assert (min(lengths), max(lengths)) == (273, 16_384)


def test_long_job_repeats_each_prompt_for_its_completions():
    work = long_job(1000, prompts=3, completions=4, prompt=5)
    assert len({tuple(prompt) for prompt in work.prompts}) == 3
    assert all(work.prompts[i] == work.prompts[i // 4 * 4] for i in range(12))
    assert work.lengths == completion_lengths(12)


def test_prompts_are_the_same_for_every_engine_and_new_for_every_run():
    assert uniform_work(2, 8, 3, 1000, seed=1) == uniform_work(2, 8, 3, 1000, seed=1)
    first, second = (uniform_work(2, 8, 3, 1000, seed=seed).prompts for seed in (1, 2))
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}


def test_shorter_contexts_begin_longer_ones():
    short, long = nested_prompts(2, 10, 40, 1000), nested_prompts(3, 30, 40, 1000)
    assert [prompt[:10] for prompt in long[:2]] == short


# --- floors ----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_step_are_those_of_the_model():
    model = load_random("toy", torch.device("cpu")).model
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.embed.nbytes
    need = step_bytes("toy", model.embed.itemsize)
    assert need == StepBytes(weights, model.spec.kv_bytes_per_token(model.embed.dtype))


def test_bytes_of_a_step_of_experts_are_those_of_the_model():
    model = load_random("toy-moe", torch.device("cpu")).model
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.embed.nbytes
    need = step_bytes("toy-moe", model.embed.itemsize)
    assert need.weights + need.expert * need.experts == weights
    assert need.of_step(1, 0) == pytest.approx(need.weights + need.expert * need.top_k)
    assert need.even_experts(2) == pytest.approx(8 * (1 - (6 / 8) ** 2))
    assert need.of_step(2, 10, distinct=3.5) == need.weights + 3.5 * need.expert + 10 * need.kv_per_token
    assert need.of_step(10_000, 0) == pytest.approx(weights)


def test_the_30b_shape_reads_what_it_should():
    need = step_bytes("qwen3-30b-a3b")
    everything = need.weights + need.experts * need.expert + 2 * 151936 * 2048  # and the embedding
    assert everything == pytest.approx(30.53e9 * 2, rel=0.001)
    assert need.of_step(1, 0) == pytest.approx(3.04e9 * 2, rel=0.01), "3.35e9 are active, the embedding is not read"


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("qwen3-32b", 32.76e9),
        ("qwen3-235b-a22b", 235.1e9),
        ("llama-3.1-70b", 70.55e9),
        ("qwen3.5-27b", 26.9e9),
        ("qwen3.5-35b-a3b", 34.7e9),
        ("gpt-oss-20b", 20.9e9),
        ("glm-4.5-air", 106.9e9),
        ("glm-4.7-flash", 29.9e9),
        ("moonlight-16b-a3b", 15.96e9),
        ("gemma-3-12b", 11.77e9),
        ("olmo-3-7b", 7.30e9),
    ],
)
def test_a_shape_has_as_many_parameters_as_its_model(shape, parameters):
    """As their makers state them, without vision towers and the layers for several tokens at once."""
    need, config = step_bytes(shape), model_config(shape)
    embedding = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    assert need.weights + need.experts * need.expert + embedding == pytest.approx(2 * parameters, rel=0.005)


def test_states_and_windows_count_by_row_and_layers_can_be_left_out():
    need = StepBytes(weights=1000, kv_per_token=7, state=50, windows=((128, 3), (10, 2)))
    assert need.of_step(2, 100) == 1000 + 700 + 2 * 2 * 50 + 100 * 3 + 2 * 10 * 2
    whole, half = step_bytes("qwen3.5-27b"), step_bytes("qwen3.5-27b", layers=32)
    assert (half.state, half.kv_per_token) == (whole.state // 2, whole.kv_per_token // 2)
    assert step_bytes("gpt-oss-20b", layers=4).windows == ((128, 2 * 8 * 2 * 64 * 2),)
    with pytest.raises(ValueError, match="64 layers"):
        model_config("qwen3.5-27b", 65)


@pytest.mark.parametrize("experts", [{}, {"expert": 90, "experts": 8, "top_k": 2}])
def test_floor_of_a_job_is_that_of_its_steps_one_by_one(experts):
    need, bandwidth = StepBytes(weights=1000, kv_per_token=7, **experts), 1e6
    rng = np.random.default_rng(3)
    prompts, lengths, rows = rng.integers(2, 9, 30).tolist(), rng.integers(2, 40, 30).tolist(), 8
    total, tail, ended, left = 0.0, 0.0, 0, list(zip(prompts, lengths, strict=True))
    running: list[list[int]] = []
    while left or running:
        while left and len(running) < rows:
            prompt, length = left.pop(0)
            running.append([prompt + 1, length - 1])  # context that a step sees, steps to go
        step_s = step_floor_s(need, len(running), sum(context for context, _ in running), bandwidth)
        total += step_s
        tail += step_s if ended >= 27 else 0.0
        ended += sum(steps == 1 for _, steps in running)
        running = [[context + 1, steps - 1] for context, steps in running if steps > 1]
    assert 0 < tail < total
    floor = job_floor(need, prompts, lengths, rows, bandwidth)
    assert (floor.total_s, floor.tail_s) == pytest.approx((total, tail))


def test_a_job_of_one_completion_is_all_tail():
    need = StepBytes(weights=1000, kv_per_token=7)
    assert job_floor(need, [5], [3], 4, 1.0) == JobFloor(2000.0 + 7 * (6 + 7), 2000.0 + 7 * (6 + 7))


def test_tail_is_the_time_of_the_last_tenth():
    assert Finished([float(i) for i in range(1, 21)]).tail_s() == 2.0


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_every_experiment_runs_on_ours():
    engine = OursEngine(toy(experiments=EXPERIMENTS), depth=2)
    rows = list(run_job(engine, toy(experiments=EXPERIMENTS)))
    engine.close()
    assert [row["experiment"] for row in rows] == ["decode"] * 2 + ["contexts"] * 4 + ["post"] + ["short"] * 2 + [
        "long_job",
        "groups",
        "groups",
        "prefill",
        "arrivals",
        "repeats",
        "repeats",
    ]
    assert not any("skipped" in row for row in rows)
    assert all(row["ms"] > 0 and row["first_s"] < row["total_s"] for row in rows[:6])
    assert all(row["idle_ms"] >= 0 and row["steady_ms"] > 0 for row in rows[:2])


def test_a_group_computes_its_prompt_once_as_one_request_or_as_several():
    job = toy(experiments=["groups"])
    engine = OursEngine(job, depth=2)
    rows = list(run_job(engine, job))
    counters = engine.engine.roster.counters
    engine.close()
    assert [(row["requests"], row["completions"]) for row in rows] == [(2, 2), (4, 2)]
    # Three works of two prompts; the second completion of a prompt computes the last token once more.
    assert counters.prompt_tokens - counters.cached_tokens == 3 * 2 * (40 + 1)


def test_every_token_of_a_request_that_arrives_is_seen():
    job = toy(experiments=["arrivals"])
    engine = OursEngine(job, depth=2)
    served = engine.serve(uniform_work(3, 40, 6, engine.vocab, 1), [0.0, 0.01, 0.02])
    engine.close()
    assert len(served.latencies_s) == len(served.first_s) == 3 and len(served.gaps_s) == 3 * 5
    assert 0 < min(served.first_s) < max(served.latencies_s)


# --- text that repeats -----------------------------------------------------------------------------------------------


def going_on(tokens: list[int], places: int) -> float:
    """The share of tokens that are the next ones of the circle."""
    nexts = [FIRST_TOKEN + (token - FIRST_TOKEN + 1) % places for token in tokens[:-1]]
    return float(np.mean(np.equal(nexts, tokens[1:])))


@pytest.mark.parametrize("shape", ["toy", "toy-moe"])
def test_weights_of_repeating_text_give_the_chance_in_the_model_of_transformers(shape):
    """As in vLLM: its models have the names of transformers' parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model_config(shape)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    fill_like_a_model(model)
    vocab, places = config["vocab_size"], places_of(config["hidden_size"])
    text = torch.tensor(repeating_prompts(2, 200, config["hidden_size"], vocab, 0.8, 3))
    nexts = FIRST_TOKEN + (text - FIRST_TOKEN + 1) % places
    for layers, chance in ((2, 0.8), (0, 0.6)):
        assert repeat_like_a_text(model, vocab, chance, layers) == 2 * 2
        with torch.inference_mode():
            chances = model(text).logits.softmax(-1).gather(2, nexts[..., None])
        assert chances.min() > chance - 0.05 and chances.max() < chance + 0.05


def test_repeating_weights_need_the_names_of_a_model():
    with pytest.raises(ValueError, match=r"embed_tokens.weight"):
        repeat_like_a_text(torch.nn.Linear(4, 4), 100, 0.5, 2)


def test_prompts_repeat_as_often_as_asked_for_and_begin_apart():
    prompts = repeating_prompts(4, 1000, 4096, 50_000, 0.9, 1)
    assert all(going_on(prompt[64:], 64) == pytest.approx(0.9, abs=0.04) for prompt in prompts)
    assert len({token for prompt in prompts for token in prompt[:16]}) > 60
    assert repeating_prompts(4, 1000, 4096, 50_000, 0.9, 2) != prompts


@pytest.mark.parametrize(
    ("name", "shape"), [("ours", "toy"), ("ours-suffix", "toy"), ("ours-ngram", "toy"), ("ours-suffix", "toy-moe")]
)
def test_text_that_repeats_is_drafted(name: str, shape: str):
    job = toy(engine=name, shape=shape, experiments=["repeats"], rows=[2], repeat_chances=[0.95])
    engine = OursEngine(
        job,
        depth=2,
        changes=speculation_changes(name.removeprefix("ours-"), job.most_rows, job.drafts) if name != "ours" else None,
    )
    (row,) = run_job(engine, job)
    told = [[int(token) for part in engine.completions[key] for token in part.token_ids] for key in ("0", "1")]
    engine.close()
    assert all(len(tokens) == 40 and going_on(tokens, 16) > 0.75 for tokens in told)
    assert (row["rows"], row["context"], row["new"], row["chance"]) == (2, 160, 40, 0.95) and row["ms"] > 0
    assert row["al"] == 1.0 if name == "ours" else row["al"] > 1.2 and row["drafted"] > row["accepted"] > 10


def test_repeating_text_is_refused_where_it_cannot_be_made(monkeypatch):
    monkeypatch.setitem(shapes._OWN, "toy-tied", {**shapes._OWN["toy"], "tie_word_embeddings": True})
    engine = OursEngine(toy(), depth=1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        engine.repeat(1.0)
    engine.close()
    tied = OursEngine(toy(shape="toy-tied"), depth=1)
    with pytest.raises(ValueError, match="an output layer of its own"):
        tied.repeat(0.9)
    tied.close()
    for wrong in ({"experiments": ["repeats", "decode"]}, {"engine": "vllm", "experiments": ["repeats"], "gpus": 2}):
        with pytest.raises(ValueError, match="without other experiments"):
            make_engine(toy(**wrong))
    with pytest.raises(ValueError, match="vllm has no workers"):
        make_engine(toy(engine="vllm", gpus=2, workers=2))


def test_vllm_speculates_as_it_is_asked_to():
    assert speculative_config(Job(engine="vllm")) is None
    for engine, method in (("vllm-ngram", "ngram"), ("vllm-ngram-gpu", "ngram_gpu")):
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        assert speculative_config(Job(engine=engine, drafts=2)) == {
            "method": method,
            "num_speculative_tokens": 2,
            **lookup,
        }
    assert set(capture_sizes(8, drafts=3)) == {4, 8, 16, 32}


def test_long_contexts_are_prefilled_once():
    job = toy(experiments=["contexts"], rows=[2], contexts=[160])
    # KV for a third row: without a free page to copy the last one to, a row computes that page's tokens again.
    engine = OursEngine(job, depth=2, changes={"max_rows": 3})
    (row,) = run_job(engine, job)
    counters = engine.engine.roster.counters
    engine.close()
    assert row["context"] == 160
    # Four runs of two rows: each except the first finds all but the last token, which is always computed again.
    assert counters.prompt_tokens - counters.cached_tokens == 2 * 160 + 3 * 2


def test_rows_that_do_not_fit_are_skipped_and_reported():
    job = toy(experiments=["contexts"], rows=[1])
    engine = OursEngine(job, depth=2)
    engine.capacity_tokens = 100
    rows = list(run_job(engine, job))
    engine.close()
    assert ["skipped" in row for row in rows] == [False, True]


def test_a_completion_that_ends_early_is_an_error():
    engine = OursEngine(toy(), depth=1)
    with pytest.raises(ValueError, match="refused"):
        engine.generate(Work([[1] * 20], [10_000]))
    engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["service", "transformers"])
def test_other_engines_do_the_same_work(engine: str):
    job = toy(engine=engine, experiments=["decode", "short"])
    told = list(run_child([job.to_json()], sys.executable, child_environment(None), None, time.monotonic() + 100))
    assert "facts" in told[0], told
    assert [(row["experiment"], row["rows"], row["new"]) for row in told[1:]] == [
        ("decode", 1, 12),
        ("decode", 3, 12),
        ("short", 3, 2),
        ("short", 3, 4),
    ]


@pytest.mark.nightly
def test_two_workers_share_the_long_job(tmp_path: Path):
    out = tmp_path / "peers.json"
    sizes = "--job-rows 4 --job-prompts 2 --job-completions 3 --job-prompt 20 --job-scale 0.005".split()
    engine = "--engines service --gpus 2 --workers 1 2 --experiments long_job --shapes toy --device cpu".split()
    assert compare_peers.main(["--out", str(out), *engine, *sizes]) == 0
    told = json.loads(out.read_text())
    one, two = told["rows"]
    assert (one["gpus"], one.get("workers")) == (2, None) and (two["gpus"], two["workers"]) == (2, 2)
    assert one["tokens"] == two["tokens"] and 0 < two["tail_s"] < two["total_s"]
    assert [fact["rows_of_a_worker"] for fact in told["facts"][1:]] == [4, 2]


def test_workers_need_equal_parts_of_the_gpus(capsys):
    with pytest.raises(SystemExit):
        compare_peers.main("--out none --engines service --gpus 2 --workers 3".split())
    assert "--workers 3 must divide --gpus 2" in capsys.readouterr().err


# --- children and the report -----------------------------------------------------------------------------------------


def test_a_child_out_of_time_is_ended_and_reported():
    began_s = time.monotonic()
    told = list(run_child([TOY.to_json()], sys.executable, child_environment(None), None, began_s + 0.05))
    assert told == [{"error": "ran out of time"}]


def test_a_child_that_fails_leaves_a_row_and_a_log(tmp_path: Path):
    log, end_s = tmp_path / "log", time.monotonic() + PATIENCE_S
    told = list(run_child(['{"engine": "none"}'], sys.executable, child_environment(None), log, end_s))
    assert told == [{"error": "ValueError: no engine is called none"}]
    assert "Traceback" in log.read_text()


def test_environment_of_a_peer_comes_from_its_file(tmp_path: Path):
    file = tmp_path / "env"
    file.write_text("A=1=2\0PYTHONPATH=/peer\0B=two\nlines\0")
    environment = child_environment(file)
    assert environment["A"] == "1=2" and environment["B"] == "two\nlines" and "HOME" not in environment
    assert environment["PYTHONPATH"].endswith(":/peer") and str(Path(__file__).parents[3]) in environment["PYTHONPATH"]


def test_newer_rows_replace_older_ones_of_the_same_kind(tmp_path: Path, capsys):
    path = tmp_path / "rows.json"
    row = {"experiment": "decode", "rows": 8, "prompt": 128, "new": 512, "ms": 5.0}
    for ms in (6.0, 5.0):
        report = Report(path)
        report.ceilings([{"ceilings": {"read_tbps": 4.0}}])
        report.add(Job(), {**row, "ms": ms})
        report.add(Job(engine="vllm"), {**row, "ms": 7.5})
        report.compare()
    assert "ours 1.500x vllm" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["engine"], row["ms"]) for row in rows] == [("ours", 5.0), ("vllm", 7.5)]
    need = step_bytes("qwen3-8b")
    assert rows[0]["floor_ms"] == pytest.approx((need.weights + need.kv_per_token * 8 * (128 + 256)) / 4e12 * 1e3)
    assert rows[0]["over_floor"] == pytest.approx(5.0 / rows[0]["floor_ms"])


def test_a_run_keeps_what_was_written_into_a_summary_by_hand(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"note": "another machine", "facts": [{"run": "earlier"}], "rows": []}))
    Report(path).add(Job(), {"experiment": "post", "rows": 32, "prompt": 128, "new": 8192, "total_s": 70.0})
    told = json.loads(path.read_text())
    assert (told["note"], told["facts"], len(told["rows"])) == ("another machine", [{"run": "earlier"}], 1)


def test_post_and_long_job_have_floors(tmp_path: Path):
    report = Report(tmp_path / "rows.json")
    report.ceilings([{"ceilings": {"read_tbps": 4.69}}])
    report.add(Job(), {"experiment": "post", "rows": 32, "prompt": 128, "new": 8192, "total_s": 70.0})
    report.add(Job(), {"experiment": "long_job", "rows": 128, "completions": 256, "scale": 1.0, "total_s": 200.0})
    job, post = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert post["floor_s"] == pytest.approx(61, rel=0.02)
    # Its contexts add up to 3.8e9 tokens: two thirds of its floor are KV.
    assert job["floor_s"] == pytest.approx(180, rel=0.02)


def test_one_worker_is_compared_with_two_that_share_the_long_job(tmp_path: Path, capsys):
    path, job = tmp_path / "rows.json", Job(engine="service", gpus=2)
    report = Report(path)
    report.ceilings([{"ceilings": {"read_tbps": 4.0}}])
    row = {"experiment": "long_job", "rows": 128, "completions": 256, "scale": 1.0, "tail_s": 20.0}
    report.add(job, {**row, "total_s": 150.0})
    report.add(Job(engine="service", gpus=2, workers=2), {**row, "total_s": 180.0})
    report.add(Job(engine="vllm", gpus=2), {**row, "total_s": 300.0})
    report.compare()
    told = capsys.readouterr().out
    assert "service 1.200x service of 2 workers" in told and "service 2.000x vllm" in told
    one, two, _ = json.loads(path.read_text())["rows"]
    need, lengths = step_bytes("qwen3-8b"), sorted(completion_lengths(), reverse=True)
    assert one["floor_s"] == pytest.approx(job_floor(need, [256] * 256, completion_lengths(), 128, 8e12).total_s)
    assert two["floor_s"] == job_floor(need, [256] * 128, lengths[::2], 64, 4e12).total_s
    assert two["floor_s"] > one["floor_s"], "each worker reads all weights"
    assert job.ranks == 2 and Job(gpus=2, workers=2).ranks == 1
    with pytest.raises(ValueError, match="equal parts"):
        print(Job(gpus=4, workers=3).ranks)


def test_the_8b_shape_reads_what_it_should():
    need = step_bytes("qwen3-8b")
    assert need.kv_per_token == 147_456 and need.weights == pytest.approx(15.1e9, rel=0.005)


@pytest.mark.nightly
def test_script_measures_and_goes_on_without_vllm(tmp_path: Path, capsys):
    out = tmp_path / "peers.json"
    sizes = "--rows 2 --prompt 20 --new 6 --repeats 1 --shapes toy --device cpu".split()
    assert compare_peers.main(["--out", str(out), "--engines", "ours", "vllm", *sizes]) == 0
    ours, vllm = json.loads(out.read_text())["rows"]
    assert (ours["engine"], ours["rows"], ours["new"]) == ("ours", 2, 6) and ours["total_s"] > 0
    assert vllm["engine"] == "vllm" and "importable" in vllm["skipped"]


@pytest.mark.parametrize(
    "name",
    [
        "bench.compare_peers",
        "bench.decode",
        "bench.attention",
        "tune.linear",
        "bench.profile_decode",
    ],
)
def test_script_says_how_it_is_used(name: str, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"scripts.{name}").main(["--help"])
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def test_vllm_captures_the_sizes_that_are_measured():
    assert {1, 8, 32, 128} <= set(capture_sizes(128)) and max(capture_sizes(128)) == 128
    assert capture_sizes(1) == [1]


def test_long_contexts_get_a_snapshot_for_each_prompt_of_each_length():
    """Fewer would push each other out, and steps would be timed together with prefills."""
    job = Job(experiments=("decode", "contexts"), rows=(1, 128), context_rows=(1, 32), contexts=(1024, 16384))
    assert engine_settings(job, 2).state_snapshots == 65
    assert engine_settings(Job(experiments=("decode",)), 2).state_snapshots is None
