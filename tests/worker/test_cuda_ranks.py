"""A model on two GPUs against the same one on one GPU, and against itself; swaps; ranks that are lost."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.bench.shapes import write_checkpoint
from tests.support.engine.cuda_harness import FUSED_SIZES
from tests.support.models.every_family import make_mimo
from tests.support.models.families import make_checkpoint
from tests.support.models.mtp_layers import make_predicting
from tests.support.models.variants import make_variant
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import check, launch, tensors, until
from tests.support.worker.lost_ranks import Points
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
VOCAB = 1031
START_S = 240.0
KNOWN_S = 12.0
LONG: dict[str, Any] = {"max_tokens": 30_000, "stream_every": 8, "stream": "tokens"}


def requests_of(count: int, **sampling: Any) -> list[dict[str, Any]]:
    draws = np.random.default_rng(1)
    return [
        {
            "prompt": draws.integers(3, VOCAB - 1, 5 + 23 * i).tolist(),
            "max_tokens": 64,
            "seed": i,
            "stop": {"ignore_eos": True},
            **sampling,
        }
        for i in range(count)
    ]


#: Every rule that changes what is drawn, and what is told of likeliest tokens.
RULES: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 20, "logprobs": 5},
    {"min_p": 0.05, "temperature": 0.7},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "prompt_logprobs": True},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logit_bias": {7: 4.0, VOCAB - 2: 4.0}, "top_p": 0.95, "logprobs": 2},
    {"stop": {"ignore_eos": True, "token_ids": list(range(3, VOCAB, 20)), "min_tokens": 20}},
    {"constraint": {"token_ids": list(range(3, VOCAB, 5))}, "top_p": 0.9, "stop": {"token_ids": [9]}},
]


def ruled_requests() -> list[dict[str, Any]]:
    plain = requests_of(len(RULES), temperature=1.0)
    return [request | rules for request, rules in zip(plain, RULES, strict=True)]


def completions_of(worker: WorkerProcess, requests: list[dict[str, Any]], at_once: bool = True) -> list[Completion]:
    with RolloutClient(worker.endpoint, timeout_s=120) as client:
        if at_once:
            return [result.completions[0] for result in client.generate_many(requests)]
        return [client.generate(**request).completions[0] for request in requests]


def make_folder(folder: Path) -> Path:
    make_checkpoint("qwen3", folder, seed=3, **FUSED_SIZES | {"vocab_size": VOCAB})
    return make_tokenizer_folder(folder)


def test_two_gpus_draw_the_tokens_of_one_in_float32(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    flags: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_rows": 8, "max_context_tokens": 1024}
    found = []
    greedy, drawn, ruled = requests_of(6, temperature=0.0), requests_of(6, temperature=1.0), ruled_requests()
    for ranks in (1, 2):
        more = {"tensor_parallel": ranks, "check_ranks": ranks > 1, "ready_timeout_s": START_S}
        with launch(folder, log=tmp_path / f"log-{ranks}", **flags, **more) as worker:
            found.append([each for requests in (greedy, drawn, ruled) for each in completions_of(worker, requests)])
    for one, two in zip(*found, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert np.allclose(one.logprobs, two.logprobs, rtol=0, atol=1e-3)
        assert (one.top_logprobs is None) == (two.top_logprobs is None)
        if one.top_logprobs is not None:
            assert np.allclose(one.top_logprobs, two.top_logprobs, rtol=0, atol=1e-3)
    ones, twos = (completions[-len(ruled) :] for completions in found)
    assert any(one.top_logprobs is not None for one in ones) and all(len(two) > 10 for two in twos)


@pytest.mark.parametrize("split", ["rows", "context"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_split_over_two_gpus_is_computed_as_on_one(tmp_path: Path, dtype: str, split: str) -> None:
    """By torch, and by the kernels in captured steps, with rows of a group that share pages."""
    sizes = FUSED_SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    make_checkpoint("qwen3_moe", tmp_path / "model", seed=3, **sizes | {"vocab_size": VOCAB})
    folder = make_tokenizer_folder(tmp_path / "model")
    flags: dict[str, Any] = {"dtype": dtype, "device": "cuda", "max_rows": 16, "max_context_tokens": 1024}
    requests = [request | {"n": 1 + i % 3} for i, request in enumerate(requests_of(6, temperature=0.0))]
    found: list[list[Completion]] = []
    for ranks in (1, 2):
        more = {"tensor_parallel": ranks, "check_ranks": ranks > 1, "attention_split": split if ranks > 1 else "heads"}
        with (
            launch(folder, log=tmp_path / f"log-{ranks}", ready_timeout_s=START_S, **flags, **more) as worker,
            RolloutClient(worker.endpoint, timeout_s=120) as client,
        ):
            found.append([each for result in client.generate_many(requests) for each in result.completions])
    apart: list[float] = []
    for one, two in zip(*found, strict=True):
        same = one.token_ids == two.token_ids
        assert dtype == "bfloat16" or same.all()
        common = len(same) if same.all() else int(same.argmin())
        apart += np.abs(one.raw_logprobs[:common] - two.raw_logprobs[:common]).tolist()
    # In bfloat16 a token near a tie takes other experts: the median, not the largest difference.
    assert len(apart) >= len(found[0])
    assert (np.median(apart) < 0.05) if dtype == "bfloat16" else max(apart) < 1e-3


@pytest.mark.parametrize("name", ["MiMo", "Glm4Moe"])
def test_drafts_of_a_layer_of_the_checkpoint_change_no_bit(tmp_path: Path, name: str) -> None:
    """Captured drafts with collective operations in them, and eager ones."""
    make = make_mimo if name == "MiMo" else partial(make_variant, "Glm4Moe", moe_intermediate_size=128)
    make_predicting(name, tmp_path, seed=3, make=partial(make, vocab_size=VOCAB, **FUSED_SIZES))
    folder, found = make_tokenizer_folder(tmp_path), []
    flags: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "check_ranks": True, "max_rows": 8}
    requests = requests_of(6, temperature=1.0) + requests_of(3, temperature=0.8, top_k=20, presence_penalty=0.3)
    for speculation in ("off", "heads"):
        metrics = tmp_path / f"{speculation}.jsonl"
        more = {"tensor_parallel": 2, "device": "cuda", "max_context_tokens": 1024, "ready_timeout_s": START_S}
        more |= {"speculation": speculation, "jsonl": metrics, "interval_s": 0.2}
        with launch(folder, log=tmp_path / f"log-{speculation}", **flags, **more) as worker:
            found.append(completions_of(worker, requests))
        drafted = json.loads(metrics.read_text().splitlines()[-1])["speculation/drafted"]
        assert (drafted > 200) == (speculation == "heads")
    for off, heads in zip(*found, strict=True):
        assert off.token_ids.tolist() == heads.token_ids.tolist()
        assert off.logprobs.tolist() == heads.logprobs.tolist()


def test_the_bits_of_a_row_are_the_same_twice_and_whatever_else_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    flags: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "check_ranks": True, "max_rows": 8}
    requests = [*requests_of(6, temperature=1.0), *ruled_requests()]
    found = []
    for run in range(2):
        more = {"tensor_parallel": 2, "device": "cuda", "max_context_tokens": 1024, "ready_timeout_s": START_S}
        with launch(folder, log=tmp_path / f"log-{run}", **flags, **more) as worker:
            found += [completions_of(worker, requests), completions_of(worker, requests, at_once=False)]
    for first, *others in zip(*found, strict=True):
        for other in others:
            assert first.token_ids.tolist() == other.token_ids.tolist()
            assert first.logprobs.tobytes() == other.logprobs.tobytes()
            assert first.top_logprobs is None or first.top_logprobs.tobytes() == other.top_logprobs.tobytes()


def test_a_group_whose_prompt_is_read_once_has_the_log_probs_of_rows_alone(tmp_path: Path) -> None:
    """Sums in another order: close (0.034 on an H200) and not the same bits, so rows did read their prompt together."""
    folder, found = write_checkpoint("qwen3-8b", tmp_path / "model", 2), []
    flags: dict[str, Any] = {"tensor_parallel": 2, "device": "cuda", "check_ranks": True, "max_rows": 40}
    flags |= {"load_format": "random", "max_context_tokens": 6144, "kv_memory_max_gib": 1, "ready_timeout_s": START_S}
    asked: dict[str, Any] = {"max_tokens": 48, "n": 40, "temperature": 100.0, "seed": 5, "stop": {"ignore_eos": True}}
    prompt = np.random.default_rng(2).integers(3, 150_000, 6000).tolist()
    for together in (True, False):
        with (
            launch(folder, log=tmp_path / f"log-{together}", group_attention=together, **flags) as worker,
            RolloutClient(worker.endpoint, timeout_s=120) as client,
        ):
            found.append(client.generate(prompt, **asked).completions)
    differences = []
    for one, two in zip(*found, strict=True):
        same = int(np.cumprod(one.token_ids == two.token_ids).sum())
        differences.append(np.abs(one.raw_logprobs[:same] - two.raw_logprobs[:same]))
    errors = np.concatenate(differences)
    assert len(errors) > 40 * 24, "at this temperature rounding hardly ever changes a token"
    assert 0 < errors.mean() < 0.1, errors.mean()


@pytest.fixture
def counting(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A group that counts, with these settings, too."""
    flags: dict[str, Any] = {"tensor_parallel": 2, "device": "cuda", "max_rows": 8, "max_context_tokens": 32_768}
    flags |= getattr(request, "param", {})
    with launch(log=tmp_path / "log", ready_timeout_s=START_S, **flags) as worker:
        yield worker


def test_a_hundred_swaps_between_the_steps_of_running_completions(counting: WorkerProcess) -> None:
    with (
        RolloutClient(counting.endpoint, timeout_s=120) as client,
        WeightPublisher(counting.endpoint, transport="shm") as publisher,
    ):
        streams = [client.generate(prompt, **LONG) for prompt in ("17:", "2024:")]
        for stream in streams:
            next(stream)
        for version in range(1, 101):
            publisher.publish(tensors(1 + version % 2), version).applied(60)
        for stream, prompt in zip(streams, ("17:", "2024:"), strict=True):
            stream.cancel()
            (completion,) = stream.wait().completions
            assert len(completion.versions) > 5
            check(prompt, completion, {version: 1 + version % 2 for version in range(101)})
        (last,) = client.generate("17:", max_tokens=60).completions
        assert last.versions == [(100, 60)]
        check("17:", last, {100: 1})


def used_by(pid: int) -> int:
    """Bytes of the first GPU that a process has; all that is taken, if the driver knows no such process."""
    command = ["nvidia-smi", "-i", "0", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        told = ""
    for line in told.splitlines():
        process, _, used_mib = line.partition(",")
        if process.strip() == str(pid) and used_mib.strip().isdigit():
            return int(used_mib) << 20
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    return all_bytes - free_bytes


def test_a_sleep_gives_back_what_an_update_took_on_the_first_gpu(tmp_path: Path) -> None:
    """A relay has 256 MiB there, or 512 with larger buckets. The first update also makes contexts, which stay."""
    wide = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 8}
    make_checkpoint("qwen3", tmp_path / "model", seed=3, **FUSED_SIZES | wide | {"head_dim": 128, "vocab_size": VOCAB})
    folder = make_tokenizer_folder(tmp_path / "model")
    flags: dict[str, Any] = {"tensor_parallel": 2, "device": "cuda", "max_rows": 4, "max_context_tokens": 1024}
    weights = {name: tensor.cuda() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert sum(tensor.nbytes for tensor in weights.values()) > 400 << 20

    def asleep() -> int:
        """Bytes of the first GPU that rank 0 has in a sleep, or all processes if the driver does not tell."""
        torch.cuda.empty_cache()  # what this process took to send
        client.sleep()
        used_bytes = used_by(worker.pid)
        client.wake()
        return used_bytes

    more = {"sleep": True, "kv_memory_max_gib": 0.5, "rank_stall_s": 4, "ready_timeout_s": START_S}
    with (
        launch(folder, log=tmp_path / "log", **flags, **more) as worker,
        RolloutClient(worker.endpoint, timeout_s=120) as client,
    ):
        (before,) = client.generate([5, 6, 7], max_tokens=16, temperature=0.0).completions
        used_bytes = []
        for version, bucket_mib in enumerate((64, 256, 256, 64), 1):
            with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=bucket_mib << 20) as publisher:
                publisher.publish(weights, version).applied(60)
            used_bytes.append(asleep())
        assert max(used_bytes) - used_bytes[0] < 64 << 20, [used >> 20 for used in used_bytes]
        (after,) = client.generate([5, 6, 7], max_tokens=16, temperature=0.0).completions
        assert after.token_ids.tolist() == before.token_ids.tolist()


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "hung")])
def test_a_lost_rank_gives_all_tokens_back_in_time(counting: WorkerProcess, number: signal.Signals, said: str) -> None:
    with RolloutClient(counting.endpoint, timeout_s=60) as client:
        streams = [client.generate(prompt, **LONG) for prompt in ("17:", "2024:")]
        for stream in streams:
            for _ in range(4):
                next(stream)
        os.kill(client.status()["ranks"][1]["pid"], number)
        lost_s = time.monotonic()
        for stream, prompt in zip(streams, ("17:", "2024:"), strict=True):
            (completion,) = stream.wait().completions
            assert completion.finish_reason == "error" and said in (completion.error or "")
            assert len(completion) >= 16
            check(prompt, completion, {0: 1})
        assert time.monotonic() - lost_s < KNOWN_S
    assert until(lambda: counting.returncode is not None, "the end") and counting.returncode == 3


def test_a_rank_that_hangs_in_an_update_is_found_while_steps_go_on(
    start_ranks: Callable[..., WorkerProcess], points: Points
) -> None:
    worker = start_ranks(device="cuda", ready_timeout_s=START_S, env=points.environment)
    with (
        RolloutClient(worker.endpoint, timeout_s=60) as client,
        WeightPublisher(worker.endpoint, transport="shm") as publisher,
    ):
        stream = client.generate("17:", **LONG)
        next(stream)
        points.order("piece")
        update = publisher.publish(tensors(2), 1)
        points.reached("piece")
        hung_s = time.monotonic()
        (completion,) = stream.wait().completions
        assert time.monotonic() - hung_s < KNOWN_S
        assert completion.finish_reason == "error" and "in its lane updates" in (completion.error or "")
        check("17:", completion, {0: 1})
        with pytest.raises(RolloutError):
            update.applied(60)
    assert until(lambda: worker.returncode is not None, "the end") and worker.returncode == 3


@pytest.mark.parametrize("counting", [{"rank_stall_s": "none"}], indirect=True)  # or the follower would kill rank 0
def test_no_wrong_token_is_committed_after_rank_0_was_stopped(counting: WorkerProcess) -> None:
    """The other GPU waits in a kernel, in vain if the stop came before the launch; the group may or may not go on."""
    with RolloutClient(counting.endpoint, timeout_s=120) as client:
        stream = client.generate("17:", **LONG)
        for _ in range(4):
            next(stream)
        os.kill(counting.pid, signal.SIGSTOP)
        time.sleep(20)
        os.kill(counting.pid, signal.SIGCONT)
        time.sleep(2)
        try:
            stream.cancel()
        except RolloutError:
            pass  # it is over
        (completion,) = stream.wait().completions
        assert completion.finish_reason in ("cancelled", "error")
        check("17:", completion, {0: 1})
