"""Runs that share the GPUs of a host: their order, their GPUs, their limits, and the report about them."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from scripts.bench.on_gpus import main, read_plan
from tests.support.worker.harness import until


def line(gpus: int, limit_s: int, name: str, code: str) -> str:
    return f"{gpus} {limit_s} {name} {shlex.quote(sys.executable)} -c {shlex.quote(code)}\n"


def seen(folder: Path) -> dict[str, dict]:
    return {one["name"]: one for one in json.loads((folder / "runs.json").read_text())}


def test_runs_have_gpus_of_their_own_and_a_larger_one_is_not_overtaken(tmp_path: Path) -> None:
    tell = "import os, time; time.sleep(0.3); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    plan = tmp_path / "plan"
    plan.write_text(
        "# four GPUs\n\n"
        + "".join(line(n, 60, f"{name}.{n}", tell) for name, n in zip("abcd", (2, 1, 4, 1), strict=True))
    )
    assert main([str(plan), "--out", str(tmp_path / "out"), "--gpus", "4"]) == 0
    told = {name: (tmp_path / "out" / f"{name}.log").read_text().strip() for name in ("a.2", "b.1", "c.4", "d.1")}
    assert told == {"a.2": "0,1", "b.1": "2", "c.4": "0,1,2,3", "d.1": "0"}
    runs = seen(tmp_path / "out")
    ended_s = {name: run["began_s"] + run["took_s"] - 1e-6 for name, run in runs.items()}  # for rounding
    assert runs["c.4"]["began_s"] >= max(ended_s["a.2"], ended_s["b.1"])
    assert runs["d.1"]["began_s"] >= ended_s["c.4"]


def test_a_run_is_ended_with_its_processes_and_others_go_on(tmp_path: Path) -> None:
    pid, began_s = tmp_path / "pid", time.monotonic()
    # Two processes may take longer to start than the limit: no time passes before the second one runs.
    now_s = lambda: time.monotonic() if pid.exists() and pid.read_text() else began_s  # noqa: E731
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    plan = tmp_path / "plan"
    plan.write_text(
        line(1, 3, "hangs", parent)
        + line(1, 60, "fails", "raise SystemExit(3)")
        + "1 60 missing /no/such/command\n"
        + line(1, 60, "whole", f"open({str(tmp_path)!r} + '/whole', 'w')")
    )
    assert main([str(plan), "--out", str(tmp_path / "out"), "--gpus", "1"], now_s) == 1
    runs = seen(tmp_path / "out")
    assert [runs[name]["status"] for name in ("hangs", "fails", "whole")] == ["ran out of time", 3, 0]
    assert "/no/such/command" in runs["missing"]["status"] and (tmp_path / "whole").exists()
    until(lambda: not running(int(pid.read_text())), "the end of the child")


def running(pid: int) -> bool:
    """Whether a process runs; one that was killed may wait for its parent a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_did_not_begin_in_time_is_told(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(line(1, 60, "long", "import time; time.sleep(600)") + line(1, 60, "late", "pass"))
    assert main([str(plan), "--out", str(tmp_path / "out"), "--gpus", "1", "--seconds", "1"]) == 1
    runs = seen(tmp_path / "out")
    assert (runs["long"]["status"], runs["late"]["status"]) == ("ran out of time", "did not begin")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 60 name\n", "line 1"),
        ("\nmany 60 name true\n", "line 2"),
        ("8 60 name true\n", "8 GPUs"),
        ("1 60 name 'true\n", "line 1: No closing quotation"),
        ("1 60 a/b true\n", "a/b"),
        ("1 60 a true\n1 60 a true\n", "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=says):
        read_plan(text, tmp_path, 4)
    (tmp_path / "plan").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "plan"), "--out", str(tmp_path / "out"), "--gpus", "4"])
    assert says in capsys.readouterr().err
