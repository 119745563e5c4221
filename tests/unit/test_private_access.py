"""The rule that no package uses the private names of another one."""

from __future__ import annotations

from pathlib import Path

from scripts.check.private_access import accesses

CLOCK = """
class Clock:
    def __init__(self):
        self._ticks = 0
        self.pair = ()

    def later(self, other):
        return other._ticks + self._ticks
"""
USER = """
def read(clock, torch):
    return clock._ticks, clock.pair._replace(a=1), torch._made_up
"""


def test_a_private_name_is_for_its_own_folder_alone(tmp_path: Path) -> None:
    for file, text in (("rollout/clock.py", CLOCK), ("rollout/same.py", USER), ("rollout/other/user.py", USER)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_clock.py").write_text(USER)
    (tmp_path / "tests/test_own.py").write_text(USER + CLOCK)
    product, tests = accesses(tmp_path)
    assert [str(access.file.relative_to(tmp_path)) for access in product] == ["rollout/other/user.py"]
    assert [access.file.name for access in tests] == ["test_clock.py"]
    assert product[0].expression == "clock._ticks" and product[0].line == 3
