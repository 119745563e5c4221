"""The loop of docs/integrations/pytorch.md learns as it stands, with another model, data and reward."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.learn.toy import make_model
from tests.support.integrations.integration_worker import ROOT, worker_environment

PAGE = ROOT / "docs" / "integrations" / "pytorch.md"


def replaced(text: str, pattern: str, by: str) -> str:
    changed, count = re.subn(pattern, lambda found: by, text, flags=re.MULTILINE)
    assert count == 1, pattern
    return changed


def test_the_loop_has_at_most_sixty_lines() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 60


@pytest.mark.nightly
def test_the_loop_learns_with_a_model_data_and_reward_of_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    block = replaced(block, r"^MODEL, DEVICE = .*$", f'MODEL, DEVICE = "{model}", "cpu"')
    block = replaced(block, r"= 3, 4, 8, 1, 48, 1\.0, 1e-6$", "= 25, 4, 8, 1, 12, 1.0, 1e-3")
    block = replaced(block, r"^DATA = .*$", 'DATA = [(f"{n} :", "7") for n in range(1, 15)]')
    block = replaced(block, r"^    return float\(answer in text\)$", "    return text.split().count(answer) / 12")
    # The toy has no chat template.
    block = replaced(
        block, r"^    messages = .*\n    return tokenizer.*$", '    return tokenizer(question)["input_ids"]'
    )
    script = tmp_path / "mine.py"
    script.write_text(block)
    environment = {name: value for name, value in worker_environment().items() if value is not None}
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rewards = [
        float(number) for number in re.findall(r"^step \d+: reward ([\d.]+), 4 of 4", ended.stdout, re.MULTILINE)
    ]
    assert len(rewards) == 25
    assert sum(rewards[:3]) / 3 < 0.2 < 0.4 < sum(rewards[-5:]) / 5
