"""The rule that no package uses the private names of another one."""

import ast
from pathlib import Path

from scripts.check.private_access import accesses, problems

ROOT = Path(__file__).parents[2]
#: Calls of `setattr` on monkeypatch in all tests. Lower it when one goes.
MOST_REPLACED = 100

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
    assert [str(access.file) for access in product] == ["rollout/other/user.py"]
    assert [access.file.name for access in tests] == ["test_clock.py"]
    assert product[0].expression == "clock._ticks" and product[0].line == 3


def test_an_allowed_access_is_no_problem_and_an_allowed_one_that_is_gone_is(tmp_path: Path) -> None:
    for file, text in (("rollout/clock.py", CLOCK), ("tests/test_clock.py", USER)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    used, gone = "tests/test_clock.py: clock._ticks", "tests/test_clock.py: clock._hands"
    assert problems(tmp_path, {used}) == []
    (unknown,) = problems(tmp_path, set())
    assert unknown.startswith("tests/test_clock.py:3: clock._ticks")
    (unused,) = problems(tmp_path, {used, gone})
    assert gone in unused


def test_tests_replace_few_attributes() -> None:
    """A value that a test sets is an argument, or an attribute of an object that the test has made."""
    calls = [
        node
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr"
    ]
    assert len(calls) <= MOST_REPLACED
