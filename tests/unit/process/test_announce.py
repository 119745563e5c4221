"""What a worker announces: on stdout for a launcher, in the log under a supervisor."""

import json
import subprocess
import sys

import pytest

SAY = """
from rollout.process.announce import announce
from rollout.process.logs import set_up
set_up("info", {form!r}, "box:1")
announce({{"event": "ready", "endpoint": "tcp://127.0.0.1:1", "pid": 7}}, {supervised})
announce({{"event": "ended", "wandb_run": None, "totals": {{"total/tokens": 36, "gpu/active_pct": 1.5}}}}, {supervised})
"""


def said(form: str, supervised: bool) -> subprocess.CompletedProcess[str]:
    code = SAY.format(form=form, supervised=supervised)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_launcher_reads_lines_of_json() -> None:
    done = said("json", supervised=False)
    ready, ended = map(json.loads, done.stdout.splitlines())
    assert ready["event"] == "ready" and ended["totals"]["gpu/active_pct"] == 1.5 and not done.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_announcements_of_a_supervised_worker_are_lines_of_its_log(form: str) -> None:
    done = said(form, supervised=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and not done.stdout
    if form == "json":
        ready, ended = map(json.loads, lines)
        assert {"time", "level", "logger", "message", "worker"} <= ready.keys() & ended.keys()
        assert (ready["endpoint"], ended["total/tokens"]) == ("tcp://127.0.0.1:1", 36)
    else:
        assert " INFO box:1 " in lines[0] and "total/tokens=36" in lines[1]
