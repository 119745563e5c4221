"""Llama 4: tokens see those of their own chunk of positions, and experts read weighted inputs."""

from pathlib import Path

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import AttentionBatch, PromptChunk, load_model
from tests.support.models.paged import assert_logits_in_chunks_and_steps
from tests.support.models.variants import make_variant


def test_pieces_of_prompts_and_steps_across_chunks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = make_variant("Llama4", tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path)), torch.device("cpu")).model
    assert [layer.mixer.chunk for layer in model.spec.layers] == [16, None, 16]  # type: ignore[union-attr]
    ids = [
        torch.randint(0, 91, (count + 60,), generator=torch.Generator().manual_seed(count)).tolist()
        for count in (90, 1, 9)
    ]
    # Pieces that end within chunks, at their ends, and after several.
    chunks = ({0: (0, 2), 2: (0, 4)}, {0: (2, 16)}, {2: (4, 9), 1: (0, 1), 0: (16, 75)}, {0: (75, 90)})
    assert_logits_in_chunks_and_steps(model, reference, ids, [90, 1, 9], chunks, steps=60)


def test_a_page_that_does_not_divide_a_chunk_is_refused() -> None:
    batch = AttentionBatch(
        positions_T=torch.zeros(1),
        kv_slots_T=torch.zeros(1),
        page_table_BP=torch.ones(1, 1, dtype=torch.int32),
        context_lens_B=torch.ones(1, dtype=torch.int32),
        max_context=1,
        chunks=(PromptChunk(0, 1, 1),),
    )
    with pytest.raises(ValueError, match="divisor"):
        batch.in_chunks(16, 7)
