"""Agent programs against a worker: Claude Code by `/v1/messages`, Codex by `/v1/responses`.

Each runs its own loop with its own tools over several turns. The tokens that a trainer reads back are compared with
those that came from the engine, and their log-probs with the worker's own scores of the whole conversation.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.gateway.harness import gateway
from tests.support.integrations.agent_model import AgentCall, make_agent_model
from tests.support.integrations.integration_worker import ROOT, start
from tests.support.patience import PATIENCE_S
from trainer_bridge.client.asynchronous import AsyncRolloutClient, AsyncStream
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.results import Chunk

PROGRAMS = ROOT / ".npm-integrations" / "node_modules" / ".bin"
KEY, CONTEXT = "0123456789abcdef", 32768
PATCH = AgentCall("apply_patch", "input", "*** Begin Patch\n*** Add File: new.txt\n+", "\n*** End Patch\n")
CLAUDE = [AgentCall("Bash", "command", "echo said ")] * 3
CODEX = [AgentCall("exec_command", "cmd", "echo said "), PATCH, AgentCall("exec_command", "cmd", "cat new.txt; echo ")]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The prompt and the tokens of each answer, as they leave and reach the gateway's client of the worker."""
    answers: list[tuple[list[int], list[int]]] = []
    generate, arrived = AsyncRolloutClient.generate, AsyncStream.arrived
    streams: dict[int, list[int]] = {}

    async def asking(client: AsyncRolloutClient, prompt: Any, **fields: Any) -> Any:
        stream = await generate(client, prompt, **fields)
        answers.append((list(prompt), streams.setdefault(id(stream), [])))
        return stream

    async def arriving(stream: AsyncStream[Chunk]) -> list[Chunk]:
        chunks = await arrived(stream)
        streams[id(stream)] += [token for chunk in chunks for token in chunk.part.token_ids.tolist()]
        return chunks

    monkeypatch.setattr(AsyncRolloutClient, "generate", asking)
    monkeypatch.setattr(AsyncStream, "arrived", arriving)
    return answers


@contextmanager
def served(folder: Path, calls: list[AgentCall]) -> Iterator[tuple[httpx.Client, RolloutClient]]:
    """A gateway and its worker, with a model that makes these calls."""
    model = make_agent_model(folder / "model", calls, CONTEXT)
    settings = {"served_model_name": ("agent",), "reasoning_parser": "think", "tool_parser": "hermes"}
    with (
        start(model, folder / "log", max_rows=4, max_context_tokens=CONTEXT) as worker,
        gateway([worker.endpoint], keys=(KEY.encode(),), **settings) as http,
        RolloutClient(worker.endpoint) as direct,
    ):
        http.headers["Authorization"] = f"Bearer {KEY}"
        yield http, direct


def program(name: str) -> str:
    """The path of an installed program."""
    if not (PROGRAMS / name).exists():
        pytest.skip("make test-integrations installs the agent programs")
    return str(PROGRAMS / name)


def ran(folder: Path, *command: str, **variables: str) -> str:
    """The output of a program that works in the folder `work`, without any other settings or accounts."""
    for each in ("home", "work"):
        (folder / each).mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **variables}
    done = subprocess.run(
        command, cwd=folder / "work", env=environment, input="", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(http: httpx.Client, direct: RolloutClient, session: str, drawn: list[tuple[list[int], list[int]]]) -> str:
    """The text of the only branch; its tokens, mask and log-probs are right."""
    found = http.get(f"/v1/trajectories/{session}").json()
    (branch,) = found["branches"]
    ids, mask = branch["token_ids"], branch["mask"]
    assert [turn["parent"] for turn in found["turns"]] == [None, *range(len(found["turns"]) - 1)]
    assert [(ids[: turn["start"]], ids[turn["start"] : turn["end"]]) for turn in found["turns"]] == drawn
    chosen = [place for turn in found["turns"] for place in range(turn["start"], turn["end"])]
    assert [place for place, bit in enumerate(mask) if bit] == chosen
    scores = direct.generate(ids, max_tokens=0, prompt_logprobs=True).prompt_logprobs
    assert np.allclose(np.array(branch["logprobs"], float)[chosen], scores[chosen], atol=1e-3)
    assert all(branch["logprobs"][place] is None for place in range(len(ids)) if not mask[place])
    text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


def test_claude_code(tmp_path: Path, drawn: list[tuple[list[int], list[int]]]) -> None:
    claude = program("claude")
    flags = ["--bare", "--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "be kind"]
    with served(tmp_path, CLAUDE) as (http, direct):
        said = ran(
            tmp_path,
            *(claude, "-p", "--model", "agent", "--output-format", "json", *flags, "count"),
            ANTHROPIC_BASE_URL=str(http.base_url),
            ANTHROPIC_API_KEY=KEY,
            ANTHROPIC_CUSTOM_HEADERS="X-Session-ID: claude",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )
        end = json.loads(said)
        assert (end["result"].strip(), end["is_error"], end["num_turns"]) == ("I am done.", False, 4)
        text = check(http, direct, "claude", drawn)
        assert len(drawn) == 4 and end["usage"]["output_tokens"] == sum(len(tokens) for _, tokens in drawn)
        asked = re.findall(r'"command": "echo said (\d+)"', text)
        assert len(asked) == 3 and all(f"said {number}\n" in text.replace("<|im_end|>", "\n") for number in asked)


def test_codex(tmp_path: Path, drawn: list[tuple[list[int], list[int]]]) -> None:
    """Codex as for a model whose patches are a tool with a text as its input, and with its own verbosity."""
    codex, home = program("codex"), tmp_path / "codex"
    home.mkdir()
    known = json.loads(ran(tmp_path, codex, "debug", "models", CODEX_HOME=str(home)))["models"]
    kind = next(
        each for each in known if each["apply_patch_tool_type"] == "freeform" and not each["use_responses_lite"]
    )
    kind |= {"slug": "agent", "base_instructions": "be kind", "model_messages": None, "supports_search_tool": False}
    (home / "models.json").write_text(json.dumps({"models": [kind | {"context_window": CONTEXT}]}))
    with served(tmp_path, CODEX) as (http, direct):
        (home / "config.toml").write_text(f"""
            model = "agent"
            model_provider = "rollout"
            model_catalog_json = "{home / "models.json"}"
            web_search = "disabled"
            [model_providers.rollout]
            name = "rollout"
            base_url = "{http.base_url}/v1"
            wire_api = "responses"
            env_key = "KEY"
            http_headers = {{ "X-Session-ID" = "codex" }}
            request_max_retries = 0
            stream_max_retries = 0
        """)
        flags = ("--skip-git-repo-check", "--json", "--sandbox", "danger-full-access")
        lines = ran(tmp_path, codex, "exec", *flags, "count", CODEX_HOME=str(home), KEY=KEY).splitlines()
        items = [event["item"] for event in map(json.loads, lines) if event["type"] == "item.completed"]
        text = check(http, direct, "codex", drawn)
    assert len(drawn) == 4
    assert [item["type"] for item in items if item["type"] != "reasoning"] == [
        *("command_execution", "file_change", "command_execution", "agent_message")
    ]
    commands = [item for item in items if item["type"] == "command_execution"]
    said, patched, shown = re.findall(r"echo said (\d+)|\+(\d+)\\n\*\*\* End Patch|cat new.txt; echo (\d+)", text)
    assert commands[0]["aggregated_output"] == f"said {said[0]}\n"
    assert (tmp_path / "work" / "new.txt").read_text() == f"{patched[1]}\n"
    assert commands[1]["aggregated_output"] == f"{patched[1]}\n{shown[2]}\n"
