"""States of linear attention on a GPU: captured steps, snapshots, copies to the host, sleeps: transformers' tokens.

The same weights in float32, unless a test says bf16. What is compared with is on the CPU: transformers' code there adds
in float32, whatever the card does with tf32.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.inspect import Inspector
from rollout.models.fused import FusedDecoder
from tests.support.engine.conversation import Conversation
from tests.support.engine.cuda_harness import (
    assert_one_launch_a_step,
    assert_steady,
    load_bf16,
    no_allocation,
    no_waiting,
)
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench, Completion, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.replay import replayed
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox, Update, boundary, swap_in_the_middle
from tests.support.models.hybrids import make_hybrid

pytestmark = pytest.mark.gpu
VOCAB, MIB = 83, 1 << 20
prompt_of = functools.partial(any_prompt, vocab=VOCAB)
#: Sizes that the fused kernels take.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
}


def bench_of(model: Any, kind: type[Bench] = Bench, **engine: Any) -> Any:
    return kind(model, make_device("cuda"), **engine)


def agrees(hf_model: Any, prompt: list[int], completion: Completion) -> None:
    """Tokens are transformers' greedy choice, and log-probs within 2e-4 of its logits'."""
    tokens = completion.token_ids
    with torch.inference_mode():
        logits = hf_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.raw_logprobs), logprobs, atol=2e-4, rtol=0)
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stem", ["Qwen3_5", "OlmoHybrid"])
def test_snapshots_and_states_on_the_host_give_transformers_tokens(hybrid, stem, depth):
    """A group, an equal and a longer prompt, turns, and rows that pages are short for."""
    folder, hf_model = hybrid(stem)
    model = load(folder, "cuda")
    host_gib = 16 * model.spec.state_bytes(torch.float32) / 2**30
    bench = bench_of(model, kv_pages=44, max_rows=8, pipeline_depth=depth, host_kv_gib=host_gib)
    assert bench.engine.executor.captures
    pinned = bench.engine.executor.state_mover.host_memory
    assert all(pinned.page(number, torch.uint8).is_pinned() for number in range(pinned.pages))
    prompts = {f"r{i}": prompt_of(10, i) for i in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 60)
    bench.run()
    status = bench.status().offload
    assert status.restored > 0 and status.bytes_in > 0
    for name, prompt in prompts.items():
        agrees(hf_model, prompt, bench.completions[name, 0])
        assert bench.completions[name, 0].recomputed == ()
    base = prompt_of(41, 9)
    for name, prompt, n in (("group", base, 4), ("equal", base, 1), ("longer", base + prompt_of(7, 8), 1)):
        bench.complete(name, prompt, 12, n=n)
        for index in range(n):
            agrees(hf_model, prompt, bench.completions[name, index])
    talk = Conversation(bench, "s", prompt_of)
    for new in (21, 6, 1):
        tokens = talk.say(new)
        agrees(hf_model, talk.said[: -len(tokens)], bench.completions[talk.turn, 0])
    Inspector(bench.engine).set_gauges()
    assert bench.engine.meter.report()["state/snapshot_loads"] >= 3 + 2 + 2
    assert bench.status().prefix_hits["turn_end"] == 2


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_swap_is_seen_by_captured_steps(hybrid, mode):
    folders, hf_models = zip(*(hybrid(seed=seed) for seed in (0, 1)), strict=True)
    model, mailbox = load(folders[0], "cuda"), Mailbox()
    bench = bench_of(model, receiver=mailbox, kv_on_swap=mode, prefill_chunk_tokens=16)
    bench.submit("g", prompt_of(30), 40, n=3)
    bench.submit("r", prompt_of(45, 1), 40)
    swap_in_the_middle(bench, mailbox, Update(1, load(folders[1], "cuda"), model), ticks=25)
    assert 5 < boundary(bench, "g") < 40
    for name, index, prompt in (("g", 0, prompt_of(30)), ("g", 2, prompt_of(30)), ("r", 0, prompt_of(45, 1))):
        completion = bench.completions[name, index]
        assert replayed(hf_models, prompt, completion) == completion.token_ids
    bench.complete("after", prompt_of(30), 9)  # no snapshot of the old weights serves it
    agrees(hf_models[1], prompt_of(30), bench.completions["after", 0])


@pytest.mark.parametrize("on_host", [True, False])
def test_rows_go_on_after_a_sleep_in_which_others_wrote_to_the_memory(hybrid, on_host):
    folder, hf_model = hybrid()
    model = load(folder, "cuda")
    host_gib = 16 * model.spec.state_bytes(torch.float32) / 2**30 if on_host else 0.0
    bench = bench_of(model, Sleeping, host_kv_gib=host_gib)
    graphs, states = bench.engine.executor.graphs, bench.engine.executor.step.kv.states.tensors
    places = [tensor.data_ptr() for tensor in states]
    bench.submit("g", prompt_of(30), 60, n=3)
    bench.submit("r", prompt_of(13, 1), 60)
    for _ in range(2):
        bench.ticks(15)
        assert bench.sleep().facts["parked"] == (4 if on_host else 0)
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(255)  # another tensor takes the memory
        bench.wake()
        assert bench.engine.executor.graphs is graphs and bench.engine.executor.captures
        assert [tensor.data_ptr() for tensor in states] == places
    bench.run()
    for name, index, prompt in (("g", 0, prompt_of(30)), ("g", 2, prompt_of(30)), ("r", 0, prompt_of(13, 1))):
        agrees(hf_model, prompt, bench.completions[name, index])
        assert bool(bench.completions[name, index].recomputed) != on_host


def test_copies_of_states_are_bit_for_bit_and_allocate_and_synchronise_nothing(hybrid):
    model = load(hybrid()[0], "cuda")
    host_gib = 8 * model.spec.state_bytes(torch.float32) / 2**30
    bench = bench_of(model, host_kv_gib=host_gib)
    mover, states = bench.engine.executor.state_mover, bench.engine.executor.step.kv.states.tensors
    for state in states:
        state.copy_(torch.randint(1, 100, state.shape, device="cuda").to(state.dtype))
    torch.cuda.synchronize()
    before = [state[[2, 5]].clone() for state in states]

    def round_trip() -> None:
        """Rows 2 and 5 to the host, and from there to rows 7 and 1; a place is a piece."""
        for row, host, to in ((2, 1, 7), (5, 0, 1)):
            mover.out.start([row], [host], None)
            mover.back.stream.wait(mover.out.under_way[0].end)
            mover.back.start([to], [host], None)
            for queue in (mover.out, mover.back):
                queue.under_way[0].end.synchronize()
                assert not queue.finished()[0].failure

    round_trip()  # kernels are loaded at their first use
    with no_allocation(), no_waiting():
        round_trip()
    assert all(torch.equal(state[[7, 1]], was) for state, was in zip(states, before, strict=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint that the fused kernels take, with weights in bf16, and transformers' model of it in float32."""
    folder = tmp_path_factory.mktemp("wide")
    hf_model = make_hybrid("Qwen3_5", folder, 3, **WIDE)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.bfloat16())
    hf_model.save_pretrained(folder)
    return folder, hf_model


def test_a_group_in_bf16_is_no_further_from_float32_than_transformers(wide):
    """Its members load a snapshot, and attention reads their pages together."""
    folder, reference = wide
    prompts = {"a": (prompt_of(700, 1), 6), "b": (prompt_of(333, 2), 3), "c": (prompt_of(90, 3), 1)}
    theirs = load_hf_bf16(folder)
    bench = bench_of(
        load_bf16(folder), max_rows=16, kv_pages=800, page_size=16, prefill_chunk_tokens=300, shared_saved_bytes=1
    )
    step = bench.engine.executor.step
    assert isinstance(step.forward, FusedDecoder) and step.shares_pages and bench.engine.executor.captures
    for i, (name, (ids, n)) in enumerate(prompts.items()):
        bench.submit(name, ids, 60 + 9 * i, n=n, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    ours_off, theirs_off = [], []
    for name, (ids, n) in prompts.items():
        for index in range(n):
            done = bench.completions[name, index]
            text = torch.tensor([ids + done.token_ids])
            chosen = torch.tensor(done.token_ids)[:, None]
            with torch.inference_mode():
                exact, rough = (
                    model(text.to(model.device)).logits[0, len(ids) - 1 : -1].float().cpu().log_softmax(-1)
                    for model in (reference, theirs)
                )
            ours_off.append((torch.tensor(done.logprobs) - exact.gather(1, chosen)[:, 0]).abs())
            theirs_off.append((rough - exact).gather(1, chosen)[:, 0].abs())
    ours, others = torch.cat(ours_off), torch.cat(theirs_off)
    assert ours.mean() < 1.1 * others.mean() + 1e-4, (ours.mean(), others.mean())


def load_hf_bf16(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()


def test_a_steady_step_is_one_launch_that_waits_for_nothing(wide, monkeypatch):
    bench = bench_of(load_bf16(wide[0]), max_rows=6, kv_pages=800, page_size=16)
    bench.submit("g", prompt_of(40), 300, n=4, sampling={"temperature": 1.0, "seed": 1})
    assert_one_launch_a_step(bench)
    assert_steady(bench, monkeypatch)


@pytest.mark.parametrize("deterministic", [True, False])
def test_drafts_change_no_completion(wide, deterministic):
    """Captured steps with drafts, which states go through; with `deterministic` all bits are equal."""
    model = load_bf16(wide[0])
    fields = {"max_rows": 8, "kv_pages": 800, "page_size": 16, "deterministic": deterministic}
    # At this temperature the draws depend on their random numbers nearly alone, so rounding turns no token.
    sampling = {"temperature": 1.0 if deterministic else 100.0, "seed": 5}
    without = bench_of(model, **fields)
    _submit_drafted(without, sampling)
    without.close()
    answers = {key: done.token_ids for key, done in without.completions.items()}
    for wrong in (0.0, 0.4, 1.0):
        bench, _ = drafting(model, answers, wrong, device=make_device("cuda"), speculation_tokens=4, **fields)
        assert bench.engine.executor.captures
        _submit_drafted(bench, sampling)
        assert bench.drafts.drafted > 100
        assert (bench.drafts.accepted > 50) == (wrong < 1.0)
        for key, done in without.completions.items():
            assert bench.completions[key].token_ids == done.token_ids, (key, wrong)
            if deterministic:
                assert bench.completions[key].logprobs == done.logprobs, (key, wrong)
        bench.close()


def _submit_drafted(bench: Bench, sampling: dict[str, Any]) -> None:
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(30 + 5 * i, i), 70, sampling=sampling, n=1 + i % 2)
    bench.complete("penalties", prompt_of(9, 7), 70, sampling={**sampling, "presence_penalty": 0.5})


def test_drafts_in_float32_give_transformers_tokens(hybrid):
    folder, hf_model = hybrid("Qwen3Next")
    model = load(folder, "cuda")
    plain = bench_of(model, max_rows=4)
    for i in range(3):
        plain.submit(f"r{i}", prompt_of(20 + i, i), 50)
    plain.finish()
    answers = {key: done.token_ids for key, done in plain.completions.items()}
    bench, _ = drafting(model, answers, 0.3, device=make_device("cuda"), max_rows=4, ragged=True)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(20 + i, i), 50)
    bench.finish()
    assert bench.drafts.accepted > 20
    for i in range(3):
        agrees(hf_model, prompt_of(20 + i, i), bench.completions[f"r{i}", 0])
