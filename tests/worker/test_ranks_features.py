"""With several ranks as with one: adapters, KV and states on the host, sessions, images, sleep."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.images import make_model, picture, prompt_with
from tests.support.models.latent import make_latent
from tests.support.patience import PATIENCE_S
from tests.support.peft_adapters import make_adapter
from tests.support.worker.harness import assert_idle, check, launch, paused_amid, until
from tests.support.worker.rank_pair import Pair, start_pair
from trainer_bridge import MediaItem, MediaPrompt
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import BadRequest, RolloutError, Unavailable, WeightsRejected

VOCAB = 83
GREEDY: dict[str, Any] = {"temperature": 0.0, "stop": {"ignore_eos": True}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "stop": {"ignore_eos": True}}
FLAGS: dict[str, Any] = {
    **{"dtype": "float32", "max_rows": 6, "page_size": 4, "kv_pages": 70, "prefill_chunk_tokens": 16},
    **{"max_context_tokens": 200, "adapter_slots": 2, "adapter_rank": 8, "max_adapters": 4},
    **{"sleep": True, "host_kv_gib": 0.01},
}
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
HYBRID = (*LINEAR, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "Qwen3.5": HYBRID,  # with images
    "Qwen3_5": HYBRID,
    "fused": HYBRID[len(LINEAR) :],
    "Glm4MoeLite": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
CASES = [("Qwen3.5", 2, "cpu"), pytest.param(("Glm4MoeLite", 2, "cpu"), marks=pytest.mark.nightly)]
CASES += [pytest.param((name, 4, "cpu"), marks=pytest.mark.nightly) for name in ("Qwen3_5", "Glm4MoeLite")]
CASES += [
    pytest.param(("Glm4MoeLite", size, f"cpu {split}"), marks=pytest.mark.nightly)
    for size in (2, 4)
    for split in ("rows", "context")
]
CASES += [pytest.param(("Qwen3_5", 2, "cpu context"), marks=pytest.mark.nightly)]
CASES += [pytest.param((name, 2, "cuda"), marks=pytest.mark.gpu) for name in ("fused", "Qwen3.5", "Glm4MoeLite")]
FUSED: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "max_position_embeddings": 1024, "vocab_size": 4001},
}
IMAGES: dict[str, Any] = {"images": True}


def make(name: str, folder: Path, seed: int) -> Any:
    if name == "fused":  # by the kernels
        model = make_checkpoint("qwen3", folder, seed, **FUSED)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.25)  # in bfloat16 the log-probs of large logits differ by 0.2 and more
        model.save_pretrained(folder)
        return model
    if name == "Qwen3.5":
        return make_model(name, folder, seed)
    if name == "Qwen3_5":
        return make_hybrid(name, folder, seed, linear_num_key_heads=4, linear_num_value_heads=8)
    return make_latent(name, folder, seed, moe_intermediate_size=20)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    (name, size, device), folder = request.param, tmp_path_factory.mktemp("models")
    device, _, split = device.partition(" ")
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"this needs {size} GPUs")
    reference = make(name, folder / "base", 0)
    for i in range(4):
        options = {"exclude_modules": ".*visual.*"} if name == "Qwen3.5" else {}
        alpha = 1 if name == "fused" else 3  # adapters that multiply values multiply the rounding of bfloat16 too
        make_adapter(reference, folder / "adapters" / f"f{i}", i, TARGETS[name], lora_alpha=alpha, **options)
    (folder / "adapters" / "broken").mkdir()
    flags = FLAGS | {
        "device": device,
        "adapter_root": str(folder / "adapters"),
        "adapters": f"first={folder / 'adapters' / 'f0'}",
    }
    flags |= IMAGES if name == "Qwen3.5" else {"dtype": "bfloat16"} if name == "fused" else {}
    logs = tmp_path_factory.mktemp("logs")
    several: dict[str, Any] = {"tensor_parallel": size, "check_ranks": True}
    if split:
        several |= {"attention_split": split} | ({"host_kv_gib": 0.0} if split == "rows" else {})
    # Norms of small values in linear attention multiply the rounding of sums, which differs with the batch.
    arithmetic = {"exact": device == "cpu", "tolerance": 1e-3 if device == "cpu" else 0.25 if name == "fused" else 0.05}
    with start_pair(folder / "base", VOCAB, logs, flags, several, **arithmetic) as workers:
        yield workers
        with RolloutClient(workers.several.endpoint, timeout_s=60) as client:
            client.sleep()  # which empties the caches: snapshots keep pages
            client.wake()
        assert_idle(workers.several)


def requests_of(pair: Pair, count: int, adapters: list[str | None], tokens: int = 20) -> list[dict[str, Any]]:
    requests = []
    for i in range(count):
        request = {"prompt": pair.prompt(9 + 3 * i, i), "max_tokens": tokens, "seed": i, "n": 1 + i % 2}
        requests.append(request | {"adapter": adapters[i % len(adapters)]} | (GREEDY if i % 3 else SAMPLED))
    return requests


def test_many_clients_load_use_and_unload_adapters(pair: Pair) -> None:
    """More loads than there are places for adapters in the memory that the ranks share."""
    pair.each(lambda client: [client.unload_adapter(adapter["name"]) for adapter in client.status()["adapters"]])

    def rounds(number: int) -> list[int]:
        with RolloutClient(pair.several.endpoint, timeout_s=PATIENCE_S) as client:
            lengths = []
            for i in range(5):
                client.load_adapter(f"of {number}", f"f{i % 3}")
                request = {"prompt": [5, 6, 7 + number], "max_tokens": 3, "adapter": f"of {number}", **SAMPLED}
                (completion,) = client.generate(**request).completions
                client.unload_adapter(f"of {number}")
                lengths.append(len(completion))
            return lengths

    with ThreadPoolExecutor(4) as clients:  # as many as adapters may be loaded
        assert list(clients.map(rounds, range(4))) == [[3] * 5] * 4
    pair.each(lambda client: client.load_adapter("first", "f0"))


def test_adapters_of_folders_share_two_slots(pair: Pair) -> None:
    for name, folder in (("second", "f1"), ("third", "f2")):
        pair.each(lambda client, name=name, folder=folder: client.load_adapter(name, folder))
    results = pair.both(requests_of(pair, 8, [None, "first", "second", "third"]))
    pair.check(results)
    prompt = pair.prompt(12, 99)
    said = pair.both(
        [{"prompt": prompt, "max_tokens": 12, "adapter": name, **GREEDY} for name in (None, "first", "second")]
    )
    pair.check(said)
    assert len({tuple(ours.completions[0].token_ids.tolist()) for _, ours in said}) == 3, "the adapters do nothing"
    for worker in (pair.one, pair.several):
        with RolloutClient(worker.endpoint, timeout_s=60) as client, pytest.raises(BadRequest, match="adapter_config"):
            client.load_adapter("bad", "broken")


def test_a_newer_version_comes_into_use_amid_a_completion_on_all_ranks(pair: Pair) -> None:
    def amid(client: RolloutClient) -> Any:
        client.load_adapter("grows", "f1")
        request = {"prompt": pair.prompt(10, 4), "max_tokens": 150, "adapter": "grows", **GREEDY}
        stream = paused_amid(client, **request, stream_every=4)
        client.load_adapter("grows", "f3", version=5)
        client.resume()
        stream.wait()
        again = client.generate(**request | {"max_tokens": 16}).completions[0]
        client.unload_adapter("grows")
        return again

    theirs, ours = pair.each(amid)
    pair.check_one(ours, theirs)


@pytest.mark.nightly
def test_adapters_are_replaced_over_the_bridge_more_often_than_there_are_places(pair: Pair, tmp_path: Path) -> None:
    folders = pair.folder.parent / "adapters"
    for version in range(1, 16):
        folder = folders / f"f{version % 4}"
        tensors = load_file(folder / "adapter_model.safetensors")
        config = LoraConfig.from_pretrained(str(folder))
        for worker in (pair.one, pair.several):
            with WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher:
                publisher.publish(tensors, version, adapter="sent", adapter_config=config.to_dict()).applied(60)
        if version % 5 == 0:
            pair.check(pair.both(requests_of(pair, 2, ["sent"], 8)))
    for worker in (pair.one, pair.several):
        with WeightPublisher(worker.endpoint) as publisher, pytest.raises(WeightsRejected):
            wrong = {name: tensor[:-1] for name, tensor in tensors.items()}
            publisher.publish(wrong, 99, adapter="sent", adapter_config=config.to_dict()).applied(60)
    pair.check(pair.both(requests_of(pair, 4, ["sent", "first", None])))
    pair.each(lambda client: client.unload_adapter("sent"))


def _needs_host(pair: Pair) -> None:
    if not pair.each(lambda client: client.status())[1]["offload"]["pages_total"]:
        pytest.skip("rows that are dealt to ranks keep no KV on the host")


@pytest.mark.nightly
def test_preempted_rows_get_their_kv_and_states_back_from_the_host(pair: Pair) -> None:
    _needs_host(pair)
    requests = requests_of(pair, 10, [None, "first"], 60)
    pair.check(pair.both(requests))
    _, status = pair.each(lambda client: client.status())
    assert status["preemptions"] > 0 and status["offload"]["restored"] > 0, "the pool is too large for these"


@pytest.mark.nightly
def test_known_prefixes_come_back_from_the_host(pair: Pair) -> None:
    _needs_host(pair)

    def again(client: RolloutClient) -> list[Any]:
        return [client.generate(pair.prompt(60, i % 6), max_tokens=8, **GREEDY).completions[0] for i in range(18)]

    for theirs, ours in zip(*pair.each(again), strict=True):
        pair.check_one(ours, theirs)
    kept = [status["kept"] for status in pair.each(lambda client: client.status())]
    has_states = "linear_attention" in (pair.folder / "config.json").read_text()
    assert all((each["fetched_tokens"] > 0) != has_states for each in kept)


@pytest.mark.nightly
def test_turns_of_a_session_go_on_with_their_kv(pair: Pair) -> None:
    def talk(client: RolloutClient) -> list[Any]:
        prompt, said = pair.prompt(14, 7), []
        for turn in range(3):
            result = client.generate(prompt, max_tokens=10, session="talk", **GREEDY)
            said.append(result.completions[0])
            prompt = [*prompt, *said[-1].token_ids.tolist(), *pair.prompt(3, turn)]
        client.end_session("talk")
        return said

    for theirs, ours in zip(*pair.each(talk), strict=True):
        if pair.check_one(ours, theirs) < len(ours):  # a near tie: the prompts of the next turns differ
            break


def test_prompts_with_images(pair: Pair) -> None:
    if "media" not in pair.each(lambda client: client.status())[1]["capabilities"]:
        pytest.skip("this model takes no images")
    prompts = [prompt_with(5, picture(4, 10), 4), prompt_with(2, picture(2, 8, 1), 3, picture(8, 10, 2), 6)]
    requests: list[dict[str, Any]] = []
    for i, prompt in enumerate([*prompts, prompts[0]]):
        media = [MediaItem(at, prompt.length(j), each.grid, each.pixels) for j, (at, each) in enumerate(prompt.places)]
        sent = MediaPrompt(np.array(prompt.ids, np.int32), tuple(media))
        requests.append({"prompt": sent, "max_tokens": 16, "n": 1 + i, "seed": i, **(GREEDY if i else SAMPLED)})
    results = pair.both(requests)
    pair.check(results)
    plain = pair.both([requests[0] | {"prompt": [3 if token > 87 else token for token in prompts[0].ids]}])
    one, other = (result[0][1].completions[0].token_ids.tolist() for result in (results, plain))
    assert one != other, "the images are not seen"


def test_completions_go_on_after_a_sleep_of_all_ranks(pair: Pair) -> None:
    _needs_host(pair)
    request = {"prompt": pair.prompt(15, 3), "max_tokens": 120, "n": 2, "adapter": "first", **GREEDY}

    def amid(client: RolloutClient) -> Any:
        while True:
            stream = client.generate(**request, stream="tokens", stream_every=4)
            next(stream)
            (told,) = client.sleep()
            parts, asleep = stream.partials(), client.status()["state"]
            (woken,) = client.wake()
            assert told["level"] == 1 and asleep == "asleep" and woken["bytes"] > 0
            if told["parked"] >= 1:
                return stream.wait()
            # On a busy machine it may be over before the sleep: then all of it came before the answer.
            assert [len(part) for part in parts] == [120, 120]

    theirs, ours = pair.each(amid)
    for a, b in zip(ours.completions, theirs.completions, strict=True):
        pair.check_one(a, b)
        assert not a.recomputed


@pytest.mark.nightly
def test_after_a_sleep_of_level_2_all_ranks_wait_for_weights(pair: Pair, tmp_path: Path) -> None:
    old = load_file(pair.folder / "model.safetensors")
    request = {"prompt": pair.prompt(15, 5), "max_tokens": 16, **GREEDY}
    (before,) = pair.both([request])
    for worker in (pair.one, pair.several):
        with RolloutClient(worker.endpoint, timeout_s=60) as client, WeightPublisher(worker.endpoint) as publisher:
            client.sleep(level=2)
            client.wake()
            with pytest.raises(Unavailable, match="publish"):
                client.generate(**request)
            publisher.publish(old, client.status()["weights_version"] + 1).applied(60)
            until(lambda client=client: client.status()["state"] == "serving", "the weights")
    (after,) = pair.both([request])
    pair.check([after])
    assert after[1].completions[0].token_ids.tolist() == before[1].completions[0].token_ids.tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_lost_in_a_sleep_ends_the_group(tmp_path: Path, number: signal.Signals) -> None:
    flags = {"tensor_parallel": 2, "device": "cpu", "max_rows": 4, "sleep": True, "host_kv_gib": 0.05}
    with launch(log=tmp_path / "log", **flags) as worker, RolloutClient(worker.endpoint, timeout_s=60) as client:
        (follower,) = (rank["pid"] for rank in client.status()["ranks"][1:])
        stream = client.generate("17:", max_tokens=3000, stream="tokens", stream_every=8)
        next(stream)
        client.sleep()
        os.kill(follower, number)
        (completion,) = stream.wait().completions
        assert completion.finish_reason == "error" and "tensor group is lost" in (completion.error or "")
        check("17:", completion, {0: 1})
        until(lambda: worker.returncode is not None, "the end of the worker")


@pytest.mark.nightly
def test_a_follower_that_is_stopped_while_kv_moves_ends_the_group(tmp_path: Path) -> None:
    """Rank 0 waits for its copies, and for nothing else."""
    flags = {"tensor_parallel": 2, "device": "cpu", "max_rows": 4, "sleep": True, "host_kv_gib": 0.05}
    with launch(log=tmp_path / "log", **flags) as worker, RolloutClient(worker.endpoint, timeout_s=60) as client:
        (follower,) = (rank["pid"] for rank in client.status()["ranks"][1:])
        stream = client.generate("17:", max_tokens=3000, stream="tokens", stream_every=8)
        next(stream)
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(RolloutError):
            client.sleep()
        (completion,) = stream.wait().completions
        assert completion.finish_reason == "error" and "hung" in (completion.error or "")
        check("17:", completion, {0: 1})
