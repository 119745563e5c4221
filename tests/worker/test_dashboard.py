"""What a real worker logs to W&B, read back with W&B's own reader, is what the dashboard shows."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollout.metrics.definitions import HISTOGRAMS, METRICS
from scripts.dashboard.layout import panels
from scripts.dashboard.offline_run import read_offline_run
from scripts.dashboard.picture import series, write_dashboard
from tests.support.reported_metrics import needs_no_drafts
from tests.support.wandb_sync import sync
from tests.support.worker.harness import TWOS, facts, launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher


def lines(path: Path) -> list[dict]:
    """The complete lines: the last one may be half written."""
    written = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in written.splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of a worker that generated, swapped weights and was reported to."""
    folder = tmp_path_factory.mktemp("dashboard")
    jsonl = folder / "metrics.jsonl"
    flags = {"wandb": True, "jsonl": str(jsonl), "interval_s": 0.1}
    env: dict[str, str | None] = {"WANDB_DIR": str(folder), "WANDB_RUN_GROUP": "job"}
    with launch(log=folder / "worker.log", max_rows=4, env=env, **flags) as worker:
        with (
            RolloutClient(worker.endpoint, timeout_s=60.0, acknowledge=False) as client,
            WeightPublisher(worker.endpoint) as publisher,
        ):
            result = client.generate("17:", n=3, max_tokens=60)
            client.report(result, [completion.logprobs - 0.1 for completion in result.completions])
            until(lambda: any("completion/length" in line for line in lines(jsonl)), "the histogram")
            until(lambda: lines(jsonl)[-1].get("mismatch/tokens") == 180, "the mismatch")
            publisher.publish(load_file(TWOS / "model.safetensors"), version=1).applied(60)
            client.generate("17:", max_tokens=60)
            until(lambda: any("versions" in line for line in lines(jsonl)), "the version that ended")
    (ended,) = (fact for fact in facts(folder / "worker.log") if fact["event"] == "ended")
    return Path(ended["wandb_run"])


@pytest.mark.nightly
def test_every_metric_of_the_layout_is_in_the_run(run: Path, tmp_path: Path) -> None:
    uploaded = sync(run, tmp_path)
    assert uploaded.run["groupName"] == "job"
    logged = {name for row in uploaded.rows for name in row}
    assert {name for panel in panels() for name in panel.metrics if needs_no_drafts(name)} <= logged
    histograms = [row["completion/length"] for row in uploaded.rows if "completion/length" in row]
    assert sum(sum(histogram["values"]) for histogram in histograms) <= 4
    assert histograms[0]["_type"] == "histogram" and histograms[0]["bins"] == [48.5, 64.5]
    assert sum(uploaded.summary["completion/length"]["values"]) == 4
    by_version = {row["weights/version"]: row for row in uploaded.rows if "by_version/tokens" in row}
    assert [by_version[version]["by_version/tokens"] for version in (0, 1)] == [180, 60]
    assert uploaded.summary["mismatch/mean_abs"] == pytest.approx(0.1, rel=1e-3)
    # Ours reads the same.
    mine = read_offline_run(run)
    plain = [{name: value for name, value in row.items() if name[0] != "_"} for row in mine.rows]
    assert plain == uploaded.rows


@pytest.mark.nightly
def test_the_picture_of_that_run_has_something_in_every_panel(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = read_offline_run(run).rows
    for panel in panels():
        assert series(rows, panel).keys() == set(filter(needs_no_drafts, panel.metrics)), panel.title
    write_dashboard(read_offline_run(run), tmp_path / "dashboard.png", "a run")
    assert (tmp_path / "dashboard.png").stat().st_size < 300_000


@pytest.mark.nightly
def test_the_json_lines_have_the_same(run: Path) -> None:
    found = lines(run.parents[1] / "metrics.jsonl")
    assert {metric.name for metric in METRICS if needs_no_drafts(metric.name)} <= found[-1].keys()
    assert found[-1]["final"]
    assert found[-1][HISTOGRAMS[0].name] == [[49, 64, 4]]
    rows = [row for line in found for row in line.get("versions", ())]
    assert [(row["version"], row["by_version/tokens"]) for row in rows] == [(0, 180), (1, 60)]
