"""Models with latent attention through the whole engine: tokens are those of transformers, whatever happens."""

import functools

import pytest
import torch

from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench, load, watch_prefills
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.offloading import counts, offloading
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.kernels.grids import nightly
from tests.support.models.latent import make_latent

VOCAB = 83
prompt_of = functools.partial(any_prompt, vocab=VOCAB)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders and transformers' models by name and seed, made when first asked for."""
    torch.set_num_threads(1)
    known = {}

    def make(name: str = "DeepseekV3 moonlight", seed: int = 0):
        if (name, seed) not in known:
            folder = tmp_path_factory.mktemp("model")
            known[name, seed] = folder, make_latent(name, folder, seed)
        return known[name, seed]

    return make


@pytest.fixture
def model(made):
    return load(made()[0])


def agrees(hf_models: list, prompt: list[int], completion) -> bool:
    """Tokens are the greedy choice of transformers' model of their version, log-probs within 1e-4 of its logits'."""
    tokens = completion.token_ids
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens])
        logits = torch.stack([hf_model(ids).logits[0, len(prompt) - 1 : -1] for hf_model in hf_models])
    logits = logits[torch.tensor(completion.versions), torch.arange(len(tokens))]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    close = torch.allclose(torch.tensor(completion.raw_logprobs), logprobs, atol=1e-4, rtol=0)
    return close and logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    "name", ["Glm4MoeLite", *nightly("DeepseekV2", "DeepseekV2 groups", "DeepseekV3", "DeepseekV3 moonlight")]
)
def test_greedy_tokens_equal_transformers(made, name):
    """Prompts in chunks that are expanded or absorbed, groups, preemptions, and other weights in the middle."""
    model, other = (load(made(name, seed)[0]) for seed in (0, 1))
    mailbox = Mailbox()
    bench = Bench(model, receiver=mailbox, max_rows=5, kv_pages=75, prefill_chunk_tokens=40, kv_on_swap="recompute")
    lengths = (3, 50, 17, 31, 1, 90)
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", prompt_of(length, i), 50 + 5 * i, n=2 if i == 1 else 1)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 60)
    assert bench.engine.roster.counters.preemptions > 0
    hf_models = [made(name, seed)[1] for seed in (0, 1)]
    for i, length in enumerate(lengths):
        assert len(bench.tokens(f"r{i}")) == 50 + 5 * i
        assert agrees(hf_models, prompt_of(length, i), bench.completions[f"r{i}", 0])
    assert agrees(hf_models, prompt_of(50, 1), bench.completions["r1", 1])
    assert {version for done in bench.completions.values() for version in done.versions} == {0, 1}


def test_a_wrong_latent_is_seen(made, model):
    bench = Bench(model)
    bench.submit("r", prompt_of(30), 60)
    bench.ticks(6)
    seq, executor = bench.engine.roster.groups["c", "r"].sequences[0], bench.engine.executor
    executor.compute.run(lambda: executor.step.kv.k[0][seq.kv.pages[7]].mul_(-3.0))
    bench.run()
    assert not agrees([made()[1]], prompt_of(30), bench.completions["r", 0])


def test_latents_of_preempted_sequences_come_back_from_the_host(made, model):
    bench = offloading(model)
    prefills = watch_prefills(bench)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    preemptions = bench.engine.roster.counters.preemptions
    assert counts(bench).restored == counts(bench).offloaded == preemptions > 0
    assert sum(prefills) == 6 * 10 + preemptions
    assert all(agrees([made()[1]], prompt_of(10, i), bench.completions[f"r{i}", 0]) for i in range(6))


def test_turns_and_equal_prompts_compute_only_new_tokens(made, model):
    bench = Bench(model)
    sizes = watch_prefills(bench)
    talk = Conversation(bench, "s", prompt_of)
    for turn, new in enumerate((40, 6, 17)):
        sizes.clear()
        tokens = talk.say(new)
        assert sum(sizes) == new + (turn > 0)
        assert agrees([made()[1]], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])
    bench.complete("a", prompt_of(41), 4)
    sizes.clear()
    bench.complete("b", prompt_of(41), 4)
    assert sum(sizes) <= 1 and bench.tokens("a") == bench.tokens("b")


def test_rows_go_on_after_a_sleep(made, model):
    bench = Sleeping(model)
    bench.submit("r", prompt_of(40), 40)
    bench.ticks(12)
    assert bench.engine.roster.running == 1
    bench.sleep()
    assert not bench.pages.backed
    bench.wake()
    bench.run()
    assert agrees([made()[1]], prompt_of(40), bench.completions["r", 0])


def test_a_token_takes_one_latent_a_layer(model):
    bench = Bench(model, kv_pages=50)
    width = 18 + 8
    assert model.spec.kv_bytes_per_token(torch.float32) == 2 * width * 4
    assert sum(tensor.nbytes for tensor in bench.engine.executor.step.kv.tensors) == 50 * 4 * 2 * width * 4


@pytest.mark.parametrize(
    ("settings", "says"), [({"kv_dtype": "fp8_e4m3"}, "kv_dtype.*latent"), ({"deterministic": True}, "deterministic")]
)
def test_what_latent_attention_does_not_have_is_refused_at_the_start(model, settings, says):
    with pytest.raises(ValueError, match=says):
        Bench(model, **settings)
