"""The check that imports of our own modules find a module and a name."""

from pathlib import Path

import pytest

from scripts.check.imports import problems

FILES = {
    "rollout/__init__.py": "",
    "rollout/clock.py": """
import torch
if torch:
    TICKS: int = 1
else:
    from torch import Other as Hand
class Clock:
    inner = 1
""",
    "rollout/late/__init__.py": """
HOMES = {"Alarm": "rollout.clock"}
def __getattr__(name):
    return HOMES[name]
""",
    "kernels/rollout_kernels/warp.py": "def twin(): ...",
}


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("from rollout.clock import TICKS, Clock, Hand", ""),
        ("from rollout import clock, late", ""),
        ("import rollout.clock, rollout.late", ""),
        ("from rollout.late import Alarm", ""),
        ("from rollout_kernels import warp", ""),
        ("from rollout_kernels.warp import twin", ""),
        ("from . import clock", ""),
        ("from .clock import Clock", ""),
        ("import torch.made_up", ""),
        ("from rollout.clock import inner", "inner in rollout.clock"),
        ("from rollout.clock import Other", "Other in rollout.clock"),
        ("from rollout import watch", "watch in rollout"),
        ("import rollout.watch", "module rollout.watch"),
        ("from rollout.watch import Watch", "module rollout.watch"),
        ("from rollout.late import Bell", "Bell in rollout.late"),
        ("from rollout_kernels.warp import kernel", "kernel in rollout_kernels.warp"),
        ("from .watch import Watch", "module rollout.watch"),
        ("from .clock import Watch", "Watch in rollout.clock"),
    ],
)
def test_an_import_needs_a_module_and_a_name(tmp_path: Path, statement: str, missing: str) -> None:
    for file, text in {**FILES, "rollout/user.py": f"def use():\n    {statement}\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    compiled = tmp_path / "rollout/watch.pyc"  # of a module that was deleted
    compiled.write_bytes(b"")
    assert problems(tmp_path) == ([f"rollout/user.py:2: there is no {missing}"] if missing else [])
