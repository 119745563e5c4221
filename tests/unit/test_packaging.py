"""The wheel holds all packages, and the light ones import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "wandb", "triton", "safetensors", "prometheus_client", "huggingface_hub")


def test_every_folder_with_code_is_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = [name for where in find["where"] for name in find_packages(str(ROOT / where), include=find["include"])]
    there = {
        ".".join(file.parent.relative_to(source).parts)
        for source, name in ((ROOT, "rollout"), (ROOT, "trainer_bridge"), (ROOT / "kernels", "rollout_kernels"))
        for file in (source / name).rglob("*.py")
    }
    assert sorted(found) == sorted(there)


@pytest.mark.parametrize(
    "code",
    [
        "import trainer_bridge; trainer_bridge.RolloutClient; trainer_bridge.start_worker",
        "from rollout.cli.main import main; main(['--help'])",
        "from rollout.cli.main import main; main(['generate', '--help'])",
        "from rollout.cli.main import main; main(['top', '--help'])",
        "from rollout.cli.main import main; main(['keys', '--help'])",
        "from rollout.cli.main import main; main(['status', 'tcp://127.0.0.1:9', '--timeout', 'x'])",
    ],
)
def test_clients_and_commands_need_nothing_of_the_worker(code: str):
    """The worker's libraries are an extra: what works without them does not import them."""
    blocked = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
    script = (
        f"{blocked}try:\n    {code}\nexcept SystemExit as end:\n    sys.exit(0 if end.code in (0, 2) else end.code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_serve_without_the_worker_extra_says_how_to_install_it():
    blocked = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
    script = f"{blocked}from rollout.cli.main import main\nsys.exit(main(['serve', 'folder']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "rollout-engine[worker]" in done.stderr and "Traceback" not in done.stderr
