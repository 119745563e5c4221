"""The commands against a real worker: chat, constraints, log-probs, sessions, status."""

import json
import os

import pytest

from rollout.cli.main import main
from tests.support.worker.harness import EOS, SPACE
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


def test_a_message_goes_through_the_chat_template(
    worker: WorkerProcess, client: RolloutClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", worker.endpoint, "--chat", "17:", "--max-tokens", "6", "--seed", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    messages = [{"role": "user", "content": "17:"}]
    result = client.generate(messages=messages, max_tokens=6, seed=1, return_text=True)
    assert shown["text"] == result.completions[0].text


@pytest.mark.parametrize(("prompt", "hinted"), [("--prompt", True), ("--chat", False)])
def test_a_raw_prompt_that_gets_nothing_is_told_of_the_chat_template(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], prompt: str, hinted: bool
) -> None:
    every_token = " ".join(map(str, range(16)))
    assert main(["generate", worker.endpoint, prompt, "17:", "--stop-token-ids", every_token]) == 0
    captured = capsys.readouterr()
    assert ("--chat" in captured.err) == hinted and "--chat" not in captured.out
    assert main(["generate", worker.endpoint, prompt, "17:", "--max-tokens", "6"]) == 0
    assert "--chat" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--choice", " 18", "--choice", " 19"], {" 18", " 19"}),
        (["--regex", " 2[0-9]"], {f" 2{digit}" for digit in range(10)}),
        (["--json-schema", '{"type": "integer", "minimum": 7, "maximum": 7}'], {"7"}),
    ],
)
def test_a_constraint_holds(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], flags: list[str], texts: set[str]
) -> None:
    pytest.importorskip("xgrammar")
    assert main(["generate", worker.endpoint, "--prompt", "17:", *flags]) == 0
    assert capsys.readouterr().out.removesuffix("\n") in texts


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_a_line_for_each_token(
    worker: WorkerProcess, client: RolloutClient, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    flags = ["--max-tokens", "6", "--seed", "5", "--temperature", "2", "--logprobs", "2"]
    assert main(["generate", worker.endpoint, "--prompt", "17:", *flags, *(["--stream"] if stream else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    completion = client.generate("17:", max_tokens=6, seed=5, temperature=2, logprobs=2, return_text=True).completions[
        0
    ]
    assert (lines[0] == completion.text) != stream
    words = [line.split(maxsplit=3) for line in lines[-6:]]
    assert [int(word[0]) for word in words] == list(range(6))
    assert [int(word[2]) for word in words] == completion.token_ids.tolist()
    for word, logprob, top in zip(words, completion.logprobs, completion.top_logprobs, strict=True):
        assert float(word[1]) == pytest.approx(float(logprob), abs=6e-4)
        assert f"{top[1]:.3f}" in word[3]
    texts = "".join(word[3].split("'")[1] for word in words)
    assert texts == completion.text
    likeliest = {SPACE: "' '"}.get(int(completion.top_ids[0][0]))
    assert likeliest is None or f"{likeliest} {completion.top_logprobs[0][0]:.3f}" in words[0][3]


def test_logprobs_alone_show_no_other_tokens(worker: WorkerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", worker.endpoint, "--token-ids", "4 11 14", "--max-tokens", "2", "--logprobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines[1:]] == [3, 3], "position, log-prob and id: no text was asked for"


def test_a_session_keeps_the_kv_of_a_turn_for_the_next_command(
    worker: WorkerProcess, client: RolloutClient, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"test-{os.getpid()}"
    held = client.status()["sessions"]["hits"]
    assert main(["generate", worker.endpoint, "--prompt", "17:", "--max-tokens", "6", "--session", name]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert main(["generate", worker.endpoint, "--prompt", f"17:{text}", "--max-tokens", "3", "--session", name]) == 0
    assert "8 of 9" in capsys.readouterr().err
    assert client.status()["sessions"]["hits"] == held + 1
    with RolloutClient(worker.endpoint, client=f"rollout-generate/{name}", timeout_s=60.0) as owner:
        owner.control("end_session", session=name)


def test_a_version_that_never_comes_waits_for_the_deadline(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--min-version", "1000000", "--deadline-s", "0.3"]
    assert main(["generate", worker.endpoint, "--prompt", "17:", *flags]) == 1
    assert "deadline" in capsys.readouterr().err


def test_status_names_process_and_metrics(
    workers: tuple[WorkerProcess, WorkerProcess], worker: WorkerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    assert main(["status", worker.endpoint, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["pid"] == worker.pid and status["metrics_url"].startswith("http://127.0.0.1:")
    assert main(["status", worker.endpoint]) == 0
    shown = capsys.readouterr().out
    assert str(worker.pid) in shown and status["metrics_url"] in shown
    assert main(["status", *(each.endpoint for each in workers)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for each, line in zip(workers, lines[1:], strict=True):
        assert each.endpoint in line and str(each.pid) in line.split()


def test_a_stop_token_of_the_model_is_shown_by_its_id(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", worker.endpoint, "--prompt", "17:", "--stop-token-ids", f"{SPACE}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stop"] == SPACE and shown["stop"] != EOS
