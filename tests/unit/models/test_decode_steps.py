"""200 decode steps of every native family after prompts in chunks: the logits of transformers' model in float32."""

from pathlib import Path

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from tests.support.kernels.grids import nightly
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.paged import assert_logits_in_chunks_and_steps

#: In every run: windows and softcaps, sinks, norms after blocks. Hybrids and latent attention have tests of their own.
_ALWAYS = ("Gemma2", "GptOss", "Olmo3")
_PROMPTS = (60, 1, 9)
#: The queries of this one grow with their positions, and rounding errors with them.
_ATOL = {"Ministral3": 2e-4, "images: Ministral 3": 2e-4}


@pytest.mark.parametrize("name", [*_ALWAYS, *nightly(*(name for name in EVERY_FAMILY if name not in _ALWAYS))])
def test_chunked_prefill_and_200_decode_steps_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = EVERY_FAMILY[name](tmp_path, 0)
    model = load_model(ModelSettings(path=str(tmp_path)), torch.device("cpu")).model
    steps = min(200, model.spec.max_positions - max(_PROMPTS))  # with LongRoPE a context ends earlier
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, model.spec.vocab, (n + steps,), generator=generator).tolist() for n in _PROMPTS]
    chunks = ({0: (0, 2), 2: (0, 4)}, {0: (2, 3)}, {2: (4, 9), 1: (0, 1), 0: (3, 40)}, {0: (40, 60)})
    atol = _ATOL.get(name, 1e-4)
    assert_logits_in_chunks_and_steps(model, reference, ids, _PROMPTS, chunks, steps, atol)
