"""Sends mutated requests to a gateway: every answer is one, or an error that names what is wrong; nothing is left over.

    python -m scripts.check.fuzz_gateway --requests 100000

A worker with a counting checkpoint and a gateway run in processes of their own. Between the requests a bystander asks
for tokens that are known. The run fails for a status from 500 on (except 501), an error without OpenAI's body, an
answer that does not come within 30 s, a wrong token, requests or rows that stay, or memory that grows.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import rollout.demo
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker

_ONES = Path(rollout.demo.__file__).parent / "checkpoints" / "ones"
_ANSWER_S = 30.0
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
_START_S = 120.0
_THREADS = 4
_ROUNDS = 20  # memory is read after each
_WARM_ROUNDS = 5
_MAX_GROWTH_BYTES = 32 << 20  # of each process, after the warm rounds

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "17:", "max_tokens": 2, "n": 1, "stop": ["5"], "logprobs": 1, "echo": False}),
    ("/v1/completions", {"prompt": [[4, 10, 14], [5]], "max_tokens": 1, "temperature": 1.5, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "17:"}]}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "logit_bias": {"5": 1.5},
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "ones",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "1"}],
            "messages": [
                {"role": "user", "content": "17:"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "1", "signature": ""},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "17:"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "none"},
            "stop_sequences": ["5"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "ones", "messages": [{"role": "user", "content": "17:"}]}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "17:"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "1"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "17:"},
            ],
            "max_output_tokens": 2,
            "instructions": "1",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "none",
            "text": {"format": {"type": "text"}},
            "stream": True,
        },
    ),
    ("/v1/responses", {"input": "17:", "previous_response_id": "x", "max_output_tokens": 2, "store": False}),
    (
        "/inference/v1/generate",
        {
            "token_ids": [4, 10, 14],
            "sampling_params": {"max_tokens": 2, "stop_token_ids": [5], "min_p": 0.1},
            "priority": 1,
        },
    ),
    ("/generate", {"input_ids": [[4, 14]], "sampling_params": [{"max_new_tokens": 1}], "return_logprob": True}),
    (
        "/tokenize",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
    ),
    ("/detokenize", {"tokens": [4, 10, 14]}),
    ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {}}),
    ("/skyrl/v1/generate", {"token_ids": [4, 14], "sampling_params": {"max_tokens": 1}, "cache_salt": "x"}),
    ("/update_weights_from_disk", {"model_path": "nowhere", "weight_version": "1"}),
    ("/areal_set_update_weight_meta", {"names": ["a"], "shapes": [[1]], "dtypes": ["float32"]}),
    ("/reset_prefix_cache", {"reset_running_requests": False}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere"}),
    (
        "/api/v1/asample",
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 10]}, {"tokens": [14]}]},
            "sampling_params": {"max_tokens": 2, "stop": ["5"], "top_k": -1, "seed": 1},
            "base_model": "ones",
            "num_samples": 1,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 2,
            "topk_prompt_logprobs": 1,
            "target_prompt_logprobs": {
                "data": [5, 6],
                "dtype": "int64",
                "shape": [2, 2],
                "sparse_crow_indices": [0, 1, 2],
                "sparse_col_indices": [0, 1],
            },
        },
    ),
    ("/api/v1/asample", {"sampling_session_id": "a:0", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}),
    ("/api/v1/create_session", {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "1"}),
    ("/api/v1/create_sampling_session", {"session_id": "a", "sampling_session_seq_id": 0, "base_model": "ones"}),
    ("/api/v1/retrieve_future", {"request_id": "a:0:0", "allow_metadata_only": True}),
    ("/api/v1/telemetry", {"events": [{"a": 1}]}),
    ("/update_weights", {"weight_dir": "nowhere"}),
    ("/collective_rpc", {"method": "f", "args": [1], "kwargs": {}}),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -1.5, 1e300, "", "17:", "\ud800", "\x00", "a" * 3000),
    *([], [[]], [None], {}, {"": {}}, [[1] * 50] * 50, {"a": 1}, "token_id:1", "../../etc/passwd", "%s%n", "true"),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Valid requests, and the values that replace parts of them."""

    valid: Sequence[tuple[str, dict[str, Any]]] = VALID
    odd: Sequence[Any] = ODD


def mutations(seed: int, count: int, traffic: Traffic = Traffic()) -> Iterator[tuple[str, bytes]]:  # noqa: B008
    """Paths and bodies. Bodies that stay valid ask for few tokens."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(traffic.valid)
        changed = json.loads(json.dumps(body))
        for _ in range(chance.randint(1, 3)):
            _change(changed, chance, traffic.odd)
        data = json.dumps(changed).encode()
        if chance.random() < 0.15:
            cut = chance.randrange(len(data) + 1)
            data = (
                data[:cut]
                + bytes(chance.choices(range(256), k=chance.randint(0, 4)))
                + data[cut + chance.randint(0, 3) :]
            )
        yield path, data


def _change(value: Any, chance: random.Random, odd: Sequence[Any]) -> None:
    """Change something within a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys or chance.random() < 0.1:
            key: Any = chance.choice(["prompt", "model", "n", "\x00", "seed", "tools", "stop", "a" * 200])
            if isinstance(value, dict):
                value[key] = copy.deepcopy(chance.choice(odd))
            else:
                value.append(copy.deepcopy(chance.choice(odd)))
            return
        key = chance.choice(keys)
        if isinstance(value[key], (dict, list)) and chance.random() < 0.6:
            value = value[key]
            continue
        if isinstance(value, dict) and chance.random() < 0.15:
            del value[key]
        elif key not in ("max_tokens", "max_output_tokens", "max_new_tokens", "n"):  # the answer stays short
            value[key] = copy.deepcopy(chance.choice(odd))
        return


# --- what must hold ---------------------------------------------------------------------------------------------------


def check_answer(data: bytes, answer: httpx.Response) -> None:
    """Raise AssertionError for an answer that no request may get. `data`: the request's body."""
    if answer.status_code != 200:
        error = answer.json()["error"]
        ours = answer.status_code >= 500 and answer.status_code != 501
        assert not ours and error["message"] and error["code"] == answer.status_code, (data, answer.text)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line for line in answer.text.splitlines() if line]
        last = lines[-1].removeprefix("data: ")
        if last == "[DONE]" or json.loads(last).get("type") in _LAST_EVENTS:
            return
        assert json.loads(last)["error"]["code"] < 500, (data, answer.text)


def check_bystander(client: httpx.Client) -> None:
    """Raise AssertionError unless a request gets the tokens that are right."""
    answer = client.post("/v1/completions", json={"prompt": "995:", "max_tokens": 12})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == " 996 997 998", answer.text


def batter(
    client: httpx.Client,
    seed: int,
    count: int,
    traffic: Traffic = Traffic(),  # noqa: B008
    bystand: Callable[[httpx.Client], None] = check_bystander,
) -> Counter[int]:
    """Send mutated requests next to a bystander; how many answers had which status."""

    def send(path: str, data: bytes) -> int:
        answer = client.post(path, content=data)
        check_answer(data, answer)
        return answer.status_code

    with ThreadPoolExecutor(_THREADS) as pool:
        sent = [pool.submit(send, path, data) for path, data in mutations(seed, count, traffic)]
        for _ in range(max(2, count // 100)):
            bystand(client)
        statuses = Counter(each.result() for each in sent)
    bystand(client)
    return statuses


# --- running ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Start both processes, send the requests, and look at what is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="mutated requests to send")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    args = parser.parse_args()
    flags: dict[str, Any] = {"max_rows": 8, "max_context_tokens": 512, "wandb": False, "kv_memory_max_gib": 0.125}
    with start_worker(_ONES, progress=False, **flags) as worker, _gateway(worker.endpoint) as (url, gateway_pid):
        pids, memory, statuses, began = {"gateway": gateway_pid, "worker": worker.pid}, [], Counter[int](), time.time()
        with httpx.Client(base_url=url, timeout=_ANSWER_S) as client:
            for number in range(_ROUNDS):
                statuses += batter(client, args.seed * _ROUNDS + number, max(1, args.requests // _ROUNDS))
                memory.append({name: _memory_bytes(pid) for name, pid in pids.items()})
                shown = ", ".join(f"{name} {size >> 20} MiB" for name, size in memory[-1].items())
                print(f"{statuses.total()} requests in {time.time() - began:.0f} s, {shown}", flush=True)
            lines = client.get("/metrics").text.splitlines()
        with RolloutClient(worker.endpoint, timeout_s=_ANSWER_S) as direct:
            status = direct.status()
    growth = {name: memory[-1][name] - memory[min(_WARM_ROUNDS, _ROUNDS) - 1][name] for name in memory[-1]}
    figures = {
        "requests": statuses.total(),
        "seconds": round(time.time() - began, 1),
        "statuses": {str(code): count for code, count in sorted(statuses.items())},
        "growth_bytes": growth,
        "in_flight": int(next(line for line in lines if line.startswith("rollout_gateway_in_flight ")).split()[1]),
        "rows": status["rows"]["running"],
        "waiting": status["queue"]["waiting"],
        "faults": status["faults"],
    }
    print(json.dumps(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    clean = not any(figures[name] for name in ("in_flight", "rows", "waiting", "faults"))
    return 0 if clean and max(growth.values()) < _MAX_GROWTH_BYTES else 1


@contextlib.contextmanager
def _gateway(endpoint: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a gateway."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "rollout.cli.main", "gateway", endpoint, "--port", "0"]
        with subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL) as process:
            try:
                end = time.monotonic() + _START_S
                while not ready.exists():
                    if process.poll() is not None or time.monotonic() > end:
                        raise RuntimeError("the gateway did not start")
                    time.sleep(0.05)
                yield json.loads(ready.read_text())["url"], process.pid
            finally:
                process.terminate()


def _memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
