"""How `make test` distributes its tests over processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.distribution import TOGETHER, SlowFilesFirst

ROOT = Path(__file__).parents[2]


class Node:
    """A process that runs nothing, and keeps what it is asked for."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.asked: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.asked += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def first_of(nodes: int, files: list[str]) -> list[list[str]]:
    """The files that each process begins with, of files with three tests each."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: [f"{nodes}*popen"])
    scheduler, made = SlowFilesFirst(config), [Node(number) for number in range(nodes)]
    tests = [f"{file}::test_{i}" for file in files for i in range(3)]
    for node in made:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    return [list(dict.fromkeys(tests[index].split("::")[0] for index in node.asked)) for node in made]


def test_files_that_share_a_worker_go_to_one_process_and_slow_ones_come_first() -> None:
    files = ["tests/unit/test_ports.py", "tests/worker/test_eos.py", "tests/worker/test_curve.py"]
    files += ["tests/engine/test_gate.py", "tests/robustness/test_hostile_manifests.py", "tests/worker/test_views.py"]
    shared = ["tests/worker/test_eos.py", "tests/robustness/test_hostile_manifests.py", "tests/worker/test_views.py"]
    assert first_of(2, files) == [shared, ["tests/worker/test_curve.py"]]


def test_other_files_stay_in_the_order_of_collection() -> None:
    files = ["tests/unit/test_ports.py", "tests/bridge/test_scratch.py", "tests/engine/test_gate.py"]
    assert first_of(2, files) == [["tests/unit/test_ports.py"], ["tests/bridge/test_scratch.py"]]


def test_each_group_has_files() -> None:
    found = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    for name, files in TOGETHER.items():
        assert sum(files.match(file) is not None for file in found) > 1, name
