"""New weights while sequences are offloaded: kept KV stays as it was, other KV is computed again."""

import random

import pytest

from tests.support.engine.harness import load, watch_prefills
from tests.support.engine.offloading import counts, offloading, restoring
from tests.support.engine.replay import replayed
from tests.support.engine.streams import LateDevice, random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly


@pytest.mark.parametrize("late", [False, True])
def test_kept_kv_of_older_weights_stays_valid_on_the_host(model, other, prompt_of, hf_models, late):
    """Updates while sequences are offloaded: tokens follow from the KV that the sequence had; none is recomputed."""
    mailbox = Mailbox()
    device = LateDevice({"kv_in": lambda: 0.003, "kv_out": lambda: 0.003}) if late else None
    bench = offloading(model, device=device, receiver=mailbox, prefill_chunk_tokens=256)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60, stream_every=3)
    bench.tick_until(lambda: counts(bench).offloaded)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored == counts(bench).offloaded > 0
    mixed = 0
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert completion.recomputed == ()
        assert replayed(hf_models, prompt, completion) == completion.token_ids
        mixed += len(set(completion.versions)) == 2 and bench.done[f"r{i}"].preemptions > 0
    assert mixed, "no sequence was offloaded across the update"


def test_an_update_while_kv_comes_back_loses_nothing_of_it(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.05}), receiver=mailbox, prefix_cache=False)
    prompts = [prompt_of(10, i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60)
    coming = []
    while not coming:
        bench.engine.tick()
        coming = [seq for seq in bench.engine.roster.prefilling if restoring(seq)]
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored == counts(bench).offloaded
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert completion.recomputed == () and replayed(hf_models, prompt, completion) == completion.token_ids
    assert set(bench.completions[f"r{coming[0].group.key[1][1:]}", 0].versions) == {0, 1}


def test_offloaded_kv_is_dropped_where_new_weights_compute_all_again(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = offloading(model, receiver=mailbox, kv_on_swap="recompute", prefill_chunk_tokens=256)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60, stream_every=3)
    bench.tick_until(lambda: counts(bench).offloaded)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored < counts(bench).offloaded
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert set(completion.versions) <= {0, 1} and len(completion.token_ids) == 60
        assert replayed(hf_models, prompt, completion) == completion.token_ids


def test_an_interrupted_prefill_goes_on_or_starts_again_under_new_weights(model, other, prompt_of, hf_models):
    """A long prompt is preempted half-way; without an update it goes on where it was."""
    for update in (False, True):
        mailbox = Mailbox()
        bench = offloading(model, receiver=mailbox, kv_pages=60, prefill_chunk_tokens=8, max_rows=4)
        prefills = watch_prefills(bench)
        prompts = {f"r{i}": prompt_of(8, i) for i in range(3)} | {"long": prompt_of(150, 9)}
        for name, prompt in prompts.items():
            bench.submit(name, prompt, 20 if name == "long" else 60)
        while not counts(bench).offloaded:
            bench.engine.tick()
        (seq,) = bench.engine.roster.groups["c", "long"].sequences
        assert seq.kv.is_offloaded and 0 < seq.kv.in_tier.offloaded.length < 150 and not seq.tokens
        if update:
            mailbox.ready = Update(1, other, model)
        bench.run()
        assert (sum(prefills) == 24 + 150) != update
        completion = bench.completions["long", 0]
        assert set(completion.versions) == {int(update)}
        assert replayed(hf_models, prompts["long"], completion) == completion.token_ids
        bench.close()


@pytest.mark.parametrize("seed", [3, *nightly(*range(3))])
def test_under_random_updates_every_token_follows_from_the_kv_that_is_reported(folders, hf_models, prompt_of, seed):
    rng = random.Random(100 + seed)
    models, mailbox = [load(folder) for folder in folders], Mailbox()
    model = load(folders[0])
    bench = offloading(
        model,
        host_pages=rng.choice([20, 300]),
        piece_pages=rng.choice([1, 4]),
        device=random_delays(seed, 0.001),
        receiver=mailbox,
        kv_on_swap=("keep", "recompute")[seed % 2],
        prefill_chunk_tokens=256,
    )
    prompts = {f"r{i}": prompt_of(rng.randint(3, 20), i) for i in range(7)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, rng.randint(30, 60), stream_every=4)
    for version in (1, 2, 3):
        bench.ticks(rng.randint(10, 45))
        mailbox.ready = Update(version, models[version % 2], model)
    bench.run()
    assert counts(bench).offloaded > 0
    weights = {version: hf_models[version % 2] for version in range(4)}
    for name, prompt in prompts.items():
        assert replayed(weights, prompt, bench.completions[name, 0]) == bench.tokens(name)
