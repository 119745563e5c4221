"""What a worker shows while it downloads its model, from a hub that is on this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.fake_hub import fake_hub
from tests.support.worker.harness import ONES, facts, launch, subprocess_environment
from trainer_bridge.client.blocking import RolloutClient


@pytest.mark.nightly
def test_a_slow_download_is_a_line_while_it_lasts_and_one_at_its_end(tmp_path: Path) -> None:
    with fake_hub(ONES, "someone/ones", weights_s=2.6) as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": None}
        flags: dict[str, Any] = {"max_rows": 2, "max_context_tokens": 256, "log_format": "json"}
        with launch("someone/ones", log=tmp_path / "worker.log", env=env, **flags) as worker:
            with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
                assert len(client.generate("17:", max_tokens=8).completions[0]) == 8
            assert facts(worker.log_path)[0]["model"] == "someone/ones"
        lines = [json.loads(line) for line in worker.log_path.read_text().splitlines()]
    told = [line for line in lines if line.get("stage") == "fetching someone/ones"]
    assert ["took_s" in line for line in told] == [False, True]
    assert 2.0 <= told[1]["took_s"] < 30


_SCRIPT = """
import json
from rollout.checkpoint_folder import resolve_folder
calls = []
folder = resolve_folder("someone/ones", None, True, lambda *call: calls.append(call))
print(json.dumps([str(folder), calls]))
"""


@pytest.mark.nightly
def test_the_bytes_of_a_download_are_told_and_all_there_at_its_end(tmp_path: Path) -> None:
    with fake_hub(ONES, "someone/ones") as endpoint:
        env = subprocess_environment(HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=env, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, ""), "no bars of the library's own"
    folder, calls = json.loads(ran.stdout)
    sizes = [path.stat().st_size for path in Path(folder).iterdir()]
    assert (ONES / "model.safetensors").stat().st_size in sizes
    done, total = calls[-1]
    assert done == total == sum(sizes) and all(a[0] <= b[0] for a, b in zip(calls, calls[1:], strict=False))


_REFUSED = """
import huggingface_hub
from rollout.checkpoint_folder import resolve_folder
def show(path, revision):
    try:
        print(resolve_folder(path, revision, True))
    except ValueError as error:
        print(error)
for path in ("missing/model", "gated/model", "unrevised/model", "broken/model", "a b"):
    show(path, "v9")
huggingface_hub.constants.HF_HUB_OFFLINE = True
for path in ("someone/other", "someone/cached"):
    show(path, None)
"""


def test_a_download_that_fails_is_one_sentence_that_says_what_to_change(tmp_path: Path) -> None:
    repository, commit = tmp_path / "hub/models--someone--cached", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(ONES)
    with fake_hub(ONES, "someone/ones") as endpoint:
        env = subprocess_environment(HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        ran = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True, env=env, timeout=120)
    assert ran.returncode == 0, ran.stderr
    *lines, cached = ran.stdout.splitlines()
    assert cached == str(repository / "snapshots" / commit), "without a network it is found in the hub's cache"
    advice = [
        ("missing/model", "HF_TOKEN"),
        ("gated/model", "HF_TOKEN"),
        ("unrevised/model", "v9"),
        ("broken/model", "network"),
        ("a b", "owner/name"),
        ("someone/other", "the hub does not answer"),
    ]
    assert [
        (path, said in line) for (path, said), line in zip(advice, lines, strict=True) if line.startswith(path)
    ] == [(path, True) for path, _ in advice]
