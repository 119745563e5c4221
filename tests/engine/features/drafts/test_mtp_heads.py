"""A layer for multi-token prediction of the served checkpoint: it drafts what its reference says, and changes nothing.

What else may happen to rows with drafts is in `test_drafters` and `test_drafts_fuzz`: the engine knows one draft model.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rollout_kernels.sampling import gumbel_noise
from transformers.masking_utils import create_causal_mask

from rollout.engine.step.row_state import LAST, LENGTH, NOISE, PROMPT, SEED, TEMPERATURE
from tests.engine.features.drafts.test_heads import as_captured, completions_by_seed, submit_seeded
from tests.engine.features.drafts.test_speculation import assert_same
from tests.engine.test_invariants import run_watched
from tests.support.engine.drafting import replayed_drafts, row_by_row, watch_drafts
from tests.support.engine.harness import Bench, load, prompt_of
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import HYBRIDS
from tests.support.models.mtp_layers import Predicting, add_tensors, make_predicting

HEADS = {"speculation": "heads"}


@pytest.fixture(
    scope="module",
    params=[
        "MiMo",
        "Qwen3_5",
        *nightly("Glm4Moe", "DeepseekV3", "Glm4MoeLite", "Qwen3_5Moe", "Qwen3Next", "BailingHybrid"),
    ],
)
def found(request, tmp_path_factory):
    """The reference, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_predicting(request.param, folder), folder


def submit_three(bench: Bench, name: str, vocab: int, tokens: int = 24) -> dict[int, list[int]]:
    """A greedy row and two sampled ones; returns their prompts by their seeds."""
    lengths, settings = {11: 21, 12: 6, 13: 13}, {11: 0.0, 12: 1.3, 13: 0.8}
    prompts = {seed: [token % vocab for token in prompt_of(lengths[seed], seed)] for seed in lengths}
    for seed, prompt in prompts.items():
        bench.submit(f"{name}{seed}", prompt, tokens, sampling={"temperature": settings[seed], "seed": seed})
    bench.run()
    return {
        bench.completions[f"{name}{seed}", 0].seed: prompt + bench.tokens(f"{name}{seed}")
        for seed, prompt in prompts.items()
    }


def assert_drafted(reference: Predicting, known_by_seed: dict[int, list[int]], seen: list) -> None:
    """What rows drafted at every step is what the reference drafts after their tokens."""
    checked, vocab = 0, reference.model.config.vocab_size
    for ints, floats, guesses in seen:
        known = known_by_seed[ints[SEED]]
        if ints[LENGTH] + 1 + len(guesses) > len(known):
            continue  # it has ended
        assert ints[LAST] == known[ints[LENGTH]]

        def draw(logits_1V, index, ints=ints, floats=floats):
            at = torch.tensor([ints[LENGTH] + 1 - ints[PROMPT] + index])
            noise_1V = gumbel_noise(torch.tensor([ints[SEED]]), at, vocab)
            return int((logits_1V / floats[TEMPERATURE] + floats[NOISE] * noise_1V).argmax())

        assert guesses == reference.guesses(known[: ints[LENGTH] + 1], len(guesses), draw)
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_drafts_are_those_of_the_reference(found, depth):
    """At every step, for prompts in chunks, for greedy and sampled rows, over pages that are opened on the way."""
    reference, folder = found
    fields = {**HEADS, "prefill_chunk_tokens": 8, "pipeline_depth": depth, "speculation_tokens": 4}
    bench = Bench(load(folder, mtp="needed"), **fields)
    seen = watch_drafts(bench)
    if depth == 2:
        as_captured(bench)
    known = submit_three(bench, "r", reference.model.config.vocab_size)
    bench.close()
    assert_drafted(reference, known, seen)


@pytest.mark.nightly
@pytest.mark.parametrize(("wrong", "depth"), [(0.3, 2), (None, 1), (0.0, 2), (0.3, 1)])
def test_all_bits_are_equal_with_rows_computed_one_by_one(found, monkeypatch, wrong, depth):
    if found[0].name in HYBRIDS:
        pytest.skip("a state goes through a row and its drafts in one step")
    row_by_row(monkeypatch)
    plain = Bench(load(found[1]), max_rows=32, pipeline_depth=depth)
    submit_seeded(plain, vocab := found[0].model.config.vocab_size)
    plain.finish()
    replayed = {} if wrong is None else replayed_drafts(completions_by_seed(plain), wrong)
    bench = Bench(load(found[1], mtp="needed"), **HEADS, **replayed, max_rows=32, pipeline_depth=depth)
    submit_seeded(bench, vocab)
    run_watched(bench)
    assert_same(bench, plain, exact=True)
    drafts = bench.drafts
    assert drafts.drafted > 200 and drafts.accepted > (100 if wrong is not None else 0)


def test_updates_with_its_tensors_renew_it_and_others_leave_it_as_it_is(found, tmp_path):
    reference, folder = found
    other = make_predicting(reference.name, tmp_path, seed=5)
    mixed = replace(reference, block=other.block, tensors=other.tensors)
    mailbox, model = Mailbox(), load(folder, mtp="if_there")
    bench = Bench(model, receiver=mailbox, speculation="heads", speculation_tokens=4)
    roster, vocab = bench.engine.roster, reference.model.config.vocab_size
    for version, (source, draft_version, expected) in enumerate(
        [
            (load(tmp_path, mtp="needed"), 1, other),
            (load(folder), 1, mixed),
            (load(folder, mtp="needed"), 3, reference),
        ],
        start=1,
    ):
        mailbox.ready = Update(version, source, model)
        mailbox.ready.names += tuple(reference.prefix + key for key in reference.layout.copies)  # which change nothing
        bench.ticks(4)
        assert (roster.version, bench.drafting.draft_version) == (version, draft_version)
        seen = watch_drafts(bench)
        known = submit_three(bench, f"v{version}-", vocab, 14)
        assert_drafted(expected, known, seen)


def train(reference: Predicting, texts_NT: torch.Tensor, updates: int) -> None:
    """Teach the layer to say the token after the next one, as it is trained: from the tokens of each position on."""
    model, config = reference.model, reference.model.config
    weights = [tensor.requires_grad_() for tensor in reference.block.parameters()]
    around = {name: reference.part(name).requires_grad_() for name in reference.layout[1:5]}
    optimizer = torch.optim.Adam([*weights, *around.values()], lr=5e-3)
    hidden_NTH = model.model(texts_NT).last_hidden_state
    for _ in range(updates):
        x_NTH = reference.joined(model.get_input_embeddings()(texts_NT[:, 1:]), hidden_NTH[:, :-1])
        positions_1T = torch.arange(x_NTH.shape[1])[None]
        mask = create_causal_mask(config, x_NTH, None, None, position_ids=positions_1T)
        turned = model.model.rotary_emb(x_NTH, positions_1T)
        x_NTH = reference.block(x_NTH, attention_mask=mask, position_ids=positions_1T, position_embeddings=turned)
        logits_NTV = model.lm_head(reference.norm(x_NTH, reference.layout.norm))
        loss = F.cross_entropy(logits_NTV[:, :-1].flatten(0, 1), texts_NT[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_layer_that_has_learnt_the_text_is_right(tmp_path):
    """Its first draft after each token: it has not learnt from its own hidden states."""
    reference = make_predicting("MiMo", tmp_path)
    vocab, tokens = reference.model.config.vocab_size, 50
    prompts = [[token % vocab for token in prompt_of(8, seed)] for seed in range(4)]

    def run(model, **fields) -> Bench:
        bench = Bench(model, **fields)
        for i, prompt in enumerate(prompts):
            bench.submit(f"r{i}", prompt, tokens)
        return bench.finish()

    plain = run(load(tmp_path))
    texts_NT = torch.tensor([prompt + plain.tokens(f"r{i}") for i, prompt in enumerate(prompts)])
    train(reference, texts_NT, 80)
    trained = {reference.prefix + name: tensor for name, tensor in reference.block.state_dict().items()}
    add_tensors(tmp_path, reference.tensors | trained)
    bench = run(load(tmp_path, mtp="needed"), speculation="heads", speculation_tokens=1)
    assert_same(bench, plain)
    drafts = bench.drafts
    assert drafts.accepted > 0.8 * drafts.drafted > 50, (drafts.accepted, drafts.drafted)
