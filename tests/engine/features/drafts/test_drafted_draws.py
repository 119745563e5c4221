"""Tokens drawn in verify steps have the probabilities that transformers computes.

Equal bits say so where they can be had. On a GPU in its fast mode, steps of other sizes round differently.
"""

from itertools import product

import pytest
import torch

from rollout.engine.device.streams import make_device
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench, load, prompt_of

#: The tokens that are drawn: a bias lifts them above all others. The temperature makes all of them likely.
DRAWN = (11, 205, 333, 777, 1500, 3999)
BIAS, TEMPERATURE = 400.0, 8.0
LEAST_EXPECTED = 5  # of a cell; rarer ones are counted together
PROMPT = prompt_of(40, 3)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SIZES = {"kv_pages": 900, "page_size": 16, "max_rows": 8, "prefill_chunk_tokens": 256, "speculation_rows": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fused_checkpoint(tmp_path_factory.mktemp("draws"))


def probabilities(folder) -> dict[tuple[int, ...], torch.Tensor]:
    """After each one and each two of the drawn tokens, the probability of each as the next, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = list(product(DRAWN, repeat=2))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *pair] for pair in pairs])).logits[:, -2:, DRAWN].double()
    chances = (logits / TEMPERATURE).softmax(-1)
    return {pair: chances[i, 1] for i, pair in enumerate(pairs)} | {
        pair[:1]: chances[i, 0] for i, pair in enumerate(pairs)
    }


def misfit(completions: list[list[int]], chances: dict[tuple[int, ...], torch.Tensor], before: int) -> float:
    """The chance of counts as unlikely as these, by chi-square, of the tokens after the first `before` ones."""
    counts = {key: torch.zeros(len(DRAWN), dtype=torch.float64) for key in chances if len(key) == before}
    for tokens in completions:
        counts[tuple(tokens[:before])][DRAWN.index(tokens[before])] += 1
    off, freedom = 0.0, 0
    for key, seen in counts.items():
        expected = chances[key] * seen.sum()
        rare = expected < LEAST_EXPECTED
        cells = [(float(a), float(b)) for a, b in zip(seen[~rare], expected[~rare], strict=True)]
        cells += [(seen[rare].sum().item(), expected[rare].sum().item())] if rare.any() else []
        off += sum((got - due) ** 2 / due for got, due in cells)
        freedom += len(cells) - 1
    assert freedom >= 5 * len(DRAWN) - 6, "too few completions for this test"
    return torch.special.gammaincc(*torch.tensor([freedom / 2, off / 2], dtype=torch.float64)).item()


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_tokens_of_verify_steps_have_the_probabilities_of_the_model(folder, device):
    """Half of the drafts are wrong, so third tokens are drawn after right drafts and after wrong ones."""
    count, made = (800, lambda: load(folder)) if device == "cpu" else (4000, lambda: load_bf16(folder))
    fields, bias = {**SIZES, "device": make_device(device)}, tuple((token, BIAS) for token in DRAWN)
    plain = Bench(made(), **fields)
    bench, _ = drafting(made(), known := {}, 0.5, **fields)
    for each in (plain, bench):
        for i in range(count):
            each.submit(f"r{i}", PROMPT, 4, sampling={"temperature": TEMPERATURE, "seed": i, "logit_bias": bias})
        each.finish()
        known.update({key: done.token_ids for key, done in each.completions.items()})
    drafts = bench.drafts
    assert drafts.drafted > 1.5 * count and 0.2 < drafts.accepted / drafts.drafted < 0.6
    drawn = [done.token_ids for done in bench.completions.values()]
    chances = probabilities(folder)
    assert len(drawn) == count
    assert misfit(drawn, chances, 1) > 1e-4
    assert misfit(drawn, chances, 2) > 1e-4


@pytest.mark.gpu
def test_drafts_change_no_more_than_another_batch_size_does(folder):
    """In the fast mode. At a high temperature rounding hardly ever changes a token, so rows stay together."""
    new, fields = 64, {**SIZES, "max_rows": 32, "device": make_device("cuda")}
    alone, plain, many = (Bench(load_bf16(folder), **fields) for _ in range(3))
    bench, _ = drafting(load_bf16(folder), known := {}, 0.2, **fields)
    for each, rows in ((plain, range(8)), (many, range(32)), (bench, range(8))):
        for i in rows:
            each.submit(f"r{i}", prompt_of(100 + i, i), new, sampling={"temperature": 100.0, "seed": i})
        each.run()
        known.update({key: done.token_ids for key, done in plain.completions.items()})
    for i in range(8):
        alone.complete(f"r{i}", prompt_of(100 + i, i), new, sampling={"temperature": 100.0, "seed": i})
    for each in (alone, plain, many, bench):
        each.close()
    assert bench.drafts.accepted > 100

    def difference(other: Bench) -> tuple[float, float]:
        """Mean and largest of the raw log-probs, up to the first token that differs."""
        off = []
        for i in range(8):
            one, two = (each.completions[f"r{i}", 0] for each in (plain, other))
            same = next((k for k in range(new) if one.token_ids[k] != two.token_ids[k]), new)
            assert same > 8, "of little use"
            off.append((torch.tensor(one.raw_logprobs[:same]) - torch.tensor(two.raw_logprobs[:same])).abs())
        return torch.cat(off).mean().item(), torch.cat(off).max().item()

    drafted, sizes = difference(bench), [difference(alone), difference(many)]
    print("drafts", drafted, "one row, 32 rows", sizes)
    assert drafted[0] < 1.2 * max(mean for mean, _ in sizes) + 1e-4, (drafted, sizes)
    assert drafted[1] < 2 * max(most for _, most in sizes) + 1e-3, (drafted, sizes)
