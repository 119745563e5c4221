"""`rollout plan`: the plan of a worker as text and as JSON, advice that helps, and the pages of a real worker."""

import json
from pathlib import Path

import pytest

from rollout.cli.main import main
from rollout.memory_plan import GPUS
from scripts.bench.shapes import write_checkpoint
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker

ONES = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints" / "ones"


@pytest.fixture
def eight(tmp_path) -> str:
    return str(write_checkpoint("qwen3-8b", tmp_path / "8b"))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv("ROLLOUT_ENGINE__MAX_ROWS", raising=False)


def plan(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_names_every_part_of_the_memory(eight, capsys):
    assert main(["plan", eight, "--gpu", "h200", "--context", "16384", "--rows", "64"]) == 0
    text = capsys.readouterr().out
    for part in ("weights", "staging of updates", "working memory of steps", "estimate", "KV pool", "rows that fit"):
        assert part in text
    code, fields = plan(capsys, eight, "--gpu", "h200", "--context", "16384", "--rows", "64")
    parts = fields["bytes_a_rank"]
    assert code == 0 and fields["fits"] and fields["kv"]["max_rows"] == 64 and fields["kv"]["context"] == 16_384
    assert sum(size for name, size in parts.items() if name != "total") == parts["total"] and parts["update"] > 0
    _, host = plan(capsys, eight, "--gpu", "h200", "--context", "16384", "--rows", "64", "--staging", "host")
    others = host["bytes_a_rank"]
    assert sum(size for name, size in others.items() if name != "total") == others["total"] and not others["update"]
    assert host["host"]["update_bytes"] == parts["update"] and others["kv_pool"] > parts["kv_pool"]
    assert fields["kv"]["rows_at_a_quarter"] > 3 * fields["kv"]["rows_at_full_context"] > 0


def test_each_gpu_has_a_line_if_none_is_named(eight, capsys):
    assert main(["plan", eight, "--context", "4096"]) == 0
    text = capsys.readouterr().out
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in GPUS)


def test_the_advice_for_what_does_not_fit_is_right(tmp_path, capsys):
    model = str(write_checkpoint("qwen3-30b-a3b", tmp_path, layers=12))
    code, fields = plan(capsys, model, "--gpu", "16")
    assert code == 1 and not fields["fits"]
    assert {"--weight-dtype fp8_block", "--tensor-parallel 2"} <= set(fields["advice"])
    for advice in fields["advice"]:
        assert plan(capsys, model, "--gpu", "16", *advice.split())[0] == 0, advice
    assert main(["plan", model, "--gpu", "16"]) == 1
    assert "it fits with: --tensor-parallel 2" in capsys.readouterr().out


def test_a_smaller_context_is_advice_where_one_row_does_not_fit(eight, capsys):
    code, fields = plan(capsys, eight, "--gpu", "l4")
    assert code == 1 and fields["kv"]["longest_sequence"] < fields["kv"]["context"] == 40_960
    assert any(advice.startswith("--max-context-tokens") for advice in fields["advice"])


def test_nothing_helps_a_model_that_is_far_too_large(tmp_path, capsys):
    model = str(write_checkpoint("qwen3-32b", tmp_path))
    code, fields = plan(capsys, model, "--gpu", "8")
    assert code == 1 and fields["kv"] is None and "more memory" in fields["advice"][0]


def test_several_gpus_have_a_part_each(eight, capsys):
    _, one = plan(capsys, eight, "--gpu", "l4", "--context", "4096")
    _, two = plan(capsys, eight, "--gpu", "l4", "--context", "4096", "--gpus", "2")
    assert two["ranks"] == 2 and two["bytes_a_rank"]["weights"] < 0.51 * one["bytes_a_rank"]["weights"]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--gpu", "h300"), 2, "h200"),
        (("--gpu", "h200", "--device", "cpu"), 2, "--device"),
        (("--gpu", "h200", "--host-memory", "-1"), 2, "--host-memory"),
        (("--gpu", "h200", "--rows", "0"), 2, "max_rows"),
        (("--gpu", "h200", "--context", "99999999"), 1, "--max-context-tokens"),
        (("--gpu", "a100-80", "--kv-dtype", "fp8_e4m3"), 1, "--kv-dtype"),
        (("--gpu", "h200", "--gpus", "3"), 1, "cut"),
        (("--gpus", "2", "--max-num-seqs", "3"), 2, "--max-rows"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(arguments, code, named, eight, capsys):
    assert main(["plan", eight, *arguments]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert named in line


def test_no_model_and_a_missing_folder_are_errors(tmp_path, capsys):
    assert main(["plan", "--gpu", "h200"]) == 2
    assert main(["plan", str(tmp_path / "absent"), "--gpu", "h200"]) == 1
    assert "absent" in capsys.readouterr().err


def test_the_pages_are_those_that_a_started_worker_reports(capsys):
    settings = {"max_rows": 8, "page_size": 8, "kv_memory_max_gib": 0.002}
    with (
        start_worker(str(ONES), wandb=False, device="cpu", **settings) as worker,
        RolloutClient(worker.endpoint) as client,
    ):
        pages = client.status()["pages"]["total"]
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    _, fields = plan(capsys, str(ONES), "--device", "cpu", *flags)
    assert fields["kv"]["pages"] == pages + 1 and fields["kv"]["tokens"] == pages * 8
