"""Every native family loads and serves what transformers' `save_pretrained` writes, and takes a trainer's names."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.cut import kept_values
from tests.support.models import images
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.paged import check


@pytest.mark.parametrize("name", [*EVERY_FAMILY, *images.MODELS])
def test_what_save_pretrained_writes_is_served(name: str, tmp_path: Path) -> None:
    """Names and layout of its files may differ from those of the state_dict, of which other tests make folders."""
    torch.set_num_threads(1)
    make = EVERY_FAMILY[name] if name in EVERY_FAMILY else partial(images.make_model, name)
    reference = make(tmp_path / "made", 0)
    reference.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "made" / "config.json", tmp_path / "saved")  # it may name another architecture
    loaded = load_model(ModelSettings(path=str(tmp_path / "saved")), torch.device("cpu"))
    check(loaded, reference, fused=False)
    views = loaded.trainer_views()
    sent = {key: tensor for key, tensor in reference.state_dict().items() if not key.startswith(loaded.spec.unused)}
    assert set(sent) <= set(views)
    assert all(torch.equal(kept_values(views[key]), tensor) for key, tensor in sent.items())
