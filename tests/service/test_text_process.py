"""The process that renders and tokenizes prompts: its results, its faults, and its replacement."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.config import ServiceSettings
from rollout.engine.messages.to_engine import Cancel, Shutdown
from rollout.service.text import process as text_process
from rollout.service.text.process import TextProcess
from rollout.text.codec import TextCodec
from tests.support.kernels.grids import nightly
from tests.support.patience import PATIENCE_S
from tests.support.service.harness import serving
from tests.support.settings import settings_of
from tests.support.tokenizer_folder import TEMPLATE, make_tokenizer_folder
from trainer_bridge.wire.codec import encode
from trainer_bridge.wire.errors import RolloutError

LOOP = "{% for i in range(99999) %}"
FOREVER = f"{{% if messages[0].content == 'for ever' %}}{LOOP * 3}{'{% endfor %}' * 3}{{% endif %}}"
CHAT = [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "naïve 👍"}]
ENDLESS = [{"role": "user", "content": "for ever"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("text"), TEMPLATE + FOREVER)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[TextProcess]:
    process = TextProcess(folder, settings_of(ServiceSettings, max_prompt_chars=1000))
    process.start()
    yield process
    process.close()


@pytest.fixture
def mortal(folder: Path) -> Iterator[TextProcess]:
    """A process whose child may die in a test."""
    process = TextProcess(folder, ServiceSettings())
    process.start()
    yield process
    process.close()


@pytest.fixture
def hasty(folder: Path) -> Iterator[TextProcess]:
    """A process with a short limit for each prompt, which a busy machine may exceed for short prompts, too."""
    process = TextProcess(folder, settings_of(ServiceSettings, max_prompt_s=1.0))
    process.start()
    yield process
    process.close()


def served(process: TextProcess, deadline_s: float = PATIENCE_S) -> list[int]:
    """The ids of a short prompt, tried again while the machine is too busy to make them within the limit."""
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            return process.encode_prompt(encode({"prompt": "fox"})).tolist()
        except RolloutError as error:
            assert error.code == "bad_request" and time.monotonic() < end_s, error


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ticks(pid: int) -> int:
    """Processor time that a process has used."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def until(condition, deadline_s: float = PATIENCE_S):
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.002)
    return value


def refusal(process: TextProcess, **fields) -> RolloutError:
    with pytest.raises(RolloutError) as caught:
        process.encode_prompt(encode(fields))
    return caught.value


def test_it_gives_the_token_ids_that_the_codec_gives(process, folder):
    codec = TextCodec(folder)
    assert process.encode_prompt(encode({"prompt": "naïve 👍 fox"})).tolist() == codec.encode("naïve 👍 fox").tolist()
    options = {"loud": True, "add_generation_prompt": False}
    for tools, more in ((None, {}), ([{"name": "f"}], options)):
        ids = process.encode_prompt(encode({"messages": CHAT, "tools": tools, "chat_template_kwargs": more}))
        assert (ids.dtype.str, ids.tolist()) == (
            "<i4",
            codec.encode_rendered(codec.render_chat(CHAT, tools, more)).tolist(),
        )


def test_what_a_prompt_is_refused_for_comes_back_as_it_was(process):
    deaths = process.deaths
    error = refusal(process, messages=[{"role": "user", "content": "bad"}])
    assert (error.code, error.field) == ("bad_request", "messages") and "no bad words" in str(error)
    error = refusal(process, messages=CHAT, chat_template_kwargs={"tokenize": True})
    assert (error.code, error.field) == ("bad_request", "chat_template_kwargs.tokenize")
    error = refusal(process, messages=[{"role": "user", "content": "x" * 1000}])
    assert (error.code, error.field) == ("too_long", "messages")
    assert process.deaths == deaths


def test_it_has_no_torch_and_leaves_signals_of_the_group_to_the_worker(process):
    process.encode_prompt(encode({"prompt": "fox"}))
    pid, deaths = process.pid, process.deaths
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    process.encode_prompt(encode({"prompt": "fox"}))
    assert (process.pid, process.deaths) == (pid, deaths)


@pytest.mark.nightly
def test_a_prompt_that_takes_too_long_is_refused_and_the_next_one_served(hasty):
    ids = served(hasty)
    pid, deaths = hasty.pid, hasty.deaths
    error = refusal(hasty, messages=ENDLESS)
    assert error.code == "bad_request" and "within 1 s" in str(error)
    assert hasty.deaths == deaths + 1
    assert not is_there(pid), "an endless template does not go on computing"
    assert served(hasty) == ids


@pytest.mark.nightly
def test_one_that_died_without_a_prompt_is_replaced_unnoticed_by_clients(mortal):
    ids = mortal.encode_prompt(encode({"prompt": "fox"})).tolist()
    pid = mortal.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_there(pid) and len(os.listdir(f"/proc/{pid}/task")) == 1)  # all of its threads are gone
    assert mortal.encode_prompt(encode({"prompt": "fox"})).tolist() == ids
    assert mortal.deaths == 1


def test_one_that_cannot_start_is_an_error_for_each_prompt_and_a_problem_to_tell(tmp_path):
    process = TextProcess(tmp_path, ServiceSettings())
    process.start()
    assert refusal(process, prompt="fox").code == "internal"
    assert process.problem is not None and process.pid is None
    assert refusal(process, prompt="fox").code == "internal"
    assert process.deaths == 1, "it is not tried again at once"


@pytest.mark.nightly
def test_a_reply_that_there_is_no_memory_for_is_not_left_to_the_next_prompt(process, monkeypatch):
    ids = process.encode_prompt(encode({"prompt": "fox"})).tolist()
    deaths, receive = process.deaths, text_process.receive_bytes

    def without_memory(connection, size):
        if size > 1 << 16:
            raise MemoryError
        return receive(connection, size)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(text_process, "receive_bytes", without_memory)
        process.encode_prompt(encode({"prompt": "the fox " * 20_000}))
    assert process.encode_prompt(encode({"prompt": "fox"})).tolist() == ids
    assert process.deaths == deaths + 1


def test_one_that_there_are_no_descriptors_for_is_a_problem_to_tell(folder):
    process = TextProcess(folder, ServiceSettings())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        error = refusal(process, prompt="fox")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.code == "internal" and "cannot be started" in str(error) and process.problem is not None
    assert refusal(process, prompt="fox").code == "internal" and process.pid is None, "it is not tried again at once"


@contextmanager
def worker_with_a_child(folder: Path, prompts: str) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a child, runs the code `prompts`, and prints the child's process id when that says so."""
    code = (
        "import sys, time\nfrom rollout.config import ServiceSettings\n"
        "from rollout.service.text.process import TextProcess\nfrom trainer_bridge.wire.codec import encode\n"
        f"process = TextProcess(sys.argv[1], ServiceSettings())\nprocess.start()\n{prompts}"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        yield parent


@pytest.mark.parametrize("delay_s", [*nightly(0.0, 0.1), 0.5])
def test_it_ends_with_its_worker_also_while_it_starts(folder, delay_s):
    """It learns of a worker that was gone before it looked from the connection."""
    with worker_with_a_child(folder, "print(process.pid, flush=True)\ntime.sleep(600)\n") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(delay_s)
        parent.kill()
        until(lambda: not is_there(pid))


@pytest.mark.nightly
def test_it_ends_with_its_worker_also_in_the_middle_of_a_prompt(folder):
    prompts = (
        "process.encode_prompt(encode({'prompt': 'fox'}))\nprint(process.pid, flush=True)\n"
        "process.encode_prompt(encode({'messages': [{'role': 'user', 'content': 'for ever'}]}))\n"
    )
    with worker_with_a_child(folder, prompts) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        before = ticks(pid)
        until(lambda: ticks(pid) > before + 5)  # it is in the middle of the prompt
        parent.kill()
        until(lambda: not is_there(pid))


def test_the_folder_is_not_needed_once_it_is_up(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    process = TextProcess(copy, ServiceSettings())
    process.start()
    process.encode_prompt(encode({"prompt": "fox"}))
    shutil.rmtree(copy)
    assert len(process.encode_prompt(encode({"messages": CHAT}))) > 0
    process.close()


# --- behind a server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[TextProcess]:
    process = TextProcess(folder, ServiceSettings())
    process.start()
    yield process
    process.close()


@pytest.fixture
def stopped(shared: TextProcess) -> TextProcess:
    """One that works on nothing until it gets SIGCONT."""
    shared.encode_prompt(encode({"prompt": "fox"}))
    os.kill(shared.pid, signal.SIGSTOP)
    return shared


def test_a_death_costs_one_request_an_error_and_the_others_nothing(stopped, folder, caplog):
    with serving(TextCodec(folder), prompts=stopped) as bench:
        client, other = bench.client(), bench.client()
        client.send("generate", "first", messages=CHAT, max_tokens=2)
        client.send("generate", "second", prompt="the fox", max_tokens=2)
        client.send("generate", "third", prompt=[1], max_tokens=2)
        assert client.ask("status", "s")["queue"]["waiting"] == 3
        other.send("generate", "other", prompt=[2], max_tokens=2)
        assert bench.submitted().key[1].startswith("other#"), "prompts of token ids never go through it"
        os.kill(stopped.pid, signal.SIGKILL)
        error = client.receive()
        assert (error["op"], error["id"], error["code"]) == ("error", "first", "internal")
        second, third = bench.submitted(), bench.submitted()
        assert [request.key[1].split("#")[0] for request in (second, third)] == ["second", "third"]
        assert second.prompt.token_ids.tolist() == TextCodec(folder).encode("the fox").tolist()
    (said,) = (record for record in caplog.records if hasattr(record, "status"))
    assert (said.status, said.request) == (-9, "first")


def test_a_prompt_in_preparation_can_be_sent_again_and_cancelled(stopped, folder):
    with serving(TextCodec(folder), prompts=stopped) as bench:
        client = bench.client()
        fields = {"client": "job", "messages": CHAT, "max_tokens": 2}
        client.send("generate", "chat", **fields)
        client.send("generate", "chat", **fields)
        assert client.ask("generate", "chat", **{**fields, "max_tokens": 3})["code"] == "duplicate"
        assert client.ask("cancel", "c", client="job", target="chat")["op"] == "ok"
        os.kill(stopped.pid, signal.SIGCONT)
        request = bench.submitted()
        assert bench.command() == Cancel(request.key) and bench.inbox.empty(), "it is one request"
        bench.finish(request, [], "cancelled")
        assert [client.receive()["op"] for _ in range(2)] == ["result", "result"]


def test_a_drain_begins_behind_the_prompts_that_were_taken(stopped, folder):
    with serving(TextCodec(folder), prompts=stopped) as bench:
        client = bench.client()
        client.send("generate", "chat", messages=CHAT, max_tokens=2)
        client.send("shutdown", "s", mode="drain")
        assert client.ask("status")["state"] == "draining" and bench.inbox.empty()
        os.kill(stopped.pid, signal.SIGCONT)
        assert bench.submitted().key[1].startswith("chat#")
        command = bench.command()
        assert command == Shutdown("drain", command.token)


def test_what_prompts_took_of_a_drain_is_not_given_to_rows_again(stopped, folder):
    with serving(TextCodec(folder), prompts=stopped, drain_s=1.0) as bench:
        client = bench.client()
        began_s = time.monotonic()
        client.send("generate", "chat", messages=CHAT, max_tokens=2)
        client.send("shutdown", "s", mode="drain")
        assert client.ask("status")["state"] == "draining"
        os.kill(stopped.pid, signal.SIGCONT)
        bench.submitted()
        assert [bench.command().mode for _ in range(2)] == ["drain", "now"]
        assert time.monotonic() - began_s >= 1.0


def test_an_end_at_once_does_not_wait_for_prompts_and_ends_drains_with_it(stopped, folder):
    with serving(TextCodec(folder), prompts=stopped) as bench:
        client = bench.client()
        client.send("generate", "chat", messages=CHAT, max_tokens=2)
        client.send("shutdown", "drain", mode="drain")
        client.send("shutdown", "now", mode="now")
        ends = [bench.command(), bench.command()]
        assert [command.mode for command in ends] == ["now", "now"] and ends[0].token != ends[1].token
        os.kill(stopped.pid, signal.SIGCONT)
        assert bench.submitted().key[1].startswith("chat#")
        assert client.ask("ping")["op"] == "ok" and bench.inbox.empty(), "each of them has ended once"


def test_a_prompt_that_never_ends_does_not_hold_a_drain_up(folder):
    process = TextProcess(folder, ServiceSettings())
    process.start()
    with serving(TextCodec(folder), prompts=process, drain_s=0.1) as bench:
        client = bench.client()
        client.send("generate", "slow", messages=ENDLESS, max_tokens=2)
        client.send("shutdown", "s", mode="drain")
        command = bench.command()
        assert command == Shutdown("now", command.token), "what runs had its time to end, too"
        bench.server.stop()
        assert {client.receive()["id"] for _ in range(2)} == {"slow", "s"}
    process.close()
    assert process.deaths == 0, "a requested end is no death"
