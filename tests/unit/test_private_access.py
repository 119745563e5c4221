"""The rule that no package uses the private names of another one."""

import ast
from pathlib import Path

from scripts.check.private_access import accesses, problems

ROOT = Path(__file__).parents[2]
#: Attributes that tests replace, see `replacements`. Lower it when one goes.
MOST_REPLACED = 249

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
    used, gone = "tests/test_clock.py: clock._ticks  # a reason", "tests/test_clock.py: clock._hands  # a reason"
    assert problems(tmp_path, {used}) == []
    for known in ([], ["tests/test_clock.py: clock._ticks"]):
        (unknown,) = problems(tmp_path, known)
        assert unknown.startswith("tests/test_clock.py:3: clock._ticks")
    (unused,) = problems(tmp_path, {used, gone})
    assert "clock._hands" in unused


def test_a_private_name_that_is_replaced_is_an_access(tmp_path: Path) -> None:
    replaces = """
def replace(patch, clock):
    patch.setattr(clock, "_ticks", 0)
    patch.setattr("rollout.clock._ticks", 0)
    patch.setattr(clock, "pair", 0)
"""
    for file, text in (("rollout/clock.py", CLOCK), ("tests/test_clock.py", replaces)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    _, tests = accesses(tmp_path)
    assert [access.expression for access in tests] == ["clock._ticks", "rollout.clock._ticks"]


def replacements(tree: ast.Module) -> list[str]:
    """Calls of `setattr`, and functions and classes of the file that it assigns to attributes of other objects."""
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, made)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "setattr":
            found.append(ast.unparse(node))
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
            found += [
                ast.unparse(place)
                for place, value in pairs
                if isinstance(place, ast.Attribute) and ast.unparse(place.value) != "self"
                if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in names)
            ]
    return found


def test_replacements_are_found() -> None:
    text = """
class Kept:
    def __init__(self, patch, engine, value):
        self.run = lambda: None
        engine.size = value
        engine.run = lambda: None
        engine.stop, engine.names = run, []
        patch.setattr(engine, "go", run)
        setattr(engine, "on", run)

def run():
    pass
"""
    assert len(replacements(ast.parse(text))) == 4


def test_tests_replace_few_attributes() -> None:
    """A value that a test sets is an argument, or an attribute of an object that the test has made."""
    found = [each for path in (ROOT / "tests").rglob("*.py") for each in replacements(ast.parse(path.read_text()))]
    assert len(found) <= MOST_REPLACED, len(found)
