"""Who gets in: keys in files, the list of clients, addresses that need CURVE; and that no message runs code."""

import asyncio
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import zmq
import zmq.auth

from rollout.cli.main import main
from rollout.config import SecuritySettings, ServiceSettings, Settings, WeightsSettings
from rollout.engine.gate import Gate
from rollout.engine.messages.statuses import EngineStatus
from rollout.network.access import Access, ClientKeyList, is_loopback
from rollout.service.capabilities import ServedEngine, ServedModel
from rollout.service.server import Server
from rollout.weights.parameter_map import ParameterMap
from rollout.weights.receiver import WeightReceiver
from rollout.weights.staging import make_staging
from rollout.weights.update_intake import UpdateTargets
from rollout.weights.update_memory import UpdateMemories
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from trainer_bridge import AsyncRolloutClient, ClientCurve, RolloutClient, WeightPublisher
from trainer_bridge.wire.errors import AccessRefused, ConnectionLost, RolloutError
from trainer_bridge.wire.keys import make_pair, read_pair, read_public

RELOAD_S = 1.1  # after that the server has read its folder of keys again
WAIT_S = 60.0
SILENCE_S = 0.3  # how long a stranger tries


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rollout keys` makes for the clients `client` and `other`, and a pair of a stranger."""
    folder = tmp_path_factory.mktemp("keys")
    assert main(["keys", str(folder), "--client", "client", "--client", "other"]) == 0
    make_pair(folder, "stranger")
    return folder


def curve(keys: Path, name: str = "client", server: str = "server.key") -> ClientCurve:
    return ClientCurve.from_files(keys / f"{name}.key_secret", keys / server)


def security(keys: Path, clients: Path | None = None) -> SecuritySettings:
    return SecuritySettings(
        curve_secret_key=str(keys / "server.key_secret"), curve_client_keys=str(clients or keys / "clients")
    )


def make_server(settings: SecuritySettings, receiver: WeightReceiver | None = None, bind: str = "") -> Server:
    return Server(
        ServiceSettings(bind=bind or "tcp://127.0.0.1:0"),
        ServedModel("tiny", 100, 1000),
        ServedEngine(SimpleQueue(), EngineStatus, receiver=receiver),
        security=settings,
    )


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    server = make_server(security(keys))
    server.start()
    yield server
    server.stop()
    assert not server.alive and not server.failed


# --- key files --------------------------------------------------------------------------------------------------------


def test_secret_keys_are_their_owners_only_and_public_ones_hold_no_secret(keys: Path) -> None:
    for name in ("server", "client", "other"):
        assert stat.S_IMODE((keys / f"{name}.key_secret").stat().st_mode) == 0o600
    for file in (keys / "server.key", keys / "clients" / "client.key"):
        assert "secret" not in file.read_text()
    assert read_public(keys / "clients" / "client.key") == read_pair(keys / "client.key_secret").public
    assert len({read_pair(keys / f"{name}.key_secret").secret for name in ("server", "client", "other")}) == 3
    assert "secret" not in repr(read_pair(keys / "client.key_secret")).replace("key_secret", "")


def test_secret_keys_are_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret, public = make_pair(tmp_path, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and stat.S_IMODE(public.stat().st_mode) == 0o644


def test_keys_are_never_overwritten(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in keys.rglob("*") if file.is_file()}
    assert main(["keys", str(keys), "--client", "new", "--client", "client"]) == 1
    assert "already has keys of client" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in keys.rglob("*") if file.is_file()} == before


def test_another_client_gets_keys_for_the_same_worker(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    server = (tmp_path / "server.key_secret").read_bytes()
    assert main(["keys", str(tmp_path), "--client", "late"]) == 0
    assert (tmp_path / "server.key_secret").read_bytes() == server
    assert (tmp_path / "clients" / "late.key").is_file() and (tmp_path / "late.key_secret").is_file()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "server"])
def test_a_client_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path / "keys"), "--client", name]) == 2
    assert not list(tmp_path.rglob("x*"))


def test_broken_key_files_are_named(keys: Path, tmp_path: Path) -> None:
    pair = (keys / "client.key_secret").read_text()
    other = (keys / "other.key_secret").read_text()
    secret = [line for line in other.splitlines() if "secret-key" in line][0]
    wrong = {
        "empty": "",
        "short": 'curve\n    public-key = "abc"\n',
        "characters": f'public-key = "{"~" * 40}"\n',
        "twice": pair + pair,
        "mixed": "\n".join(line for line in pair.splitlines() if "secret-key" not in line) + "\n" + secret,
        "huge": pair + "#" * 100_000,
    }
    for name, text in wrong.items():
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(ValueError, match=name):
            read_pair(file)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=str(missing)):
            read_public(missing)


def test_files_of_zeromqs_own_tools_work(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "own")
    pair = read_pair(tmp_path / "own.key_secret")
    assert (pair.public, pair.secret) == zmq.auth.load_certificate(tmp_path / "own.key_secret")
    made, _ = make_pair(tmp_path, "ours")
    assert zmq.auth.load_certificate(made) == (read_pair(made).public, read_pair(made).secret)


# --- addresses --------------------------------------------------------------------------------------------------------

LOOPBACK = ["tcp://127.0.0.1:5757", "tcp://127.8.0.1:0", "tcp://[::1]:1", "ipc:///tmp/x", "inproc://x"]
OPEN = [
    "tcp://*:5757",
    "tcp://0.0.0.0:0",
    "tcp://[::]:1",
    "tcp://10.0.0.1:1",
    "tcp://localhost:1",
    "tcp://eth0:1",
    "tcp://lo:1",
    "tcp://127.0.0.1.example.org:1",
    "tcp://2130706433:1",
    "tcp://:1",
    "udp://127.0.0.1:1",
    "nonsense",
    "",
]


@pytest.mark.parametrize(("endpoints", "loopback"), [(LOOPBACK, True), (OPEN, False)])
def test_only_numbers_of_this_host_count_as_loopback(endpoints: list[str], loopback: bool) -> None:
    assert [endpoint for endpoint in endpoints if is_loopback(endpoint) is not loopback] == []


def weight_receiver(model: TinyModel, bind: str, security: SecuritySettings) -> WeightReceiver:
    settings = WeightsSettings(bind=bind)
    targets = UpdateTargets(ParameterMap(model.views), UpdateMemories(make_staging(model.views, settings)))
    return WeightReceiver(targets, 0, settings, Gate(), security)


@pytest.mark.parametrize("bind", ["tcp://*:0", "tcp://0.0.0.0:0"])
def test_an_open_address_needs_curve_or_insecure(bind: str, keys: Path) -> None:
    for settings, allowed in (
        (SecuritySettings(), False),
        (SecuritySettings(insecure=True), True),
        (security(keys), True),
    ):
        model = TinyModel()
        if not allowed:
            with pytest.raises(ValueError, match=r"service.bind = .*curve_secret_key.*--insecure"):
                make_server(settings, bind=bind)
            with pytest.raises(ValueError, match=r"weights.bind = .*curve_secret_key.*--insecure"):
                weight_receiver(model, bind, settings)
            continue
        server = make_server(settings, bind=bind)
        server.start()
        weight_receiver(model, bind, settings).close()
        server.stop()


@pytest.mark.parametrize(
    "place", ["x", "tcp://127.0.0.1", "tcp://127.0.0.1:65536", "tcp://[::1]:", "tcp://::1:0", "tcp://lo:\u00b2"]
)
def test_an_address_without_a_port_that_there_is_is_none(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ZeroMQ takes 65536 and more for other ports."""
    assert main(["serve", "no-model", "--bind", place]) == 2
    assert f"service.bind = {place} is not an endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--bind", "--weights-bind"])
def test_a_worker_refuses_an_open_address_before_it_loads_a_model(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "no-model"), flag, "tcp://*:0", "--workers", "2"]) == 2
    assert "--insecure" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "no-model"), flag, "tcp://*:0"]) == 2
    assert "--insecure" in capsys.readouterr().err
    other = [] if flag == "--bind" else ["--bind", "tcp://127.0.0.1:0"]  # the default port may be in use
    assert main(["serve", str(tmp_path / "no-model"), flag, "tcp://*:0", *other, "--insecure", "--no-wandb"]) == 1
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--curve-secret-key", "x"], ["--curve-client-keys", "x"]])
def test_half_of_the_curve_settings_is_a_usage_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", *flags]) == 2
    assert "go together" in capsys.readouterr().err


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_an_allowed_client_is_served(server: Server, keys: Path) -> None:
    for name in ("client", "other"):
        with RolloutClient(server.endpoint, timeout_s=WAIT_S, curve=curve(keys, name)) as client:
            assert client.status()["model"] == "tiny"


def test_an_allowed_asyncio_client_is_served(server: Server, keys: Path) -> None:
    async def ask() -> str:
        client = AsyncRolloutClient(server.endpoint, timeout_s=WAIT_S, curve=curve(keys))
        async with client:
            return (await client.status())["model"]

    assert asyncio.run(ask()) == "tiny"


def test_a_key_that_is_not_in_the_list_is_refused_at_once(server: Server, keys: Path) -> None:
    with RolloutClient(server.endpoint, timeout_s=WAIT_S, curve=curve(keys, "stranger")) as client:
        for _ in range(2):
            with pytest.raises(AccessRefused, match="does not allow this client's key"):
                client.ping()


def test_a_client_without_keys_is_refused(server: Server) -> None:
    with RolloutClient(server.endpoint, connect_timeout_s=WAIT_S) as client, pytest.raises(RolloutError) as error:
        client.ping()
    assert "CURVE" in str(error.value)


def test_a_client_that_expects_another_worker_sends_it_nothing(server: Server, keys: Path) -> None:
    """The worker proves its identity: the keys of an impostor do not match."""
    wrong = curve(keys, server="clients/other.key")
    with RolloutClient(server.endpoint, connect_timeout_s=2.0, curve=wrong) as client:
        with pytest.raises(ConnectionLost, match="is the worker's public key"):
            client.ping()


def test_a_client_with_keys_does_not_talk_to_a_worker_without(keys: Path) -> None:
    server = make_server(SecuritySettings())
    server.start()
    with RolloutClient(server.endpoint, connect_timeout_s=WAIT_S, curve=curve(keys)) as client:
        with pytest.raises(RolloutError, match="CURVE"):
            client.ping()
    server.stop()


def send_if_connected(socket: zmq.Socket[bytes], *frames: bytes) -> None:
    """Without waiting: a peer that has been refused already has no connection, and a send would wait for one."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        pass


def test_nothing_of_a_stranger_reaches_the_service(server: Server, keys: Path) -> None:
    context = zmq.Context()
    for keys_of in (None, curve(keys, "stranger")):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        if keys_of is not None:
            keys_of.apply(socket)
        socket.connect(server.endpoint)
        send_if_connected(socket, b"\xc1")
        assert socket.poll(int(SILENCE_S * 1000)) == 0
        socket.close()
    context.term()
    with RolloutClient(server.endpoint, timeout_s=WAIT_S, curve=curve(keys)) as client:
        client.ping()


def test_the_list_follows_its_folder(keys: Path, tmp_path: Path) -> None:
    server = make_server(security(keys, tmp_path))
    server.start()
    stranger = curve(keys, "stranger")
    with RolloutClient(server.endpoint, timeout_s=WAIT_S, curve=stranger) as client:
        with pytest.raises(AccessRefused):
            client.ping()
        (tmp_path / "new.key").write_bytes((keys / "stranger.key").read_bytes())
        time.sleep(RELOAD_S)
        client.ping()
        (tmp_path / "new.key").unlink()
        time.sleep(RELOAD_S)
        client.ping()  # a connection that exists stays
    with RolloutClient(server.endpoint, timeout_s=WAIT_S, curve=stranger) as client, pytest.raises(AccessRefused):
        client.ping()
    server.stop()


def test_a_folder_that_vanishes_or_holds_rubbish_lets_nobody_in(keys: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "bad.key").write_text("nonsense")
    (folder / "secret.key_secret").write_bytes((keys / "client.key_secret").read_bytes())
    (folder / "good.key").write_bytes((keys / "stranger.key").read_bytes())
    allowed = ClientKeyList(folder)
    assert allowed.name_of(read_public(keys / "stranger.key")) == "good"
    assert allowed.name_of(read_public(keys / "clients" / "client.key")) is None
    (folder / "good.key").unlink()
    (folder / "bad.key").unlink()
    (folder / "secret.key_secret").unlink()
    folder.rmdir()
    allowed._loaded_s = -1e9
    assert allowed.name_of(read_public(keys / "stranger.key")) is None
    with pytest.raises(ValueError, match="is not a folder"):
        ClientKeyList(folder)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"1.0", b"1"],
        [b"1.0", b"1", b"rollout", b"::1", b"", b"NULL"],
        [b"1.0", b"1", b"rollout", b"::1", b"", b"PLAIN", b"a", b"b"],
        [b"1.0", b"1", b"rollout", b"::1", b"", b"CURVE", b"short"],
        [b"2.0", b"1", b"rollout", b"::1", b"", b"CURVE", bytes(32)],
    ],
)
def test_whatever_the_list_is_asked_it_says_no(frames: list[bytes], keys: Path) -> None:
    answer = ClientKeyList(keys / "clients").answer(frames)
    assert len(answer) == 6 and answer[2] == b"400"


def test_an_empty_list_is_warned_of_once_a_process(keys: Path, tmp_path: Path, caplog) -> None:
    settings = Settings(security=security(keys, tmp_path))
    for _ in range(2):  # as each socket does
        Access.from_settings(settings.security)
    Access.from_settings(settings.security).check_binds(settings)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_its_list_a_socket_lets_nobody_in(keys: Path) -> None:
    """Fail closed: the thread of the list is not there."""
    access = Access.from_settings(security(keys))
    assert access.clients is not None
    access.clients.serve = lambda context: None  # type: ignore[method-assign]
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.linger = dealer.linger = 0
    access.secure(context, router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    curve(keys).apply(dealer)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    send_if_connected(dealer, b"let me in")
    assert router.poll(int(SILENCE_S * 1000)) == 0
    router.close()
    dealer.close()
    context.term()


def test_what_travels_is_encrypted(server: Server, keys: Path) -> None:
    """A proxy between the two sees neither side's text."""
    import socket as sockets
    import threading

    seen = bytearray()
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    listener = sockets.create_server(("127.0.0.1", 0))

    def pump(source: sockets.socket, target: sockets.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    def relay() -> None:
        inner, _ = listener.accept()
        outer = sockets.create_connection((host, int(port)))
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=relay, daemon=True).start()
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with RolloutClient(endpoint, timeout_s=WAIT_S, client="a-name-in-clear", curve=curve(keys)) as client:
        assert client.status()["model"] == "tiny"
    assert len(seen) > 500 and b"CURVE" in seen
    assert b"a-name-in-clear" not in seen and b"weights_version" not in seen
    listener.close()


# --- the weight transport ---------------------------------------------------------------------------------------------


class SecuredWorker(Worker):
    """The weights harness and a real server, with CURVE on both sockets."""

    def __init__(self, settings: SecuritySettings) -> None:
        super().__init__()
        self.receiver.close()
        self.receiver = weight_receiver(self.model, WeightsSettings().bind, settings)
        self.server = make_server(settings, self.receiver)
        self.server.start()
        self.endpoint = self.server.endpoint

    def close(self) -> None:
        super().close()
        self.server.stop()


@pytest.fixture
def worker(keys: Path) -> Iterator[SecuredWorker]:
    worker = SecuredWorker(security(keys))
    yield worker
    worker.close()


def test_an_allowed_publisher_publishes(worker: SecuredWorker, keys: Path) -> None:
    tensors = new_tensors(worker.model, 1)
    with WeightPublisher(worker.endpoint, curve=curve(keys)) as publisher:
        publisher.publish(tensors, version=1).applied(WAIT_S)
        assert publisher.status()[0]["version"] == 1
    assert serves(worker.model, tensors)


@pytest.mark.parametrize("name", ["stranger", None])
def test_a_publisher_that_is_not_allowed_changes_nothing(name: str | None, worker: SecuredWorker, keys: Path) -> None:
    before = worker.model.snapshot()
    wrong = curve(keys, name) if name else None
    with WeightPublisher(worker.endpoint, begin_s=SILENCE_S, curve=wrong) as publisher:
        with pytest.raises(ConnectionLost, match="CURVE"):
            publisher.publish(new_tensors(worker.model, 1), version=1).applied(WAIT_S)
    assert all(torch.equal(before[key], value) for key, value in worker.model.snapshot().items())


def test_a_stranger_cannot_send_buckets_into_an_allowed_update(worker: SecuredWorker, keys: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(worker.receiver.endpoint)
        send_if_connected(socket, b"WBK1" + bytes(24), bytes(64))
        assert socket.poll(int(SILENCE_S * 1000)) == 0, "buckets of no update are answered, where they are read"
        test_an_allowed_publisher_publishes(worker, keys)
