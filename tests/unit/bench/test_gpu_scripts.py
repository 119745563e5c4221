"""The GPU scripts at toy shapes on a CPU: they run and write their results, and the check detects faults."""

import gc
import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from scripts.bench import shapes
from scripts.bench.long_rows import growth
from scripts.bench.replay_drafter import ReplayDrafter, accepted_length, chance_of
from scripts.bench.shapes import OTHER_SHAPES
from scripts.check.family_sizes import FAMILY_SIZES
from tests.support.kernels.grids import nightly


def load_script(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.{name}")


@pytest.fixture(scope="module")
def pipeline():
    yield load_script("bench.gpu_pipeline")
    gc.freeze()  # again, as tests/conftest.py does: the script unfreezes, and every later collection would be slow


@pytest.fixture(scope="module")
def correctness():
    return load_script("check.correctness")


def run(script: ModuleType, out: Path, *arguments: str) -> tuple[int | None, list[dict]]:
    status = script.main(["--device", "cpu", "--out", str(out), *arguments])
    return status, json.loads(out.read_text())["rows"]


def test_the_pipeline_benchmark_compares_a_prediction_with_both_depths(pipeline, tmp_path):
    out = tmp_path / "pipeline.json"
    sizes = ("--rows", "2", "--prompt", "8", "--new", "40", "--turns", "1")
    _, (line,) = run(pipeline, out, "--shapes", "toy", *sizes)
    assert line["f_ms"] + line["s_ms"] + line["b_ms"] > 0
    assert line["error_points"] == pytest.approx(line["predicted_pct"] - line["observed_pct"])
    assert line["steps"]["1"] == line["steps"]["2"]
    assert line["zombie_steps"] == {"1": 0, "2": 1}, "the pipeline pays for the stop token that it did not know of"
    assert line["turns_ms"]["1"]["median"] == line["block_ms"] and line["turns_ms"]["2"]["median"] == line["pipe_ms"]


def test_drafts_of_a_recorded_run_are_as_right_as_asked_for(tmp_path):
    p = chance_of(2.5, 3)
    assert accepted_length(p, 3) == pytest.approx(2.5) and chance_of(4, 3) == pytest.approx(1)
    with pytest.raises(ValueError, match="1 to 4"):
        chance_of(4.5, 3)
    tokens = list(range(100, 1100))
    key = SimpleNamespace(group=SimpleNamespace(key=("run", "a")))
    for diverges in (False, True):
        drafter = ReplayDrafter({"a": tokens}, p, 5000, diverges=diverges)
        drawn, steps = 0, 0
        while drawn < 900:
            path = drafter.path(key, np.zeros(1, np.int32), tokens[:drawn], 3)
            drawn += 1 + next((i for i, token in enumerate(path) if token != tokens[drawn + i]), 3)
            steps += 1
        assert drawn / steps == pytest.approx(2.5, abs=0.15)
        wrong = [
            path
            for i in range(900)
            if (path := drafter.path(key, np.zeros(1, np.int32), tokens[:i], 3))[0] != tokens[i]
        ]
        again = sum(path[1] == tokens[path[0] - 100] for path in wrong)
        assert again == 0 if diverges else again > len(wrong) / 3


@pytest.mark.nightly
def test_the_benchmark_of_drafts_compares_all_modes_with_plain_steps(tmp_path):
    out = tmp_path / "s.json"
    sizes = (
        "--rows",
        "1",
        "2",
        "--contexts",
        "64",
        "--new",
        "60",
        "--lengths",
        "2.5",
        "--least-saved",
        "0",
        "999",
        "--modes",
        "auto",
        "always",
        "nothing",
        "unpaid",
    )
    assert load_script("bench.speculation").main(["--shape", "toy", "--device", "cpu", *sizes, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    lines = written["rows"]
    assert {(cost["rows"], cost["k"]) for cost in written["costs"]} == {(rows, k) for rows in (1, 2) for k in range(4)}
    assert [(line["rows"], line.get("mode")) for line in lines] == [
        (rows, mode) for rows in (1, 2) for mode in ("plain", "auto", "always", "always", "nothing", "unpaid")
    ]
    always = [line for line in lines if line["mode"] == "always"]
    assert all(line["al"] > 1.5 and line["equal_pct"] > 90 for line in always)
    assert all(line["accepted"] == 0 for line in lines if line["mode"] == "unpaid")
    assert always[0]["steps"] < lines[0]["steps"] / 1.5


@pytest.mark.parametrize("draft", ["head", *nightly("mtp")])
def test_the_benchmark_of_drafts_replays_guesses_of_a_draft_model(monkeypatch, tmp_path, draft):
    out = tmp_path / "s.json"
    if draft == "mtp":
        monkeypatch.setitem(shapes.OTHERS, "toy", shapes.shrunk(shapes.model_config("glm-4.5-air", 2)))
    sizes = ("--rows", "2", "--contexts", "64", "--new", "60", "--lengths", "3.3", "--modes", "heads", "unpaid")
    options = ("--shape", "toy", "--device", "cpu", *sizes, "--draft-model", draft, "--out", str(out))
    assert load_script("bench.speculation").main(options) == 0
    written = json.loads(out.read_text())
    plain, heads, unpaid = written["rows"]
    assert heads["al"] > 2.2 and heads["equal_pct"] > 90 and heads["steps"] < plain["steps"] / 1.8
    assert unpaid["accepted"] == 0 and unpaid["equal_pct"] > 90 and written["guess_ms_by_rows"]["2"] > 0


@pytest.mark.parametrize(
    ("shape", "option", "mark"), [("toy-moe", "routing", "routing"), ("toy", "truncate", "truncated")]
)
def test_the_decode_benchmark_measures_a_step_with_an_option_beside_one_without(tmp_path, shape, option, mark):
    sizes = ("--shape", shape, "--rows", "2", "--prompt", "8", "--new", "40")
    _, (plain, other) = run(load_script("bench.decode"), tmp_path / "d.json", *sizes, f"--{option}")
    assert mark not in plain and other[mark] and plain["rows"] == other["rows"] == 2
    overhead = (other["steady_ms"] / plain["steady_ms"] - 1) * 100
    assert other["overhead_pct"]["steady_ms"] == pytest.approx(overhead)


@pytest.mark.nightly
def test_the_decode_benchmark_takes_settings_and_its_floor_follows_them(tmp_path):
    need = load_script("bench.decode").step_needs
    plain, coded = need("toy-moe", {}), need("toy-moe", {"weight_dtype": "mxfp8", "kv_dtype": "fp8_e4m3"})
    assert coded.weights == plain.weights and coded.expert == round(plain.expert * 33 / 64)
    assert coded.kv_per_token == plain.kv_per_token * 20 / 32, "heads of 16: codes and a scale"
    sizes = ("--shape", "toy-moe", "--rows", "2", "--prompt", "8", "--new", "20", "--set", "kv_dtype=fp8_e4m3")
    _, (row,) = run(load_script("bench.decode"), tmp_path / "d.json", *sizes)
    written = json.loads((tmp_path / "d.json").read_text())
    assert written["settings"] == {"kv_dtype": "fp8_e4m3"} and row["steady_ms"] > 0


def test_an_unknown_setting_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(load_script("bench.decode"), tmp_path / "d.json", "--set", "kv_dtyp=fp8_e4m3")
    assert end.value.code == 2 and "did you mean engine.kv_dtype?" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_benchmark_of_scores_measures_steps_and_a_prompt(tmp_path):
    sizes = ("--shape", "toy", "--rows", "2", "--prompt", "8", "--new", "20", "--tops", "3", "--long", "200")
    _, rows = run(load_script("bench.scores"), tmp_path / "s.json", *sizes)
    assert [row.get("asking") for row in rows] == [0, 1, 2, None, None]
    assert [row["scored"] for row in rows[3:]] == [False, True]
    assert all(row.get("steady_ms", row.get("prefill_ms")) > 0 for row in rows)


@pytest.mark.nightly
def test_the_benchmark_of_a_teacher_counts_what_samples_share_once(tmp_path):
    sizes = ("--shape", "toy", "--rows", "4", "--batch", "8", "--long", "120", "--last", "8", "--samples", "4")
    _, rows = run(load_script("bench.scores"), tmp_path / "s.json", *sizes, "--chosen", "5", "--repeats", "1")
    computed = {row["way"]: row["computed"] for row in rows}
    assert [computed.pop(way) for way in ("plain", "last", "all", "chosen")] == [8 * 120] * 4
    assert 2 * 112 + 8 * 8 <= computed["shared"] < 8 * 60
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.nightly
def test_the_benchmark_of_offloading_runs_all_three(tmp_path):
    sizes = ("--shape", "toy", "--rows", "4", "--prompt", "8", "--tokens", "120", "--holds", "2", "--piece-mib", "0.02")
    script = load_script("bench.offload")
    _, rows = run(script, tmp_path / "o.json", *sizes)
    by_mode = {row["mode"]: row for row in rows}
    assert list(by_mode) == ["offload", "recompute", "whole"]
    assert by_mode["offload"]["restored"] == by_mode["offload"]["preemptions"] > 0 == by_mode["whole"]["preemptions"]
    assert by_mode["offload"]["prefilled"] == 4 * 8 + by_mode["offload"]["restored"] < by_mode["recompute"]["prefilled"]
    assert by_mode["offload"]["gib_out"] > 0 and by_mode["offload"]["moving_steps"] > 0


def test_a_step_is_moving_while_a_piece_is_on_its_way():
    script = load_script("bench.offload")
    moves = [script.MoveRecord("in", 1, 4.0, 4.5), script.MoveRecord("out", 1, 1.0, 3.5)]
    begin, end = np.array([0.0, 0.5, 2.0, 3.6, 4.4, 4.6]), np.array([0.9, 1.5, 3.0, 3.9, 5.0, 9.0])
    assert script.moving(begin, end, moves).tolist() == [False, True, True, False, True, False]
    rows, moved = np.array([2, 2, 3, 2]), np.array([False, True, False, False])
    assert script.nearest_ratio(np.array([1.0, 3.0, 9.0, 2.0]), rows, moved) == 3.0


@pytest.mark.nightly
def test_the_benchmark_of_sleep_wakes_at_both_levels(tmp_path):
    few = ("--shape", "toy", "--rows", "3", "--prompt", "20", "--new", "120", "--steps", "8", "--kv-pages", "60")
    status, rows = run(load_script("bench.sleep"), tmp_path / "sleep.json", *few, "--repeat", "1")
    assert status == 0 and [row["level"] for row in rows] == [1, 2]
    assert all(row["same"] and row["step_after_ms"] > 0 and row["wake_s"] > 0 for row in rows)


def test_the_stop_token_is_new_to_every_row(pipeline):
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 9, 8, 8, 9]]
    assert pipeline.stop_tokens(rows) == (5, [6, 8])
    assert pipeline.stop_tokens([[1] * 10]) is None


@pytest.mark.nightly
def test_a_right_engine_passes(correctness, tmp_path):
    arguments = ("--size", "toy", "--dtype", "float32")
    status, found = run(correctness, tmp_path / "c.json", *arguments)
    families = ["qwen3", "llama", "qwen3_moe", "mixtral", "olmoe"]
    assert status == 0 and [one["family"] for one in found] == families
    assert all(0.5 <= one["entropy"] <= 2.0 and one["logits"]["ours"]["rms"] < 1e-5 for one in found)
    assert all(one["depths"]["equal"]["logprobs_equal"] for one in found)


@pytest.mark.parametrize("shape", ["qwen3.5-35b-a3b", *nightly(*OTHER_SHAPES, *FAMILY_SIZES)])
def test_layers_of_a_real_shape_pass(correctness, tmp_path, shape):
    """Looks at logits leave the states of linear attention as they were, or all later tokens would be wrong."""
    arguments = ("--size", "toy", "--dtype", "float32", "--shapes", shape)
    status, (found,) = run(correctness, tmp_path / "c.json", *arguments)
    assert status == 0 and found["family"] == shape and found["layers"] >= 2
    assert found["logits"]["ours"]["rms"] < 1e-4 and found["depths"]["equal"]["logprobs_equal"]


@pytest.mark.nightly
@pytest.mark.parametrize("damage", ["", "page"])
def test_layers_through_transformers_own_code_are_held_to_the_same_bounds(correctness, tmp_path, damage):
    arguments = ["--size", "toy", "--dtype", "float32", "--shapes", "gemma-2-9b", "--fallback"]
    arguments += ["--break", damage] if damage else []
    status, (found,) = run(correctness, tmp_path / "c.json", *arguments)
    assert found["fallback"] and status == (1 if damage else 0)
    assert (found["logits"]["ours"]["rms"] < 1e-4) == (not damage)


@pytest.mark.parametrize("damage", ["page", *nightly("rope")])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_spoiled_engine_fails(correctness, tmp_path, damage, dtype):
    arguments = ("--size", "toy", "--dtype", dtype, "--families", "qwen3", "--break", damage)
    status, (found,) = run(correctness, tmp_path / "c.json", *arguments)
    assert status == 1
    said = " ".join(found["failures"])
    assert "logits" in said and "log-probs" in said


@pytest.mark.nightly
def test_rows_that_part_between_the_depths_fail(correctness, monkeypatch, tmp_path):
    """One token that differs at depth 2."""
    plain = correctness.Driver.finish

    def differing(driver) -> None:
        plain(driver)
        if driver.engine.pipeline.depth == 2 and "r0" in driver.completions:
            tokens = driver.completions["r0"].tokens
            tokens[7] = (tokens[7] + 1) % 320

    checker_depths = correctness.Checker.depths

    def depths(checker) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(correctness.Driver, "finish", differing)
            checker_depths(checker)

    monkeypatch.setattr(correctness.Checker, "depths", depths)
    arguments = ("--size", "toy", "--dtype", "float32", "--families", "qwen3")
    status, (found,) = run(correctness, tmp_path / "c.json", *arguments)
    assert status == 1 and found["depths"]["equal"]["first_divergence"] == 7


@pytest.mark.nightly
def test_many_long_rows_give_everything_back(correctness, tmp_path):
    arguments = ("--long", "--long-shape", "toy", "--long-rows", "2", "--long-tokens", "200")
    status, (found,) = run(correctness, tmp_path / "l.json", *arguments)
    assert status == 0 and found["marks"] == 9 and set(found["memory_mib"]) == {"allocated", "reserved", "driver_free"}
    assert found["pages"] >= 2 * 216 // 16


def test_a_page_that_does_not_come_back_fails(correctness, monkeypatch, tmp_path):
    def leaking(driver) -> None:
        driver.engine.roster.allocator.pool.allocate()
        plain(driver)

    plain = correctness.Driver.close
    monkeypatch.setattr(correctness.Driver, "close", leaking)
    arguments = ("--long", "--long-shape", "toy", "--long-rows", "2", "--long-tokens", "80")
    status, (found,) = run(correctness, tmp_path / "l.json", *arguments)
    assert status == 1 and "not whole" in found["failures"][0]


def test_memory_that_grows_is_said():
    mark = {"allocated": 100.0, "reserved": 200.0, "driver_free": 900.0}
    assert not growth([mark, mark | {"driver_free": 896.0}])
    assert "driver_free" in growth([mark, mark | {"driver_free": 880.0}])[0]
