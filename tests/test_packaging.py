"""What is installed is what is here."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        ".".join(folder.parent.relative_to(source).parts)
        for source, name in ((ROOT, "rollout"), (ROOT, "trainer_bridge"), (ROOT / "kernels", "rollout_kernels"))
        for folder in (source / name).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(there)
