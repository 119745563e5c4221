"""LongRoPE: the frequencies of transformers on both sides of the original context."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.models.fused import FusedDecoder
from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PagedRunner

CPU = torch.device("cpu")
BORDER, MOST = 24, 96
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "original_max_position_embeddings": BORDER, "max_position_embeddings": MOST,
}  # fmt: skip


def make(folder: Path, **rope: Any) -> Any:
    return make_checkpoint("Phi3", folder, **SIZES, rope_parameters=ROPE | rope)


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


def ids_of(length: int) -> list[int]:
    return torch.randint(0, 91, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def exact(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float()


def steps(loaded: LoadedModel, ids: list[int], forward: Any = None) -> torch.Tensor:
    """Logits of a prompt in two chunks, and of a third of the tokens one by one."""
    runner, last = PagedRunner(loaded.model, 1, len(ids), forward=forward), len(ids) * 2 // 3
    parts = [runner.prefill({0: piece})[0] for piece in (ids[: last // 2], ids[last // 2 : last])]
    return torch.cat(parts + [runner.decode({0: token})[0][None] for token in ids[last:]])


def test_up_to_the_border_the_short_set_is_that_of_transformers(tmp_path: Path) -> None:
    reference = make(tmp_path)
    loaded = load(tmp_path)
    assert loaded.spec.max_positions == BORDER
    ids = ids_of(BORDER)
    assert (steps(loaded, ids) - exact(reference, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_past_the_border_the_long_set_is_that_of_transformers_at_all_positions(impl: str, tmp_path: Path) -> None:
    """The row crosses the border in a decode step; transformers computes it in one forward."""
    reference = make(tmp_path)
    loaded = load(tmp_path, longrope="long", model_impl=impl)
    assert loaded.spec.max_positions == MOST
    ids = ids_of(BORDER + 9)
    assert len(ids) * 2 // 3 < BORDER < len(ids)
    whole = exact(reference, ids)
    assert (steps(loaded, ids) - whole).abs().max() < 1e-4
    assert (exact(reference, ids[:BORDER]) - whole[:BORDER]).abs().max() > 0.1, "the two sets differ"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.nightly
def test_the_fused_kernels_have_the_long_set(tmp_path: Path) -> None:
    reference, ids = make(tmp_path), ids_of(BORDER + 9)
    loaded = load(tmp_path, longrope="long")
    assert (steps(loaded, ids, FusedDecoder(loaded.model)) - exact(reference, ids)).abs().max() < 1e-4


def test_a_trainer_with_one_set_in_its_config_agrees_on_both_sides_of_the_border(tmp_path: Path) -> None:
    """And a worker that serves its checkpoint needs no setting."""
    make(tmp_path / "two")
    trainer = make(tmp_path / "one", short_factor=ROPE["long_factor"])
    for loaded in (load(tmp_path / "two", longrope="long"), load(tmp_path / "one")):
        assert loaded.spec.max_positions == MOST
        for length in (BORDER // 2, BORDER, BORDER + 9):
            assert (steps(loaded, ids_of(length)) - exact(trainer, ids_of(length))).abs().max() < 1e-4


def test_rows_that_cross_the_border_keep_their_greedy_tokens_and_log_probs(tmp_path: Path) -> None:
    """In the engine rows on both sides run side by side; the one that crosses is held against one forward."""
    reference = make(tmp_path / "two")
    trainer = make(tmp_path / "one", short_factor=ROPE["long_factor"])
    bench = Bench(load(tmp_path / "two", longrope="long").model, max_rows=3)
    rows = {"crosses": (10, 40), "stays": (5, 12), "begins past it": (40, 12)}
    for name, (length, count) in rows.items():
        bench.submit(name, ids_of(length), count)
    bench.run()
    for name, (length, _) in rows.items():
        tokens = bench.tokens(name)
        logits = exact(trainer if name == "stays" else reference, ids_of(length) + tokens)[length - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(bench.completions[name, 0].raw_logprobs), logprobs, atol=1e-4, rtol=0)
    bench.close()


def test_the_long_set_of_a_model_that_has_none_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match="longrope"):
        load(tmp_path / "llama", longrope="long")
    make(tmp_path / "phi")
    config = json.loads((tmp_path / "phi" / "config.json").read_text())
    config["rope_parameters"] |= {"long_factor": [1.0] * 5}
    (tmp_path / "phi" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="long_factor"):
        load(tmp_path / "phi", longrope="long")
