"""Log lines as text and as JSON: what they hold, and that nothing else gets in between."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.process.logs import JsonFormatter, TextFormatter, request_fields

ROOT = Path(__file__).parents[3]
STEPS = [{"step": 7, "kind": "decode", "device_ms": 1.25}, {"step": 8, "kind": "prefill", "device_ms": None}]


def record(message: str = "it failed", error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.Logger("rollout.x").makeRecord(
        "rollout.x", logging.WARNING, __file__, 1, message, (), exc_info, extra=extra
    )
    made.created = 1_770_000_000.0625
    return made


def test_a_text_line_has_moment_level_worker_logger_message_and_fields():
    line = TextFormatter("box:7").format(record(**request_fields("client:trainer", "a 1"), seconds=0.25, none=None))
    assert line == (
        "2026-02-02T02:40:00.062Z WARNING box:7 rollout.x: it failed "
        '[request="a 1" client=client:trainer seconds=0.25 none=null]'
    )


def test_a_json_line_has_the_same_as_data():
    line = json.loads(
        JsonFormatter("box:7").format(record(**request_fields("client:trainer", "a 1"), seconds=0.25, steps=STEPS))
    )
    assert line == {
        "time": "2026-02-02T02:40:00.062Z", "level": "warning", "logger": "rollout.x", "worker": "box:7",
        "message": "it failed", "request": "a 1", "client": "client:trainer", "seconds": 0.25, "steps": STEPS,
    }  # fmt: skip


def test_a_table_and_a_traceback_stand_indented_below_their_line():
    try:
        raise ValueError("no\nroom")
    except ValueError as error:
        head, *below = TextFormatter("w").format(record(steps=STEPS, error=error)).splitlines()
    assert head.endswith("rollout.x: it failed") and all(line.startswith("  ") for line in below)
    assert below[:4] == [
        "  steps:", "    step     kind  device_ms", "       7   decode       1.25", "       8  prefill          -"
    ]  # fmt: skip
    assert below[4] == "  Traceback (most recent call last):" and below[-1] == "  room"


@given(st.text(max_size=60), st.text(max_size=60))
def test_whatever_a_client_chose_makes_one_line_in_both_forms(text: str, name: str):
    made = record(text, **request_fields(name, text), odd={text: float("nan"), "x": object()})
    assert len(JsonFormatter("w").format(made).splitlines()) == 1
    told = json.loads(JsonFormatter("w").format(made), parse_constant=pytest.fail)
    assert (told["message"], told["request"], told["client"]) == (text, text, name)
    first, *rest = TextFormatter("w").format(made).splitlines()
    assert first.startswith("2026-") and all(line.startswith("  ") for line in rest)
    assert all(character.isprintable() or character == "\t" for line in (first, *rest) for character in line)


_CHATTER = """
import logging, sys, threading, warnings
import transformers
from rollout.process.logs import report_failure, set_up
set_up("info", {form!r}, "box:7")
transformers.utils.logging.get_logger("transformers.models.x").warning("from transformers")
import huggingface_hub.utils
huggingface_hub.utils.logging.get_logger("huggingface_hub.x").warning("from the hub's library")
warnings.warn("a warning")
print("printed", file=sys.stderr)
sys.stderr.write("half a "); sys.stderr.write("line\\r50%\\n\\n")
thread = threading.Thread(target=lambda: 1 / 0, name="worker-bee"); thread.start(); thread.join()
logging.getLogger("rollout.x").info("ours", extra={{"request": "r1"}})
logging.getLogger("rollout.x").debug("not shown")
logging.getLogger("other").info("not shown")
report_failure("rollout: no such thing")
raise KeyError("at the end")
"""


_NOWHERE = """
import logging, sys
from rollout.process.logs import set_up
set_up("info", "json", "box:7")
sys.stderr.behind.close()
print("printed", file=sys.stderr)
logging.getLogger("rollout.x").warning("said")
print("alive")
"""


def test_a_stderr_that_is_gone_ends_nothing():
    """What logging has to say about that would come back as a line to be logged, without an end."""
    run = subprocess.run(
        [sys.executable, "-c", _NOWHERE],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        check=False,
    )
    assert run.stdout == "alive\n"


@pytest.fixture(scope="module", params=["json", "text"])
def chatter(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """The form, and what a process prints in which everybody has something to say."""
    run = subprocess.run(
        [sys.executable, "-c", _CHATTER.format(form=request.param)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert run.returncode == 1 and run.stdout == ""
    return request.param, run.stderr.splitlines()


def test_library_output_and_uncaught_errors_are_logged_in_the_same_form(chatter: tuple[str, list[str]]):
    form, lines = chatter
    expected = [
        ("warning", "transformers.models.x", "from transformers"), ("warning", "huggingface_hub.x", "from the hub"),
        ("warning", "py.warnings", "a warning"), ("warning", "stderr", "printed"), ("warning", "stderr", "half a line"),
        ("warning", "stderr", "50%"), ("critical", "rollout", "ended a thread"), ("info", "rollout.x", "ours"),
        ("critical", "rollout", "rollout: no such thing"), ("critical", "rollout", "error ends this process"),
    ]  # fmt: skip
    if form == "json":
        told = [json.loads(line) for line in lines]
        assert [(line["level"], line["logger"]) for line in told] == [(level, name) for level, name, _ in expected]
        assert all(said in line["message"] for line, (_, _, said) in zip(told, expected, strict=True))
        assert told[6]["of_thread"] == "worker-bee" and "ZeroDivisionError" in told[6]["trace"]
        assert told[7]["request"] == "r1" and "KeyError: 'at the end'" in told[9]["trace"]
        return
    begun = [line for line in lines if not line.startswith("  ")]
    shape = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ box:7 [\w.]+: ")
    ours = [item for item in expected if item[1] != "stderr" and not item[2].startswith("rollout:")]
    assert [line for line in begun if not shape.match(line)] == [
        "printed", "half a line", "50%", "", "rollout: no such thing"
    ], "what is printed stays as it is"  # fmt: skip
    for line, (level, name, said) in zip([line for line in begun if shape.match(line)], ours, strict=True):
        assert f"Z {level.upper()} box:7 {name}: " in line and said in line
