"""Requests that no client sends: valid ones with random mutations, and bytes that are no HTTP."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

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
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere"}),
    ("/update_weights", {"weight_dir": "nowhere"}),
    ("/collective_rpc", {"method": "f", "args": [1], "kwargs": {}}),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -1.5, 1e300, "", "17:", "\ud800", "\x00", "a" * 3000),
    *([], [[]], [None], {}, {"": {}}, [[1] * 50] * 50, {"a": 1}, "token_id:1", "../../etc/passwd", "%s%n", "true"),
)


def mutations(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies. Bodies that stay valid ask for few tokens."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(VALID)
        changed = json.loads(json.dumps(body))
        for _ in range(chance.randint(1, 3)):
            _change(changed, chance)
        data = json.dumps(changed).encode()
        if chance.random() < 0.15:
            cut = chance.randrange(len(data) + 1)
            data = (
                data[:cut]
                + bytes(chance.choices(range(256), k=chance.randint(0, 4)))
                + data[cut + chance.randint(0, 3) :]
            )
        yield path, data


def _change(value: Any, chance: random.Random) -> None:
    """Change something within a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys or chance.random() < 0.1:
            key = chance.choice(["prompt", "model", "n", "\x00", "seed", "tools", "stop", "a" * 200])
            if isinstance(value, dict):
                value[key] = copy.deepcopy(chance.choice(ODD))
            else:
                value.append(copy.deepcopy(chance.choice(ODD)))
            return
        key = chance.choice(keys)
        if isinstance(value[key], (dict, list)) and chance.random() < 0.6:
            value = value[key]
            continue
        if isinstance(value, dict) and chance.random() < 0.15:
            del value[key]
        elif key not in ("max_tokens", "max_new_tokens", "n"):  # the answer stays short
            value[key] = copy.deepcopy(chance.choice(ODD))
        return


#: Bytes of a connection that are no request, or never become one.
RAW = (
    b"",
    b"\x00" * 1000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n",
    b"GET /%ff%00/../health HTTP/1.1\r\nHost: a\r\nX-Session-ID: \xff\xfe\r\n\r\n",
)
