"""An engine with quantized weights: its tokens and log-probs equal those of the dequantized weights."""

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings
from rollout.engine.messages.to_service import Done
from rollout.engine.sizing import weight_bytes
from rollout.models import load_model
from scripts.check.weight_formats import decode_into
from tests.support.engine.harness import Bench
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox
from tests.support.kernels.grids import checkered
from tests.support.models.families import make_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}
CODED = ["mxfp8", "fp8_row", "fp8_block"]


def load(folder, weights="plain", dtype="float32", device="cpu"):
    return load_model(ModelSettings(path=str(folder), dtype=dtype), torch.device(device), weights=weights).model


def decoded(folder, format):
    """A plain model with the weights that the codes stand for."""
    return decode_into(load(folder), load(folder, format))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("mixtral")
    for seed, name in enumerate(("old", "new")):
        make_checkpoint("mixtral", base / name, seed, **SIZES)
    return base / "old", base / "new"


class Arriving:
    """A whole update under a checkpoint's names, as the bridge copies it."""

    nbytes = 0
    names = ()

    def __init__(self, version, source, target):
        self.version = version
        views = target.hf_views()
        names = [name for region in source.hf_regions() for name in region.alternatives[0]]
        self._pairs = [(views[name], source.hf_views()[name]) for name in names]

    def copy_into(self):
        for view, weights in self._pairs:
            view.copy_(weights)


def run(model, prompt_of, receiver=None, swap=None, **engine):
    bench = Bench(model, max_rows=5, receiver=receiver, **engine)
    for i in range(4):
        bench.submit(f"r{i}", [t % 71 for t in prompt_of(5 + 9 * i, i)], 40, sampling={"temperature": 1.0, "seed": i})
    if swap is not None:
        bench.ticks(15)
        receiver.ready = swap
    bench.finish()
    return [(bench.tokens(f"r{i}"), bench.completions[f"r{i}", 0].raw_logprobs) for i in range(4)]


@pytest.mark.parametrize("format", CODED)
def test_log_probs_are_those_of_the_decoded_weights_bit_for_bit(format, folders, prompt_of):
    coded = run(load(folders[0], format), prompt_of, weight_dtype=format)
    assert coded == run(decoded(folders[0], format), prompt_of)
    assert coded != run(load(folders[0]), prompt_of)


@pytest.mark.parametrize("format", CODED)
def test_weights_that_arrive_while_rows_run_are_quantised(format, folders, prompt_of):
    runs = []
    for coded in (True, False):
        model = load(folders[0], format) if coded else decoded(folders[0], format)
        source = load(folders[1]) if coded else decoded(folders[1], format)
        engine = {"weight_dtype": format} if coded else {}
        runs.append(run(model, prompt_of, Mailbox(), Arriving(1, source, model), **engine))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("format", "kv_dtype"), checkered(CODED, ["auto", "fp8_e4m3"]))
def test_a_prompt_after_a_swap_is_that_of_a_fresh_engine(format, kv_dtype, folders, prompt_of):
    """Neither codes nor scales nor cached KV of the old weights are left."""
    prompt = [token % 71 for token in prompt_of(37)]
    engine = {"max_rows": 5, "weight_dtype": format, "kv_dtype": kv_dtype}
    model, mailbox = load(folders[0], format), Mailbox()
    bench, fresh = Bench(model, receiver=mailbox, **engine), Bench(load(folders[1], format), **engine)

    def ask(where, name):
        where.complete(name, prompt, 12, sampling={"temperature": 1.0, "seed": 5})
        return where.tokens(name), where.completions[name, 0].raw_logprobs

    before = ask(bench, "before")
    assert ask(bench, "cached")[0] == before[0]
    mailbox.ready = Arriving(1, load(folders[1]), model)
    bench.tick_until(lambda: mailbox.done)
    after = ask(bench, "after")
    assert after == ask(fresh, "fresh") != before
    assert set(bench.completions["after", 0].versions) == {1}
    bench.close(), fresh.close()


@pytest.mark.parametrize("format", CODED)
def test_codes_of_experts_and_of_kv_are_right_after_a_sleep_of_either_level(format, folders, prompt_of):
    """Given-back memory is NaN. After level 1 the tokens are as before, after level 2 those of the new weights."""
    engine = {"max_rows": 5, "weight_dtype": format, "kv_dtype": "fp8_e4m3"}
    prompts = [[token % 71 for token in prompt_of(5 + 9 * i, i)] for i in range(4)]
    model, mailbox = load(folders[0], format), Mailbox()
    bench, fresh = Sleeping(model, receiver=mailbox, **engine), Bench(load(folders[1], format), **engine)

    def ask(where, name):
        for i, prompt in enumerate(prompts):
            where.submit(f"{name}{i}", prompt, 20, sampling={"temperature": 1.0, "seed": i})
        where.run()
        return [(where.tokens(f"{name}{i}"), where.completions[f"{name}{i}", 0].raw_logprobs) for i in range(4)]

    before = ask(bench, "before")
    assert isinstance(bench.sleep(1), Done) and isinstance(bench.wake(), Done)
    assert ask(bench, "light") == before
    assert isinstance(bench.sleep(2), Done) and isinstance(bench.wake(), Done)
    mailbox.ready = Arriving(1, load(folders[1]), model)
    bench.tick_until(lambda: mailbox.done)
    assert ask(bench, "deep") == ask(fresh, "fresh") != before
    bench.close(), fresh.close()


@pytest.mark.parametrize("format", CODED)
def test_memory_counts_codes_and_scales(format, folders):
    model = load(folders[0], format, dtype="bfloat16")
    held = {parameter.data_ptr(): parameter.untyped_storage().nbytes() for parameter in model.parameters()}
    assert weight_bytes(model) == sum(held.values()) < 0.75 * weight_bytes(load(folders[0], dtype="bfloat16"))


def test_without_the_setting_weights_are_as_in_the_checkpoint():
    assert EngineSettings().weight_format == "auto"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize("format", CODED)
def test_on_a_gpu_captured_steps_read_the_codes_and_see_new_ones(format, tmp_path, prompt_of):
    """Against float32 with the decoded weights, as close as bf16 experts are to theirs; then a swap, seen by graphs."""
    from rollout.engine.device.streams import make_device

    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
    for seed, name in enumerate(("old", "new")):
        make_checkpoint("mixtral", tmp_path / name, seed, **sizes).bfloat16().save_pretrained(tmp_path / name)

    def completed(model, device, **engine):
        return Bench(model, make_device(device), max_rows=8, page_size=16, prefill_chunk_tokens=300, **engine)

    medians = {}
    for kind in (format, "plain"):
        coded = {"weight_dtype": "auto" if kind == "plain" else kind}
        bench = completed(load(tmp_path / "old", kind, "bfloat16", "cuda"), "cuda", **coded)
        assert bench.engine.executor.captures
        exact = decoded(tmp_path / "old", format) if kind != "plain" else load(tmp_path / "old")
        differences = []
        for i in range(6):
            prompt = [t % 71 for t in prompt_of(5 + 37 * i, i)]
            bench.complete(f"r{i}", prompt, 60, sampling={"temperature": 1.0, "seed": i})
            done = bench.completions[f"r{i}", 0]
            logits = whole(exact, prompt + done.token_ids)[len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            differences.append((torch.tensor(done.raw_logprobs) - expected).abs())
        medians[kind] = torch.cat(differences).median()
        bench.close()
    assert medians[format] < 1.5 * medians["plain"] + 1e-2, medians
    model, mailbox = load(tmp_path / "old", format, "bfloat16", "cuda"), Mailbox()
    settings = {"weight_dtype": format, "kv_on_swap": "recompute"}
    bench = Bench(model, make_device("cuda"), receiver=mailbox, page_size=16, **settings)
    bench.submit("a", [1, 2, 3], 40)
    bench.ticks(10)
    mailbox.ready = Arriving(1, load(tmp_path / "new", dtype="bfloat16"), model)
    bench.run()
    fresh = load(tmp_path / "new", format, "bfloat16", "cuda")
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    k = bench.completions["a", 0].versions.index(1)
    after = Bench(fresh, make_device("cuda"), page_size=16, **settings)
    after.complete("b", [1, 2, 3] + bench.tokens("a")[:k], 40 - k)
    assert after.tokens("b")[:3] == bench.tokens("a")[k : k + 3]
    bench.close(), after.close()


def whole(model, ids):
    """Logits of all positions, by the model itself on a CPU."""
    from rollout.models import AttentionBatch, KVCache, PromptChunk

    count = len(ids)
    kv = KVCache.allocate(model.spec, 2, count, torch.float32, "cpu")
    at = torch.arange(count)
    batch = AttentionBatch(
        at, at + count, torch.ones(1, 1).int(), torch.tensor([count]).int(), count, (PromptChunk(0, count, count),)
    )
    return model.compute_logits(model(torch.tensor(ids), batch, kv))
