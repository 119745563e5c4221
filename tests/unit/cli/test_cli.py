"""The command line: quick, complete, and a line instead of a traceback.

What a client command says to a worker is checked against a real ROUTER socket that answers with fixed replies.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from rollout.cli.main import main
from rollout.cli.serve import SYNONYMS
from rollout.process.announce import announce
from rollout.settings_sources import retired_flags, setting_keys
from tests.support.patience import PATIENCE_S
from trainer_bridge.wire import codec as wire

ROOT = Path(__file__).resolve().parents[3]
HEAVY = (
    "torch",
    "transformers",
    "wandb",
    "zmq",
    "triton",
    "numpy",
    "rich",
    "msgpack",
    "matplotlib",
    "prometheus_client",
)


def rollout(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
    return subprocess.run(
        [sys.executable, "-m", "rollout", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=clean | {"PYTHONPATH": paths, "COLUMNS": "200"} | (environ or {}),
    )


def test_nothing_heavy_is_imported_for_help_or_a_wrong_command_line():
    lines = (
        *("--help", "--version", "serve --help", "status --help", "generate --help", "top --help", "trace --help"),
        *("top tcp://127.0.0.1:1 --json", "demo --help", "keys --help", "serve model --no-such-flag"),
        *("serve model --max-rows many", "serve", "generate tcp://127.0.0.1:1", "nonsense"),
    )
    script = f"""
import sys
from rollout.process.announce import announce
from rollout.cli.main import main
from rollout.cli.serve import SYNONYMS
for line in {lines!r}:
    try:
        main(line.split())
    except SystemExit:
        pass
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (line, loaded)
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr


def test_serve_help_shows_every_setting_with_its_description():
    done = rollout("serve", "--help")
    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    for key in setting_keys():
        assert key.flag in shown
        assert " ".join((key.field.description or "").split()) in shown


def test_every_setting_can_be_given_as_a_flag(tmp_path):
    taken = {}

    def parse(*arguments: str) -> None:
        from rollout.cli.main import parser_of

        taken.clear()
        taken.update(vars(parser_of("serve").parse_args(arguments)))

    for key in setting_keys():
        if key.flag == "MODEL":
            parse("folder")
            assert taken[key.path] == "folder"
        elif key.field.annotation is bool:
            parse(key.flag)
            assert taken[key.path] is True
            parse("--no-" + key.flag[2:])
            assert taken[key.path] is False
        else:
            parse(key.flag, "x")
            assert taken[key.path] == "x"
        assert [other.path for other in setting_keys() if other.path in taken] == [key.path]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "no model"),
        (["serve", "m", "--max-row", "3"], "did you mean --max-rows?"),
        (["serve", "m", "--session-share=0.2"], "engine.session_share is not a setting any more"),
        (["gateway"], "at least one ENDPOINT"),
        (["gateway", "tcp://127.0.0.1:1", "--port", "x"], "flag --port: gateway.port = 'x'"),
        (["gateway", "tcp://127.0.0.1:1", "--prot", "1"], "did you mean --port?"),
        (["gateway", "tcp://127.0.0.1:1", "--config", "/nowhere.toml"], "cannot read the settings file"),
        (["serve", "m", "--max-rows"], "expected one argument"),
        (["serve", "m", "--port", "5757"], "write --bind"),
        (["serve", "m", "--max-model-len", "8192"], "write --max-context-tokens"),
        (["serve", "m", "--max-num-seqs=64"], "write --max-rows"),
        (["serve", "m", "--tensor-parallel-size", "2"], "--tensor-parallel"),
        (["serve", "m", "--max-rows", "0"], "flag --max-rows: engine.max_rows = '0'"),
        (["serve", "m", "--pipeline-depth", "3"], "must be one of 1, 2"),
        (["serve", "m", "--config", "/nowhere.toml"], "cannot read the settings file /nowhere.toml"),
        (["generate", "tcp://127.0.0.1:1", "--token-ids", "1,x"], "--token-ids takes integers"),
        (["generate", "tcp://127.0.0.1:1", "--prompt", "a", "--token-ids", "1"], "not allowed with"),
        (["generate", "tcp://127.0.0.1:1", "--messages", "/nowhere.json"], "cannot read --messages /nowhere.json"),
        (["generate", "tcp://127.0.0.1:1", "--prompt", "a", "--n", "two"], "invalid int value"),
        (["generate", "tcp://127.0.0.1:1"], "--chat"),
        (["generate", "tcp://127.0.0.1:1", "hello"], "--chat"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--prompt", "b"], "not allowed with"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--messages", "[]"], "not allowed with"),
        (["generate", "tcp://127.0.0.1:1", "--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["generate", "tcp://127.0.0.1:1", "--prompt", "a", "--tools", "[]"], "--tools"),
        (["generate", "tcp://127.0.0.1:1", "--messages", '[{"role"'], "--messages is not JSON"),
        (["generate", "tcp://127.0.0.1:1", "--messages", '{"role": "user"}'], "--messages must be a list"),
        (["generate", "tcp://127.0.0.1:1", "--messages", "["], "--messages is not JSON"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--json-schema", "/no"], "cannot read --json-schema /no"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--json-schema", "[]"], "--json-schema must be a map"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--grammar", "/no"], "cannot read --grammar /no"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--regex", "b", "--choice", "c"], "not allowed with"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--stop-token-ids", "b"], "--stop-token-ids takes integers"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--constraint", "b"], "--json-schema"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--max-new-tokens", "3"], "write --max-tokens"),
        (["generate", "tcp://127.0.0.1:1", "--chat", "a", "--sesion", "b"], "did you mean --session?"),
        (["generate", "http://127.0.0.1:1", "--chat", "a"], "gateway"),
        (["top", "http://127.0.0.1:1", "--once"], "gateway"),
        (["trace", "https://127.0.0.1:1"], "gateway"),
        (["status", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"], "given twice"),
        (["status", "http://"], "names no host"),
        (["status", "http://127.0.0.1:99999"], "is not an address"),
        (["status", "http://127.0.0.1:1", "--api-key-file", "/no"], "cannot read --api-key-file /no"),
        (["status", "nonsense"], "not a ZeroMQ endpoint"),
        (["status", "tcp://127.0.0.1:1", "--timeout-s", "0"], "more than 0"),
        (["top", "tcp://127.0.0.1:1", "--json"], "--json needs --once"),
        (["top", "tcp://127.0.0.1:1"], "add --once"),
        (["top", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", "--once"], "given twice"),
        (["top", "nonsense", "--once"], "not a ZeroMQ endpoint"),
        (["trace", "tcp://127.0.0.1:1", "--steps", "0"], "from 1 to 2000; got 0"),
        (["serve", "m", "--metrics-port", "65536"], "metrics.metrics_port = '65536'"),
        (["serve", "no-model", "--device", "gpu"], "device 'gpu': write auto, cpu, cuda or cuda:N"),
        (["serve", "no-model", "--device", "gpu", "--workers", "2"], "write auto, cuda or cpu"),
        (["serve", "no-model", "--device", "cuda:99"], "device 'cuda:99'"),
        (["serve", "no-model", "--bind", "tcp://*:0"], "--insecure"),
        (["serve", "no-model", "--curve-secret-key", "no-key", "--curve-client-keys", "."], "no-key"),
        (["bench"], "unknown command bench"),
        (["generat", "x"], "did you mean generate"),
        ([], "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments, says, capsys, monkeypatch):
    for name in list(os.environ):
        if name.startswith("ROLLOUT_"):
            monkeypatch.delenv(name)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.startswith("rollout: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("joined", [False, True])
def test_a_flag_of_a_setting_that_is_none_any_more_says_what_holds_now(joined, capsys):
    for flag, says in retired_flags().items():
        arguments = [f"{flag}=1"] if joined else [flag, "1"]
        assert main(["serve", "m", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--constraint", "--qqqqqq"])
def test_an_unlike_flag_is_not_suggested(flag, capsys):
    assert main(["status", "tcp://127.0.0.1:1", flag, "x"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_synonyms_of_generate_name_flags_that_exist():
    from rollout.cli import generate
    from rollout.cli.main import parser_of

    flags = {flag for action in parser_of("generate")._actions for flag in action.option_strings}
    named = {
        word.rstrip(",;)") for text in generate.SYNONYMS.values() for word in text.split() if word.startswith("--")
    }
    assert named <= flags and not generate.SYNONYMS.keys() & flags


def test_synonyms_name_flags_that_exist():
    flags = {key.flag for key in setting_keys()} | {f"--no-{key.flag[2:]}" for key in setting_keys()}
    named = {word.rstrip(",;)") for text in SYNONYMS.values() for word in text.split() if word.startswith("--")}
    assert named - {"--help"} <= flags and not SYNONYMS.keys() & flags


@pytest.mark.parametrize("terminal", [True, False])
def test_facts_are_sentences_on_a_terminal_and_json_elsewhere(terminal, capsys):
    ready = {"event": "ready", "endpoint": "tcp://127.0.0.1:5757", "model": "folder", "weights_version": 3}
    announce(ready, terminal=terminal)
    shown = capsys.readouterr().out
    assert "tcp://127.0.0.1:5757" in shown and shown.startswith("ready" if terminal else "{")


def test_unknown_environment_variable_ends_serve_with_status_2():
    done = rollout("serve", "m", environ={"ROLLOUT_ENGINE__MAXROWS": "3"})
    assert done.returncode == 2
    assert "ROLLOUT_ENGINE__MAX_ROWS" in done.stderr and done.stderr.count("\n") == 1


def test_version_is_the_one_of_the_distribution():
    done = rollout("--version")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (done.returncode, done.stdout) == (0, f"rollout {version}\n")


ENDING = """
import atexit, sys, threading, time
from rollout.cli import main as cli

def main():
    print("main", flush=True)
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    atexit.register(print, "exit handler")
    return 7

cli.main = main
cli.run()
"""


def test_the_process_ends_once_threads_and_exit_handlers_are_through_and_all_is_written():
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (7, "main\nthread\nexit handler\n", "")


def test_rollout_cli_module_is_the_command_too():
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", "rollout.cli.main", "--version"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.stdout.startswith("rollout ")


def test_a_worker_that_is_not_there_is_one_line_and_status_1(capsys):
    assert main(["status", "tcp://127.0.0.1:9", "--timeout-s", "0.2"]) == 1
    error = capsys.readouterr().err
    assert error.count("tcp://127.0.0.1:9") == 1 and error.count("\n") == 1


# --- serve, without a worker -----------------------------------------------------------------------------------------

OF_A_RANK = {
    "RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
    "WANDB_RUN_ID": "x",
}


def serve_with(worker, monkeypatch, *arguments: str) -> int:
    """`rollout serve` up to where it has the worker run: there, `worker` is called."""
    for name in list(os.environ):
        if name.startswith("ROLLOUT_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("rollout.worker.serve", lambda settings, restarts, followers, run: worker())
    return main(["serve", "model", *arguments])


def test_serve_has_none_of_the_variables_that_a_launcher_of_ranks_sets(monkeypatch):
    for name, value in (OF_A_RANK | {"CUDA_VISIBLE_DEVICES": "1"}).items():
        monkeypatch.setenv(name, value)
    seen = {}

    def worker() -> int:
        listed = subprocess.run([sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
                                capture_output=True, check=True)  # fmt: skip
        seen.update(json.loads(listed.stdout))
        return 0

    assert serve_with(worker, monkeypatch) == 0
    assert seen["CUDA_VISIBLE_DEVICES"] == "1" and not seen.keys() & OF_A_RANK.keys()


@pytest.mark.parametrize("ours", [True, False])
def test_a_ready_file_is_there_only_while_its_worker_is(tmp_path, monkeypatch, ours):
    ready = tmp_path / "ready.json"
    ready.write_text('{"event": "ready", "pid": 1}')

    def worker() -> int:
        assert not ready.exists(), "it was an earlier worker's"
        ready.write_text(json.dumps({"pid": os.getpid() if ours else 1}))
        return 0

    assert serve_with(worker, monkeypatch, "--ready-file", str(ready)) == 0
    assert ready.exists() != ours, "what another worker has written meanwhile stays"


def test_a_ready_file_goes_with_a_worker_that_fails(tmp_path, monkeypatch, capsys):
    ready = tmp_path / "ready.json"

    def worker() -> int:
        ready.write_text(json.dumps({"pid": os.getpid()}))
        raise OSError("no device")

    assert serve_with(worker, monkeypatch, "--ready-file", str(ready)) == 1
    assert not ready.exists() and "no device" in capsys.readouterr().err


def test_a_supervisor_takes_an_old_ready_file_away_first(tmp_path):
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    assert main(["serve", "model", "--workers", "2", "--device", "cuda:1", "--ready-file", str(ready)]) == 2
    assert not ready.exists()


def test_a_ready_file_that_cannot_be_is_one_line_and_status_1(tmp_path, capsys):
    assert main(["serve", "model", "--ready-file", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error and error.count("\n") == 1


def test_the_folder_of_a_ready_file_is_made(tmp_path, monkeypatch):
    ready = tmp_path / "new" / "folder" / "ready.json"

    def worker() -> int:
        ready.write_text(json.dumps({"pid": os.getpid()}))
        return 0

    assert serve_with(worker, monkeypatch, "--ready-file", str(ready)) == 0


@pytest.mark.parametrize("flag", ["--bind", "--weights-bind", "--metrics-port"])
def test_an_address_in_use_names_its_flag(flag, capsys, monkeypatch):
    for name in list(os.environ):
        if name.startswith("ROLLOUT_"):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = str(port) if flag == "--metrics-port" else f"tcp://127.0.0.1:{port}"
        others = [] if flag == "--bind" else ["--bind", "tcp://127.0.0.1:0"]
        assert main(["serve", "no-model", "--no-wandb", flag, value, *others]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert flag in error.replace(",", " ").replace(")", " ").split() and str(port) in error


def test_a_supervised_workers_ready_file_is_its_supervisors(tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # it would leave Ctrl-C to its supervisor
    ready = tmp_path / "ready.json"

    def worker() -> int:
        ready.write_text(json.dumps({"pid": os.getpid()}))
        return 0

    assert serve_with(worker, monkeypatch, "--ready-file", str(ready), "--restarts", "0") == 0
    assert ready.exists(), "who looks after it may not have read it yet"


# --- client commands -------------------------------------------------------------------------------------------------

STATUS = {
    "op": "status",
    "model": "tiny",
    "state": "serving",
    "weights_version": 3,
    "rows": {"running": 2, "max": 8},
    "tokens_per_s": 12.345,
    "capabilities": ["[n]", "stream"],
}


def completion(tokens: list[int], **fields: object) -> dict:
    values = np.linspace(-1, -0.5, len(tokens), dtype=np.float32)
    return {
        "index": 0,
        "token_ids": np.array(tokens, np.int32),
        "logprobs": values,
        "raw_logprobs": values,
        "versions": [[3, len(tokens)]],
        "finish_reason": "length",
        "seed": 1,
    } | fields


def result(*completions: dict) -> dict:
    return {
        "op": "result",
        "completions": list(completions),
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "timing": {"queued_s": 0.0, "prefill_s": 0.0, "decode_s": 0.1, "total_s": 0.1},
        "preemptions": 0,
    }


class Answering:
    """A ROUTER socket that answers `status` and `generate` with fixed replies, and keeps what it was asked."""

    def __init__(self, *replies: dict) -> None:
        self.asked: list[dict] = []
        self._replies = replies
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            who, *frames = self._socket.recv_multipart()
            envelope = [who, b""] if frames[0] == b"" else [who]
            header = wire.decode(frames[len(envelope) - 1 :])
            self.asked.append(header)
            if header["op"] == "ping":
                return
            replies = [reply for reply in self._replies if (reply["op"] == "status") == (header["op"] == "status")]
            if header["op"] in ("status", "generate"):
                for reply in replies:
                    self._socket.send_multipart([*envelope, *wire.encode({"v": 1, "id": header["id"], **reply})])

    def close(self) -> None:
        with self._context.socket(zmq.DEALER) as socket:  # ends the thread
            socket.connect(self.endpoint)
            socket.send_multipart(wire.encode({"op": "ping"}))
            self._thread.join(60)
        self._socket.close(0)
        self._context.term()


@contextmanager
def answering(*replies: dict) -> Iterator[Answering]:
    worker = Answering(*replies)
    try:
        yield worker
    finally:
        worker.close()


def test_status_shows_a_table(capsys):
    with answering(STATUS) as worker:
        assert main(["status", worker.endpoint]) == 0
    shown = capsys.readouterr().out
    assert "serving" in shown and "2 of 8" in shown and "12 tokens/s" in shown and "[n], stream" in shown
    assert len(shown.splitlines()) <= 14


def test_status_all_shows_every_field(capsys):
    with answering(STATUS) as worker:
        assert main(["status", worker.endpoint, "--all"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in STATUS if name != "op") and "running 2  max 8" in shown


def test_status_as_json_is_one_object(capsys):
    with answering(STATUS) as worker:
        assert main(["status", worker.endpoint, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status == {name: value for name, value in STATUS.items() if name != "op"}


def test_status_of_several_is_a_line_each_and_one_that_is_silent_is_status_1(capsys):
    second = STATUS | {"weights_version": 4, "pid": 17, "metrics_url": "http://127.0.0.1:9/metrics", "problems": ["oh"]}
    with answering(STATUS) as one, answering(second) as two:
        assert main(["status", one.endpoint, two.endpoint]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:3]] == [one.endpoint, two.endpoint]
        assert {"4", "17", "http://127.0.0.1:9/metrics"} <= set(lines[2].split()) and "oh" in lines[3]
        assert main(["status", one.endpoint, "tcp://127.0.0.1:9", "--timeout-s", "2"]) == 1
        shown = capsys.readouterr()
        assert "serving" in shown.out and "no answer" in shown.out and shown.err == ""


def test_status_of_several_as_json_is_one_line_each(capsys):
    with answering(STATUS) as worker:
        addresses = [worker.endpoint, "tcp://127.0.0.1:9", "http://127.0.0.1:9"]
        assert main(["status", *addresses, "--json", "--timeout-s", "2"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["endpoint"] for line in lines] == addresses
    assert lines[0]["weights_version"] == 3 and all(line.keys() == {"endpoint", "error"} for line in lines[1:])


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--chat", "hi"], {"messages": [{"role": "user", "content": "hi"}]}),
        (
            ["--chat", "hi", "--system", "be short", "--chat-template-kwargs", '{"enable_thinking": false}'],
            {
                "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        (
            ["--messages", ' [{"role": "user", "content": "hi"}]', "--tools", '[{"type": "function"}]'],
            {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
        ),
        (["--prompt", "a", "--json-schema", '{"type": "object"}'], {"constraint": {"json_schema": {"type": "object"}}}),
        (["--prompt", "a", "--regex", "[0-9]+"], {"constraint": {"regex": "[0-9]+"}}),
        (["--prompt", "a", "--choice", "yes", "--choice", "no"], {"constraint": {"choices": ["yes", "no"]}}),
        (["--prompt", "a", "--max-kv-age", "0"], {"max_kv_age": 0}),
        (["--prompt", "a", "--min-version", "3", "--max-version-span", "1"], {"min_version": 3, "max_version_span": 1}),
        (["--prompt", "a", "--priority", "-2", "--adapter", "chess"], {"priority": -2, "adapter": "chess"}),
        (["--prompt", "a", "--logprobs", "4"], {"logprobs": 4}),
        (
            ["--prompt", "a", "--stop-token-ids", "4, 5", "--min-tokens", "2"],
            {"stop": {"token_ids": [4, 5], "min_tokens": 2}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_of_generate_become_fields(flags, fields, capsys):
    with answering(STATUS, result(completion([5, 6], text="x"))) as worker:
        assert main(["generate", worker.endpoint, *flags]) == 0
    asked = next(header for header in worker.asked if header["op"] == "generate")
    assert {name: asked[name] for name in fields} == fields
    assert ("prompt" in asked) == ("messages" not in asked) and "template" not in capsys.readouterr().err


@pytest.fixture
def typed(monkeypatch):
    """Set what the command reads from stdin."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_files_and_stdin_are_read_where_a_flag_takes_them(tmp_path, capsys, typed):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('root ::= "a"')
    messages = [{"role": "user", "content": "count"}]
    for flags, stdin, field, value in (
        (["--prompt", "a", "--json-schema", str(schema)], "", "constraint", {"json_schema": {"type": "integer"}}),
        (["--prompt", "a", "--json-schema", "-"], '{"type": "null"}', "constraint", {"json_schema": {"type": "null"}}),
        (["--prompt", "a", "--grammar", str(grammar)], "", "constraint", {"grammar": 'root ::= "a"'}),
        (["--messages", "-"], json.dumps(messages), "messages", messages),
        (["--chat", "-"], "count", "messages", messages),
        (["--prompt", "-"], "count", "prompt", "count"),
    ):
        typed(stdin)
        with answering(result(completion([5], text="a"))) as worker:
            assert main(["generate", worker.endpoint, *flags]) == 0
        assert next(header for header in worker.asked if header["op"] == "generate")[field] == value


def test_stdin_is_read_once(capsys, typed):
    typed("count")
    assert main(["generate", "tcp://127.0.0.1:1", "--chat", "-", "--json-schema", "-"]) == 2
    error = capsys.readouterr().err
    assert "--chat" in error and "--json-schema" in error and "stdin" in error


def test_two_turns_of_a_session_are_of_one_client(capsys):
    with answering(result(completion([5], text="a"))) as worker:
        for _ in range(2):
            assert main(["generate", worker.endpoint, "--prompt", "a", "--session", "talk"]) == 0
    first, second = (header for header in worker.asked if header["op"] == "generate")
    assert first["session"] == second["session"] == "talk" and first["client"] == second["client"]
    assert first["id"] != second["id"]


def test_an_error_of_a_field_names_its_flag(capsys):
    refused = {"op": "error", "code": "bad_request", "message": "too much", "field": "sampling.top_p"}
    for field, flags, flag in (
        ("sampling.top_p", ["--top-p", "2"], "--top-p"),
        ("stop.strings.0", ["--stop", "x"], "--stop"),
        ("constraint", ["--regex", "x"], "--regex"),
        ("constraint.choices", ["--choice", "x"], "--choice"),
        ("min_version", ["--min-version", "7"], "--min-version"),
    ):
        with answering(refused | {"field": field}) as worker:
            assert main(["generate", worker.endpoint, "--chat", "a", *flags]) == 1
        assert f"({flag})" in capsys.readouterr().err
    with answering(refused | {"field": "messages"}) as worker:
        assert main(["generate", worker.endpoint, "--chat", "a", "--top-p", "1"]) == 1
    assert "(--chat)" in capsys.readouterr().err


def test_generate_sends_what_the_flags_say(capsys):
    flags = ["--prompt", "17:", "--n", "2", "--max-tokens", "8", "--temperature", "0.5", "--seed", "9", "--stop", "x"]
    with answering(result(completion([5, 6], text="18"), completion([7], index=1, text="19"))) as worker:
        assert main(["generate", worker.endpoint, *flags, "--stop", "y", "--ignore-eos"]) == 0
    asked = next(header for header in worker.asked if header["op"] == "generate")
    assert (asked["prompt"], asked["n"], asked["max_tokens"], asked["return_text"]) == ("17:", 2, 8, True)
    assert asked["sampling"] == {"temperature": 0.5, "seed": 9}
    assert asked["stop"] == {"strings": ["x", "y"], "ignore_eos": True}
    captured = capsys.readouterr()
    assert captured.out == "18\n19\n"
    assert "[completion 1: 1 tokens, length, weights version 3]" in captured.err


def test_a_completion_that_ended_with_an_error_is_printed_and_status_1(capsys):
    failed = completion([5], text="18", finish_reason="error") | {"error": "the engine failed"}
    with answering(result(failed, completion([6], index=1, text="19"))) as worker:
        assert main(["generate", worker.endpoint, "--prompt", "17:", "--n", "2"]) == 1
    assert capsys.readouterr().out == "18\n19\n"


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "stale"])
def test_a_completion_that_was_cut_short_is_printed_and_status_1(reason, capsys):
    with answering(result(completion([5], text="18", finish_reason=reason))) as worker:
        assert main(["generate", worker.endpoint, "--prompt", "17:"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "18\n" and reason in captured.err


def test_generate_interrupted_shows_the_tokens_so_far(tmp_path):
    """Ctrl-C during a completion: the tokens so far are on stdout, the exit code is that of SIGINT."""
    first = completion([5], text="18 ", finish_reason=None) | {"op": "chunk", "offset": 0}
    with answering(first) as worker:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        # A job in the background of a shell ignores SIGINT, and its children inherit that.
        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        module = "import runpy; runpy.run_module('rollout', run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", f"{heard}; {module}", "generate", worker.endpoint]
        command += ["--prompt", "17:", "--stream"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
        )
        assert process.stdout is not None
        assert process.stdout.read(3) == b"18 "
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and out == b"\n" and b"after 1 tokens" in err


def test_generate_takes_token_ids_and_prints_token_ids(capsys):
    with answering(result(completion([5, 6]))) as worker:
        assert main(["generate", worker.endpoint, "--token-ids", "1, 2 3"]) == 0
    asked = next(header for header in worker.asked if header["op"] == "generate")
    assert list(asked["prompt"]) == [1, 2, 3] and asked["return_text"] is False
    assert capsys.readouterr().out == "5 6\n"


def test_generate_takes_messages_from_a_file(tmp_path, capsys):
    messages = [{"role": "user", "content": "count"}]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages))
    with answering(result(completion([5], text="a"))) as worker:
        assert main(["generate", worker.endpoint, "--messages", str(path)]) == 0
    asked = next(header for header in worker.asked if header["op"] == "generate")
    assert asked["messages"] == messages and "prompt" not in asked
    path.write_text('{"role": "user"}')
    assert main(["generate", "tcp://127.0.0.1:1", "--messages", str(path)]) == 2


def test_generate_as_json_has_tokens_logprobs_and_versions(capsys):
    with answering(result(completion([5, 6], text="18"))) as worker:
        assert main(["generate", worker.endpoint, "--prompt", "17:", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["token_ids"], shown["versions"], shown["logprobs"]) == ([5, 6], [[3, 2]], [-1.0, -0.5])


@pytest.mark.parametrize("as_json", [False, True])
def test_generate_streams_chunks_in_order(as_json, capsys):
    whole = completion([5, 6, 7], text="18 19")
    first = completion([5], text="18 ", finish_reason=None) | {"op": "chunk", "offset": 0}
    second = completion([6, 7], text="19") | {"op": "chunk", "offset": 1}
    with answering(first, second, result(whole)) as worker:
        flags = ["--prompt", "17:", "--stream", *(["--json"] if as_json else [])]
        assert main(["generate", worker.endpoint, *flags]) == 0
    asked = next(header for header in worker.asked if header["op"] == "generate")
    assert asked["stream"] == "tokens"
    captured = capsys.readouterr()
    if as_json:
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert [(line["offset"], line["token_ids"]) for line in lines] == [(0, [5]), (1, [6, 7])]
    else:
        assert captured.out == "18 19\n"
    assert "3 tokens, length" in captured.err


def test_an_error_of_the_worker_is_one_line_and_status_1(capsys):
    refused = {"op": "error", "code": "too_long", "message": "prompt plus max_tokens is 99, the worker holds 64"}
    with answering(refused) as worker:
        assert main(["generate", worker.endpoint, "--prompt", "a"]) == 1
    error = capsys.readouterr().err
    assert "the worker holds 64" in error and error.count("\n") == 1
