"""A draft model changes no completion, drafts what its reference says, and its drafts are verified without a wait."""

import functools

import pytest
import torch
from rollout_kernels.sampling import gumbel_noise

from rollout.engine.build import rebuild_engine
from rollout.engine.features.drafts import verify
from rollout.engine.features.drafts.drafter import DraftAfter
from rollout.engine.features.drafts.feature import DraftPlan
from rollout.engine.features.drafts.model_drafter import DRAFT, READ
from rollout.engine.inspect import Inspector
from rollout.engine.step.row_state import LAST, LENGTH, NOISE, PROMPT, SEED, TEMPERATURE
from rollout.engine.step.sampler import Sampler
from rollout.engine.upload import PLAIN
from tests.engine.features.drafts.test_speculation import (
    assert_same,
    recorded,
    submit_all,
    submit_six,
)
from tests.engine.features.drafts.test_verify import accept_by_kernel, set_up_by_kernel
from tests.engine.test_invariants import run_watched
from tests.support.engine.drafting import drafter_of, drafting, fixed_costs, replayed_drafts, row_by_row, watch_drafts
from tests.support.engine.harness import VOCAB, Bench, load, prompt_of, watch_plans
from tests.support.engine.sleeping import Sleeping, outcome, submit_some
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.draft_heads import head_config, head_forward, head_logits, random_head, save_head
from tests.support.models.every_family import EVERY_FAMILY

HEADS = {"speculation": "heads", "speculation_model": "a folder"}
SAMPLED = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module", params=["mapped", "whole"])
def head(request, hf_models, tmp_path_factory):
    """Config, tensors and folder of a random head."""
    mapped = request.param == "mapped"
    config = head_config(hf_models[0].config, 60 if mapped else None, norm_before_residual=not mapped)
    tensors = random_head(config, seed=3)
    return config, tensors, save_head(tmp_path_factory.mktemp("head"), config, tensors)


@pytest.fixture(scope="module")
def head_folder(hf_models, tmp_path_factory):
    config = head_config(hf_models[0].config)
    return save_head(tmp_path_factory.mktemp("head"), config, random_head(config))


@pytest.fixture
def drafted(folders, head_folder):
    """A fresh decoder with a draft model."""
    return load(folders[0], draft=head_folder)


def as_captured(bench: Bench) -> None:
    """Have steps read and draft as where these are captured: for fixed numbers of rows, for the longest context."""
    drafter = drafter_of(bench)
    run = drafter.run

    def run_graphs(step, output_4R, accepted_B, kv, after, replays):
        longest = drafter.rows.pages.shape[1] * kv.page_size
        read = {size: functools.partial(drafter.read, size, longest, kv) for size in range(1, 33)}
        draft = {size: functools.partial(drafter.draft, size, longest, PLAIN, kv) for size in (2, 4, 8, 16)}
        drafter.rows.ints[0, LENGTH] += 1000  # of the padding
        return run(step, output_4R, accepted_B, kv, after, {READ: read, DRAFT: draft})

    drafter.run = run_graphs


# --- what it drafts -------------------------------------------------------------------------------------------------


def reference_drafts(hf_model, head, tokens: list[int], count: int, draw) -> list[int]:
    """What a head drafts after these tokens: `draw(logits, index of the draft)` is a token."""
    config, tensors, _ = head
    with torch.inference_mode():
        states = hf_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        # The last of these is after the model's last norm; that before it is what layer 2 of 2 leaves.
        read = []
        hook = hf_model.model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        hf_model(torch.tensor([tokens]))
        hook.remove()
        fused = torch.cat((states[0], states[1], read[0]), dim=-1)[0] @ tensors["fc.weight"].T
        embed = hf_model.get_input_embeddings()
        embeds, hidden, guesses = embed(torch.tensor(tokens[1:])), fused[:-1], []
        for index in range(count):
            out = head_forward(config, tensors, embeds, hidden)
            token = draw(head_logits(config, tensors, out[-1:]), index)
            guesses.append(token)
            embeds = torch.cat((embeds, embed(torch.tensor([token]))))
            hidden = torch.cat((hidden, out[-1:]))
    return guesses


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have draws, and the beginnings and ends of verify steps, run by the kernels: in Triton's interpreter."""
    monkeypatch.setattr(Sampler, "_draw", Sampler._draw_on_gpu)
    monkeypatch.setattr(verify, "copy_rows", set_up_by_kernel)
    monkeypatch.setattr(verify, "continue_rows", accept_by_kernel)


@pytest.mark.parametrize("head", ["mapped", *nightly("whole")], indirect=True)
@pytest.mark.parametrize(("depth", "kernels"), [(2, True), *nightly((2, False), (1, False))])
def test_drafts_are_those_of_the_reference(folders, hf_models, head, monkeypatch, depth, kernels):
    """At every step, for prompts in chunks, for greedy and sampled rows, over pages that are opened on the way."""
    if kernels:
        by_kernels(monkeypatch)
    model = load(folders[0], draft=head[2])
    fields = {**HEADS, "prefill_chunk_tokens": 8, "pipeline_depth": depth, "speculation_tokens": 4}
    if kernels:
        fields |= fixed_costs()  # nothing is measured, which takes the interpreter minutes
    bench = Bench(model, **fields)
    seen = watch_drafts(bench)
    if depth == 2:
        as_captured(bench)
    prompts = {11: prompt_of(21, 1), 12: prompt_of(6, 2), 13: prompt_of(13, 3)}
    settings = {11: {"temperature": 0.0}, 12: {"temperature": 1.3}, 13: {"temperature": 0.8}}
    for seed, prompt in prompts.items():
        bench.submit(f"r{seed}", prompt, 12 if kernels else 30, sampling={**settings[seed], "seed": seed})
    bench.finish()
    of_row = {bench.completions[f"r{seed}", 0].seed: seed for seed in prompts}
    checked = 0
    for ints, floats, guesses in seen:
        seed = of_row[ints[SEED]]
        known = prompts[seed] + bench.tokens(f"r{seed}")
        if ints[LENGTH] + 1 + len(guesses) > len(known):
            continue  # it has ended
        assert ints[LAST] == known[ints[LENGTH]]

        def draw(logits_1V, index, ints=ints, floats=floats):
            at = torch.tensor([ints[LENGTH] + 1 - ints[PROMPT] + index])
            noise_1V = gumbel_noise(torch.tensor([ints[SEED]]), at, VOCAB)
            return int((logits_1V / floats[TEMPERATURE] + floats[NOISE] * noise_1V).argmax())

        assert guesses == reference_drafts(hf_models[0], head, known[: ints[LENGTH] + 1], len(guesses), draw)
        checked += 1
    assert checked > (15 if kernels else 50)


def test_drafts_are_truncated_like_draws(drafted):
    """With top_k = 1 a sampled row drafts what a greedy one does."""
    found = []
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_k": 1}):
        bench = Bench(drafted, **HEADS)
        seen = watch_drafts(bench)
        bench.complete("a", prompt_of(9), 20, sampling=sampling)
        bench.close()
        found.append([guesses for *_, guesses in seen])
    assert found[0] == found[1] and len(found[0]) > 10


def changed_logits(logits_1V, ints, known, sampling, stop, index):
    """Logits of a draw as the rules of a request change them, written on its own."""
    logits = logits_1V[0].double().clone()
    prompt, drawn = known[: ints[PROMPT]], known[ints[PROMPT] :]
    for token, value in sampling.get("logit_bias", ()):
        logits[token] += value
    penalty = sampling.get("repetition_penalty", 1.0)
    for token in {*prompt, *drawn}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(drawn):
        logits[token] -= sampling.get("presence_penalty", 0.0)
        logits[token] -= sampling.get("frequency_penalty", 0.0) * drawn.count(token)
    if index < stop.get("min_tokens", 0):
        logits[list(stop["token_ids"])] = -torch.inf
    return logits.float()[None]


@pytest.mark.parametrize("kernels", [False, *nightly(True)])
def test_drafts_heed_penalties_biases_and_bans(folders, hf_models, head, monkeypatch, kernels):
    """The counts of penalties go on with the drafts, and the rules of one row leave the others alone."""
    if kernels:
        by_kernels(monkeypatch)
    config, tensors, _ = head
    ids = tensors["d2t"] + torch.arange(60) if "d2t" in tensors else torch.arange(VOCAB)
    often, stops = tuple(ids[:25].tolist()), tuple(ids[:40:3].tolist())
    rules = {
        11: {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 1.5, "frequency_penalty": 1.0},
        12: {"temperature": 1.0, "logit_bias": tuple((token, 6.0) for token in often)},
        13: {"temperature": 0.9, "frequency_penalty": 2.0, "logit_bias": ((often[3], 4.0),)},
        14: {"temperature": 1.0},
        15: {"temperature": 0.0},
    }
    stop = {seed: {"token_ids": stops, "min_tokens": 30} if seed in (12, 14) else {} for seed in rules}
    bench = Bench(load(folders[0], draft=head[2]), **HEADS, **(fixed_costs() if kernels else {}))
    seen = watch_drafts(bench)
    prompts = {seed: prompt_of(5 + seed % 4, seed) for seed in rules}
    for seed, sampling in rules.items():
        length = 8 if kernels else 20
        bench.submit(f"r{seed}", prompts[seed], length, sampling={**sampling, "seed": seed}, stop=stop[seed])
    bench.finish()
    of_row = {bench.completions[f"r{seed}", 0].seed: seed for seed in prompts}
    checked, changed = 0, set()
    for ints, floats, guesses in seen:
        seed = of_row[ints[SEED]]
        known = prompts[seed] + bench.tokens(f"r{seed}")
        if ints[LENGTH] + 1 + len(guesses) > len(known):
            continue  # it has ended
        known = known[: ints[LENGTH] + 1]

        def draw(logits_1V, index, ints=ints, floats=floats, known=known, guesses=guesses, seed=seed):
            at = len(known) + index - ints[PROMPT]
            noise_1V = floats[NOISE] * gumbel_noise(torch.tensor([ints[SEED]]), torch.tensor([at]), VOCAB)
            ruled_1V = changed_logits(logits_1V, ints, known + guesses[:index], rules[seed], stop[seed], at)
            token, plain = (int((each / floats[TEMPERATURE] + noise_1V).argmax()) for each in (ruled_1V, logits_1V))
            changed.update({seed} if token != plain else ())
            return token

        assert guesses == reference_drafts(hf_models[0], head, known, len(guesses), draw)
        checked += 1
    assert checked > (8 if kernels else 40) and changed >= {11, 12, 14} and 15 not in changed


# --- what it does not change -----------------------------------------------------------------------------------------


def completions_by_seed(bench: Bench) -> dict[int, list[int]]:
    return {completion.seed: completion.token_ids for completion in bench.completions.values()}


@pytest.fixture(scope="module")
def plain(folders) -> Bench:
    bench = Bench(load(folders[0]))
    submit_all(bench)
    return bench.finish()


@pytest.fixture(scope="module")
def six(folders) -> Bench:
    bench = Bench(load(folders[0]), kv_pages=600)
    submit_six(bench)
    return bench.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_random_head_changes_nothing(drafted, plain, depth):
    bench = Bench(drafted, **HEADS, pipeline_depth=depth)
    submit_all(bench)
    run_watched(bench)
    assert_same(bench, plain)
    drafts = bench.drafts
    assert drafts.drafted > 200 and drafts.accepted < drafts.drafted / 3
    assert drafts.by_drafter["heads"] == (drafts.drafted, drafts.accepted)


def submit_seeded(bench: Bench, vocab: int = VOCAB) -> None:
    """Rows whose seeds differ: all kinds of sampling, groups, a stop."""

    def prompt(length: int, seed: int) -> list[int]:
        return [token % vocab for token in prompt_of(length, seed)]

    rules = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 1.0, "logit_bias": ((5, 3.0), (9, -4.0))},
    ]
    for i, sampling in enumerate(rules):
        bench.submit(f"rules{i}", prompt(5 + 3 * i, i), 22 + i, sampling={**sampling, "seed": 50 + i}, n=1 + i % 3)
    stop = {"token_ids": (31, 32), "min_tokens": 6}
    bench.submit("stops", prompt(9, 20), 60, sampling={"temperature": 1.0, "seed": 60}, stop=stop, n=3)
    bench.submit("one", prompt(6, 22), 1, sampling={"temperature": 1.0, "seed": 61})
    bench.submit("two", prompt(6, 22), 2, sampling={"temperature": 1.0, "seed": 62})


@pytest.mark.nightly
@pytest.mark.parametrize(("wrong", "depth"), [(0.3, 2), *nightly((None, 1), (0.0, 2), (0.3, 1))])
def test_all_bits_are_equal_with_rows_computed_one_by_one(folders, drafted, monkeypatch, wrong, depth):
    row_by_row(monkeypatch)
    plain = Bench(load(folders[0]), max_rows=32, pipeline_depth=depth)
    submit_seeded(plain)
    plain.finish()
    replayed = {} if wrong is None else replayed_drafts(completions_by_seed(plain), wrong)
    bench = Bench(drafted, **HEADS, **replayed, max_rows=32, pipeline_depth=depth)
    submit_seeded(bench)
    run_watched(bench)
    assert_same(bench, plain, exact=True)
    drafts = bench.drafts
    assert drafts.accepted > (100 if wrong is not None else 0)


def test_right_drafts_make_as_few_steps_as_they_can(folders, drafted):
    plain = Bench(load(folders[0]))
    plain.complete("a", prompt_of(9), 101, sampling=SAMPLED)
    replayed = replayed_drafts(completions_by_seed(plain), 0.0)
    bench = Bench(drafted, **replayed, **HEADS, speculation_tokens=4)
    bench.submit("a", prompt_of(9), 101, sampling=SAMPLED)
    assert run_watched(bench).most == 2, "no wait between the steps"
    assert bench.tokens("a") == plain.tokens("a")
    assert bench.engine.roster.counters.decode_rows == 20 and plain.engine.roster.counters.decode_rows == 100
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert report["speculation/tokens_a_step"] == 5 and report["speculation/accepted_pct/by_heads"] == 100


def test_a_row_may_have_more_drafts_than_a_step_has_rows(folders, drafted):
    plain = Bench(load(folders[0]))
    plain.complete("a", prompt_of(9), 50, sampling=SAMPLED)
    replayed = replayed_drafts(completions_by_seed(plain), 0.0)
    bench = Bench(drafted, **replayed, **HEADS, max_rows=1, speculation_rows=3, speculation_tokens=6)
    bench.submit("a", prompt_of(9), 50, sampling=SAMPLED)
    run_watched(bench)
    assert bench.tokens("a") == plain.tokens("a") and bench.drafts.accepted > 30


def test_the_draft_model_writes_to_pages_of_its_own_row(folders, drafted):
    """However many drafts were accepted, its drafts lie on pages that the row has, as far as these go."""
    plain = Bench(load(folders[0]))
    submit_six(plain)
    plain.run()
    replayed = replayed_drafts(completions_by_seed(plain), 0.2)
    bench = Bench(drafted, **replayed, **HEADS, speculation_tokens=6, kv_pages=600, pipeline_depth=1)
    drafter = drafter_of(bench)
    replay, checked = drafter.draft, []

    def guess(count, max_context, features, kv):
        for seq in bench.engine.roster.decoding:
            if seq.row in drafter._rows_R[:count].tolist():
                end = int(drafter.rows.ints[seq.row, LENGTH]) + drafter.most
                pages = seq.kv.pages[: -(-end // kv.page_size)]
                assert drafter.rows.pages[seq.row, : len(pages)].tolist() == pages
                checked.append(len(pages))
        replay(count, max_context, features, kv)

    drafter.draft = guess
    submit_six(bench)
    bench.finish()
    assert_same(bench, plain)
    assert len(checked) > 60


# --- only where it pays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "measured", "guesses", "pays"),
    [
        (0.0, {1: 1.0, 72: 1.0}, {1: 0.1, 8: 0.2}, True),
        (1.0, {1: 1.0, 72: 1.0}, {1: 0.1, 8: 0.2}, False),
        (0.0, {1: 1.0, 72: 72.0}, {1: 0.1, 8: 0.2}, False),
        (0.0, {1: 1.0, 72: 1.0}, {1: 9.0, 8: 9.0}, False),
    ],
)
def test_auto_drafts_while_it_pays(folders, drafted, wrong, measured, guesses, pays):
    six = Bench(load(folders[0]), kv_pages=600)
    submit_six(six)
    six.run()
    fixed = replayed_drafts(completions_by_seed(six), wrong, **fixed_costs(measured, guesses))
    bench = Bench(drafted, kv_pages=600, **fixed, **{**HEADS, "speculation": "auto"})
    submit_six(bench)
    run_watched(bench)
    assert_same(bench, six)
    drafted_, accepted = bench.drafts.by_drafter["heads"]
    assert accepted > 200 if pays else drafted_ < 130


def test_auto_finds_a_draft_model_that_has_become_better(folders, drafted):
    """It drafts now and then while that does not pay."""
    plain = Bench(load(folders[0]), kv_pages=600)
    plain.complete("a", prompt_of(9), 300, sampling=SAMPLED)
    recorded = completions_by_seed(plain)
    right = {seed: list(tokens) for seed, tokens in recorded.items()}
    recorded = {seed: [(t + 1) % VOCAB for t in tokens[:100]] + tokens[100:] for seed, tokens in right.items()}
    replayed = replayed_drafts(recorded, 0.0, **fixed_costs({1: 1.0, 72: 1.3}, {1: 0.4, 8: 0.4}))
    fields = {**HEADS, **replayed, "speculation": "auto"}
    bench = Bench(drafted, kv_pages=600, speculation_kept_tokens=0, unpaid_share=0.05, **fields)
    bench.submit("a", prompt_of(9), 300, sampling=SAMPLED)
    run_watched(bench)
    assert bench.tokens("a") == right[bench.completions["a", 0].seed]
    assert bench.drafts.by_drafter["heads"][1] > 60


@pytest.mark.nightly
@pytest.mark.parametrize(("length", "draft_s"), [(25, 0.25), (60, 0.25), (12, 0.05)])
def test_auto_finds_better_drafts_of_short_completions(folders, drafted, length, draft_s):
    """What has come of a draft counts when its row ends, which may be before the device drafts again."""

    def submit_many(bench: Bench) -> None:
        for i in range(100):
            bench.submit(f"r{i}", prompt_of(9 + i % 5, i), length, sampling={**SAMPLED, "seed": i})

    plain = Bench(load(folders[0]), kv_pages=600)
    submit_many(plain)
    plain.run()
    fixed = fixed_costs({1: 1.0, 8: 1.0, 72: 1.5}, {1: draft_s, 8: draft_s})
    fixed = replayed_drafts(completions_by_seed(plain), 0.0, **fixed)
    bench = Bench(drafted, kv_pages=600, speculation_kept_tokens=0, **fixed, **{**HEADS, "speculation": "auto"})
    bench.drafting.planner._all_device_rows.note(0, 400)  # all were wrong so far
    submit_many(bench)
    run_watched(bench)
    assert_same(bench, plain)
    assert bench.drafts.by_drafter["heads"][1] > 300


def test_auto_finds_the_one_row_whose_drafts_are_right(folders, drafted):
    """All rows are measured while none drafts, not only some."""
    plain = Bench(load(folders[0]), kv_pages=600)
    for i in range(8):
        plain.submit(f"r{i}", prompt_of(9 + i), 150, sampling={**SAMPLED, "seed": i})
    plain.run()
    wrong = {seed: [(t + 1) % VOCAB for t in tokens] for seed, tokens in completions_by_seed(plain).items()}
    right = plain.completions["r7", 0]
    fixed = fixed_costs({1: 1.0, 8: 1.0, 9: 1.05, 72: 72.0}, {1: 0.01, 8: 0.01})
    fixed = replayed_drafts({**wrong, right.seed: list(right.token_ids)}, 0.0, **fixed)
    bench = Bench(drafted, kv_pages=600, speculation_kept_tokens=0, **fixed, **{**HEADS, "speculation": "auto"})
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(9 + i), 150, sampling={**SAMPLED, "seed": i})
    run_watched(bench)
    assert_same(bench, plain)
    drafted_, accepted = bench.drafts.by_drafter["heads"]
    assert accepted > 20 and drafted_ < accepted + 20


def test_both_drafters_in_auto_change_nothing(drafted, plain):
    bench = Bench(drafted, **{**HEADS, "speculation": "auto"})
    for _ in range(2):
        submit_all(bench)
        run_watched(bench)
        assert_same(bench, plain)
        bench.completions.clear()


@pytest.mark.parametrize("better", ["heads", "suffix"])
def test_each_row_takes_the_drafter_that_is_right_more_often(folders, drafted, six, better):
    wrong = {"heads": 1.0, "suffix": 1.0, better: 0.0}
    fixed = fixed_costs({1: 1.0, 72: 1.0}, {1: 0.01, 8: 0.01})
    replayed = replayed_drafts(completions_by_seed(six), wrong["heads"], **fixed)
    fields = {**HEADS, **replayed, "speculation": "auto"}
    bench, _ = drafting(drafted, recorded(six.completions), wrong["suffix"], kv_pages=600, **fields)
    submit_six(bench)
    bench.finish()
    assert_same(bench, six)
    by_drafter = bench.drafts.by_drafter
    (worse,) = by_drafter.keys() - {better, "ngram"}
    assert by_drafter[better][1] > 150 and by_drafter[worse][1] == 0 and by_drafter[worse][0] < 60


def test_a_draft_model_that_pays_for_one_row_alone_reads_on(drafted, six):
    """Its drafts for many rows do not pay, so it makes none; its KV is there when few rows are left."""
    for draft_s, read in ((0.1, DraftAfter.READ), (9.0, DraftAfter.NOTHING)):
        fixed = fixed_costs({1: 1.0, 4: 1.1, 6: 2.0, 72: 72.0}, {1: draft_s, 8: 9.0})
        fixed = replayed_drafts(completions_by_seed(six), 0.0, **fixed)
        bench = Bench(drafted, kv_pages=600, speculation_kept_tokens=0, **fixed, **{**HEADS, "speculation": "auto"})
        plans = watch_plans(bench)
        submit_six(bench)
        bench.finish()
        assert_same(bench, six)
        of_all = [plan for plan in plans if (plan.kind, plan.rows) == ("decode", 6)]
        afters = [plan.after if isinstance(plan, DraftPlan) else DraftAfter.NOTHING for plan in of_all]
        assert afters.count(read) > 40


# --- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Gemma3", "DeepseekV3", *nightly("qwen3_moe", "GptOss", "Glm4Moe")])
def test_targets_of_other_families_have_draft_models_too(family, tmp_path):
    """Experts, latents, windows, norms around blocks: the hidden states come from their residual streams."""
    hf_model = EVERY_FAMILY[family](tmp_path / "target", 0)
    config = head_config(hf_model.config.get_text_config())
    save_head(tmp_path / "head", config, random_head(config))

    def run(bench: Bench) -> Bench:
        for i in range(6):
            prompt = [token % config["vocab_size"] for token in prompt_of(10 + i, i)]
            bench.submit(f"r{i}", prompt, 40, sampling={"temperature": 1.0, "seed": i})
        run_watched(bench)
        bench.close()
        return bench

    plain = run(Bench(load(tmp_path / "target")))
    replayed = replayed_drafts(completions_by_seed(plain), 0.2)
    bench = run(Bench(load(tmp_path / "target", draft=tmp_path / "head"), **HEADS, **replayed))
    assert_same(bench, plain)
    assert bench.drafts.accepted > 100


def test_a_sleep_and_a_fault_keep_the_draft_model(folders, head_folder):
    """Its weights come back with those of the target, and its drafts are the same after both."""
    plain = Sleeping(load(folders[0]))
    submit_some(plain, prompt_of)
    plain.run()
    bench = Sleeping(load(folders[0], draft=head_folder), **HEADS)
    weights = {name: view.clone() for name, view in bench.engine.executor.step.model.draft.views().items()}
    submit_some(bench, prompt_of)
    bench.ticks(6)
    bench.sleep()
    bench.wake()
    bench.run()
    assert outcome(bench) == outcome(plain)
    rebuild_engine(bench.engine, bench.settings)
    after = bench.engine.executor.step.model.draft.views()
    assert all(torch.equal(after[name], view) for name, view in weights.items())
    before = bench.drafts.drafted
    bench.completions.clear()
    submit_some(bench, prompt_of)
    bench.run()
    assert outcome(bench) == outcome(plain) and bench.drafts.drafted > before
    for each in (plain, bench):
        each.close()


def test_the_age_of_a_draft_model_outlives_a_fault(folders, drafted):
    """Updates without its tensors leave it behind, and so it is after a rebuild."""
    mailbox = Mailbox()
    bench = Bench(drafted, receiver=mailbox, **HEADS)
    ages = []
    for version in (0, 3):
        if version:
            mailbox.ready = Update(version, load(folders[0]), drafted)
            bench.run()
            rebuild_engine(bench.engine, bench.settings)
        bench.complete(f"v{version}", prompt_of(9), 20, sampling=SAMPLED)
        ages.append([count for count, _ in bench.drafts.by_age])
    assert set(bench.completions["v3", 0].versions) == {3}
    assert ages[0][0] == ages[1][0] > 0 and ages[0][1:] == [0, 0, 0] and ages[1][2] > 0
