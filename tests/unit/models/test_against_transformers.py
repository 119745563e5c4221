"""Every family, in float32, against transformers' own implementation of it."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from tests.support.models.families import FAMILIES, make_checkpoint
from tests.support.models.paged import PagedRunner

STEPS = 200
TOLERANCE = 1e-4
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "attention_factor": 1.3,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "rope_theta": 3000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
        "mscale": 1.5,
        "mscale_all_dim": 0.8,
    },
}


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    return _pair(tmp_path_factory.mktemp(request.param), request.param)


def _pair(folder: Path, family: str, **overrides: Any) -> tuple[LoadedModel, Any]:
    reference = make_checkpoint(family, folder, **overrides)
    return load_model(ModelSettings(path=str(folder)), torch.device("cpu")), reference


def _tokens(count: int, vocab: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(vocab) for i in range(count)]


def _reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float()


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    worst = (ours - theirs).abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst}"


def _compare(loaded: LoadedModel, reference: Any, spoil: Any = None, steps: int = STEPS) -> None:
    """Prefill two rows, then decode both with given tokens; row 1 pauses every third step, padding comes and goes."""
    prompts = (37, 20)
    ids = [_tokens(prompt + steps, loaded.spec.vocab, seed=row) for row, prompt in enumerate(prompts)]
    theirs = [_reference_logits(reference, row_ids) for row_ids in ids]
    runner = PagedRunner(loaded.model, rows=2, max_tokens=37 + steps)
    prefilled = runner.prefill({row: ids[row][:prompt] for row, prompt in enumerate(prompts)})
    for row, prompt in enumerate(prompts):
        _assert_close(prefilled[row], theirs[row][:prompt])
    if spoil is not None:
        spoil(runner)
    for step in range(steps):
        rows = (0,) if step % 3 == 2 else (1, 0) if step % 2 else (0, 1)
        logits = runner.decode({row: ids[row][runner.lengths[row]] for row in rows}, padding=step % 4)
        for row in rows:
            _assert_close(logits[row], theirs[row][runner.lengths[row] - 1])


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_logits_match_at_prefill_and_every_decode_step_of_a_changing_batch(pair: tuple[LoadedModel, Any]) -> None:
    _compare(*pair)


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_greedy_tokens_match(pair: tuple[LoadedModel, Any]) -> None:
    loaded, reference = pair
    ids = _tokens(11, loaded.spec.vocab, seed=5)
    runner = PagedRunner(loaded.model, rows=1, max_tokens=11 + STEPS)
    logits = runner.prefill({0: ids})[0][-1]
    ours = [int(logits.argmax())]
    for _ in range(STEPS - 1):
        ours.append(int(runner.decode({0: ours[-1]})[0].argmax()))
    theirs = _reference_logits(reference, ids + ours).argmax(-1).tolist()
    assert ours == theirs[len(ids) - 1 : -1]
    assert len(set(ours)) > 1


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_chunked_prefill_gives_the_logits_of_a_whole_one(pair: tuple[LoadedModel, Any]) -> None:
    loaded, reference = pair
    ids = [_tokens(120, loaded.spec.vocab, seed=10), _tokens(75, loaded.spec.vocab, seed=11)]
    theirs = [_reference_logits(reference, row_ids) for row_ids in ids]
    runner = PagedRunner(loaded.model, rows=2, max_tokens=120)
    sizes = random.Random(3)
    while any(runner.lengths[row] < len(ids[row]) for row in (0, 1)):
        begin = list(runner.lengths)
        pieces = {row: ids[row][begin[row] : begin[row] + sizes.randint(1, 40)] for row in (1, 0)}
        for row, logits in runner.prefill({row: piece for row, piece in pieces.items() if piece}).items():
            _assert_close(logits, theirs[row][begin[row] : begin[row] + len(logits)])


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_matches(kind: str, tmp_path: Path) -> None:
    _compare(*_pair(tmp_path, "llama", rope_parameters=ROPES[kind], tie_word_embeddings=True), steps=60)


def test_prompt_longer_than_a_query_block_matches(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        loaded, reference = _pair(tmp_path / family, family, max_position_embeddings=1024)
        ids = _tokens(600, loaded.spec.vocab, seed=1)
        ours = PagedRunner(loaded.model, rows=1, max_tokens=600).prefill({0: ids})[0]
        _assert_close(ours, _reference_logits(reference, ids))


def test_every_sparse_step_and_window_of_qwen3_moe_matches(tmp_path: Path) -> None:
    overrides = {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": False}
    windows = {"use_sliding_window": True, "sliding_window": 9}
    loaded, reference = _pair(tmp_path, "qwen3_moe", **overrides, **windows)
    assert loaded.spec.sparse_layers == (1,)
    assert [layer.mixer.window for layer in loaded.spec.layers] == [9, 9, 9]
    _compare(loaded, reference, steps=40)


# --- the comparison notices mistakes ----------------------------------------------------------------------------------


def _fails(loaded: LoadedModel, reference: Any, spoil: Any = None) -> None:
    with pytest.raises(AssertionError, match="logits differ"):
        _compare(loaded, reference, spoil, steps=20)


@pytest.mark.parametrize("family", FAMILIES)
def test_comparison_notices_a_shifted_position(family: str, tmp_path: Path) -> None:
    def shift(runner: PagedRunner) -> None:
        runner.decode_position_shift = 1

    _fails(*_pair(tmp_path, family), shift)


@pytest.mark.parametrize("family", FAMILIES)
def test_comparison_notices_a_wrong_rope_frequency(family: str, tmp_path: Path) -> None:
    loaded, reference = _pair(tmp_path, family)
    loaded.model.ropes[0].inv_freq_D.mul_(1.01)
    _fails(loaded, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_comparison_notices_a_wrong_page(family: str, tmp_path: Path) -> None:
    def mistake(runner: PagedRunner) -> None:
        runner.tables[0][runner.lengths[0] // runner.page_size - 1] = runner.tables[1][0]

    _fails(*_pair(tmp_path, family), mistake)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "olmoe"])
def test_comparison_notices_wrong_qk_norms(family: str, tmp_path: Path) -> None:
    loaded, reference = _pair(tmp_path, family)
    views = loaded.model.hf_views()
    name = "model.layers.1.self_attn.{}_norm.weight"
    q_norm, k_norm = views[name.format("q")], views[name.format("k")]
    swapped = k_norm.clone(), q_norm.clone()
    q_norm.copy_(swapped[0])
    k_norm.copy_(swapped[1])
    _fails(loaded, reference)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral"])
def test_comparison_notices_a_window_that_is_off_by_one(family: str, tmp_path: Path) -> None:
    loaded, reference = _pair(tmp_path, family)
    attention: Any = loaded.model.layers[-1].mixer
    attention.spec = dataclasses.replace(attention.spec, window=attention.spec.window + 1)
    _fails(loaded, reference)
