"""The rule that one name means one thing: public classes, and modules, of all packages."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "rollout", "trainer_bridge", "kernels"
#: Each folder of a feature has a module `feature`: the class that the engine knows.
FEATURES = ROOT / "rollout/engine/features"


def modules() -> list[Path]:
    """The modules of all packages."""
    found = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 300
    return [file for file in found if file.stem not in ("__init__", "__main__")]


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in modules():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice


def test_no_module_has_a_name_that_three_have() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in modules():
        if file.name != "feature.py" or FEATURES not in file.parents:
            homes[file.stem].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 2}
