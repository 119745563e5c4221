"""The wheel holds all packages, and the light ones import nothing heavy."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "wandb", "triton", "safetensors", "prometheus_client", "huggingface_hub")


def test_every_folder_with_code_is_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = [name for where in find["where"] for name in find_packages(str(ROOT / where), include=find["include"])]
    there = {
        ".".join(file.parent.relative_to(source).parts)
        for source, name in (
            *((ROOT, name) for name in ("rollout", "rollout_gateway", "trainer_bridge")),
            (ROOT / "kernels", "rollout_kernels"),
        )
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
    assert "'.[worker]'" in done.stderr and "rollout-engine[worker]" in done.stderr and "Traceback" not in done.stderr


def extras() -> dict[str, list[str]]:
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return extras


def test_a_publisher_needs_nothing_but_its_extra():
    names = {Requirement(line).name for line in extras()["publish"]}
    blocked = [
        name for name in HEAVY if name.replace("_", "-") not in names and name != "triton"
    ]  # torch may import it
    script = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nfrom trainer_bridge import WeightPublisher"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_worker_brings_the_compiler_of_constraints():
    assert set(extras()["constraints"]) <= set(extras()["worker"])


def test_extras_that_messages_and_pages_name_exist():
    named = set()
    for place in ("rollout", "rollout_gateway", "scripts", "trainer_bridge", "docs"):
        for file in [*(ROOT / place).rglob("*.py"), *(ROOT / place).rglob("*.md"), ROOT / "README.md"]:
            text = file.read_text()
            for listed in re.findall(r"'(?:\.|rollout-engine)\[([a-z,-]+)\]'", text):
                named |= set(listed.split(","))
            for call in re.findall(r"\binstall\(((?:'[a-z-]+'(?:, )?)+)\)", text):
                named |= set(re.findall(r"[a-z-]+", call))
    assert {"worker", "http", "publish", "plot", "ray", "trl"} <= named <= extras().keys()


def test_the_docs_list_every_extra_that_is_for_users():
    ours = {"integrations", "verl-tests", "agent-lightning-tests", "chat-client-tests", "pytest", "worker"}
    lines = (ROOT / "docs/install.md").read_text().splitlines()
    table = [line.split("|")[1] for line in lines if line.startswith("| `")]
    listed = {name for cell in table for name in re.findall(r"`([a-z-]+)`", cell)}
    assert extras().keys() - ours <= listed
