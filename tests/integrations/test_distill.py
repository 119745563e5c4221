"""A student and a teacher behind two workers: the divergence falls, by the loop's account and by transformers'."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.learn.distill import main, reverse_kl
from tests.support.integrations.distillation import PROMPTS, exact, make_pair
from tests.support.kernels.grids import nightly


@pytest.mark.parametrize("known", [3, 19])
def test_the_divergence_is_exact_with_all_tokens_and_never_larger_with_some(known: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(7, 19, generator=generator) * 3 for _ in range(2))
    own, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    ids = own.topk(known).indices
    found = reverse_kl(logits, ids.int().numpy(), other.gather(-1, ids).numpy())
    whole = (own.exp() * (own - other)).sum(-1)
    if known == 19:
        np.testing.assert_allclose(found, whole, atol=1e-4)
    else:
        assert ((found >= -1e-5) & (found <= whole + 1e-4)).all() and (found < whole - 1e-3).any()


@pytest.mark.parametrize(("steps", "falls_to", "flags"), [(5, 0.9, []), *nightly((30, 0.6, ["--turns"]))])
def test_the_students_divergence_from_the_teacher_falls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int, falls_to: float, flags: list[str]
) -> None:
    student, teacher = make_pair(tmp_path)
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    sizes = f"--steps {steps} --batch 4 --samples 4 --new 8 --top 16 --lr 3e-3".split()
    paths = ["--student", str(student), "--teacher", str(teacher), "--prompts", str(tmp_path / "prompts")]
    main([*paths, *sizes, *flags, "--out", str(tmp_path / "out")])
    told = [float(number) for number in re.findall(r"^step \d+: reverse KL ([\d.]+)", capfd.readouterr().out, re.M)]
    assert len(told) == steps and sum(told[-2:]) < 2 * falls_to * told[0]
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert exact(out, teacher) < falls_to * exact(AutoModelForCausalLM.from_pretrained(student), teacher)


def test_a_file_without_prompts_is_refused_before_a_worker_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("\n \n")
    with pytest.raises(SystemExit):
        main(["--student", "none", "--teacher", "none", "--prompts", str(tmp_path / "prompts")])
    assert "--prompts" in capfd.readouterr().err
