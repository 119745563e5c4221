"""`/pull_weights` of slime and miles: a checkpoint follows published versions, written here as their format says."""

import json
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow
import pytest
import xxhash
from safetensors.numpy import load_file, save

from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.orders.pulled_checkpoint import pull
from tests.support.gateway.harness import gateway, post, refused
from tests.support.worker.harness import ONES, TWOS
from trainer_bridge.client.launch import WorkerProcess

pytest.importorskip("zstandard", reason="the extra `pull` is not installed")
Tensors = Mapping[str, np.ndarray]


def digest(kind: str, data: bytes) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    if kind == "blake3":
        return str(pytest.importorskip("blake3").blake3(data).hexdigest())
    return xxhash.xxh3_128_hexdigest(data)


def encoded(encoding: str, old: bytes, new: bytes) -> bytes:
    was, now = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (was ^ now).tobytes()
    places = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    numbers = [len(places), *places]
    return b"".join(number.to_bytes(4, "little") for number in numbers) + bytes(new[place] for place in places)


def publish_delta(
    source: Path,
    version: int,
    old: Tensors,
    new: Tensors,
    encoding: str = "xor",
    kind: str = "xxh3-128",
    files: int = 2,
) -> Path:
    """A version of the changes from `old` to `new`, compressed by Arrow's zstd."""
    folder = source / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    changed = [name for name in new if old[name].tobytes() != new[name].tobytes()]
    home = {}
    for part in range(files):
        frames, checks = {}, {}
        for name in changed[part::files]:
            changes = encoded(encoding, old[name].tobytes(), new[name].tobytes())
            frames[name] = np.frombuffer(pyarrow.compress(changes, codec="zstd", asbytes=True), np.uint8)
            checks[name] = digest(kind, new[name].tobytes())
            home[name] = f"model-{part:05d}-of-{files:05d}.safetensors"
        (folder / f"model-{part:05d}-of-{files:05d}.safetensors").write_bytes(save(frames, metadata=checks))
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": kind}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": home}))
    return folder


def publish_full(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(dict(tensors)))
    (folder / "config.json").write_text(json.dumps({"of": folder.name}))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(folder: Path, tensors: Tensors) -> bool:
    found = tensors_of(folder)
    return found.keys() == tensors.keys() and all(np.array_equal(found[name], tensors[name]) for name in tensors)


class Trainer:
    """A base, and versions of it in which some values of some tensors differ."""

    def __init__(self, root: Path, versions: int, large: int = 1) -> None:
        draws = np.random.default_rng(0)
        self.local, self.source = root / "local", root / "source"
        self.source.mkdir()
        first = {f"layer.{n}": draws.integers(0, 1 << 16, (7, 300 * n + 1), np.uint16) for n in range(6)}
        first["large"] = draws.integers(0, 1 << 16, (large,), np.uint16)
        first["untouched"] = draws.integers(0, 1 << 16, (11,), np.uint16)
        self.versions: list[dict[str, np.ndarray]] = [first]
        for _ in range(versions):
            new = {name: tensor.copy() for name, tensor in self.versions[-1].items()}
            for name, tensor in new.items():
                if name != "untouched":
                    flat = tensor.reshape(-1)
                    flat[draws.integers(0, flat.size, max(1, flat.size // 1000))] ^= 1
            self.versions.append(new)
        self.base = publish_full(root / "base", first)

    def delta(self, version: int, encoding: str = "xor", kind: str = "xxh3-128") -> Path:
        return publish_delta(self.source, version, *self.versions[version - 1 : version + 1], encoding, kind)

    def full(self, version: int) -> Path:
        return publish_full(self.source / f"weight_v{version:06d}", self.versions[version])

    def pull(self, version: int) -> None:
        pull(self.local, self.source, version, self.base)

    def has(self, version: int) -> bool:
        return same(self.local, self.versions[version])


@pytest.mark.parametrize(
    ("encoding", "kind"), [("xor", "xxh3-128"), ("overwrite", "xxh3-128"), ("xor", "adler32"), ("overwrite", "blake3")]
)
def test_deltas_are_applied_in_order_onto_the_base(tmp_path: Path, encoding: str, kind: str) -> None:
    trainer = Trainer(tmp_path, 3, large=(5 << 19) + 1)  # more than a chunk
    trainer.pull(0)
    assert trainer.has(0) and (trainer.local / "config.json").exists()
    trainer.delta(1, encoding, kind)
    trainer.pull(1)
    assert trainer.has(1)
    trainer.delta(2, encoding, kind)
    trainer.delta(3, encoding, kind)
    trainer.pull(3)
    trainer.pull(3)  # it is there already
    assert trainer.has(3) and same(trainer.base, trainer.versions[0])


def test_a_fresh_host_begins_with_the_newest_full_version(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 4)
    trainer.full(2)
    trainer.delta(3)
    trainer.delta(4)  # version 1 was removed
    trainer.pull(4)
    assert trainer.has(4)
    assert json.loads((trainer.local / "config.json").read_text()) == {"of": "weight_v000002"}


def test_a_full_version_replaces_the_checkpoint_with_all_its_files(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 2)
    (trainer.base / "old.json").write_text("{}")
    trainer.pull(0)
    trainer.full(1)
    trainer.delta(2)
    trainer.pull(2)
    assert trainer.has(2) and {file.name for file in trainer.local.iterdir() if file.is_file()} == {
        "model.safetensors",
        "config.json",
    }


def test_an_earlier_version_than_the_checkpoint_has_is_built_anew(tmp_path: Path) -> None:
    """The trainer began a new run: what an earlier one left is not taken for it."""
    trainer = Trainer(tmp_path, 2)
    trainer.delta(1)
    trainer.delta(2)
    trainer.pull(2)
    trainer.pull(0)
    assert trainer.has(0)
    trainer.pull(1)
    assert trainer.has(1)


def torn(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def lacks_a_file(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the frames and checksums of the first file."""
    file = folder / "model-00000-of-00002.safetensors"
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    frames, checks = dict(load_file(file)), header["__metadata__"]
    change(frames, checks)
    file.write_bytes(save(frames, metadata=checks))


def wrong_checksum(folder: Path) -> None:
    edit(folder, lambda frames, checks: checks.update({"layer.2": "0" * 32}))


def no_checksum(folder: Path) -> None:
    edit(folder, lambda frames, checks: checks.pop("layer.2"))


def short_frame(folder: Path) -> None:
    edit(folder, lambda frames, checks: frames.update({"layer.2": frames["layer.2"][:-3]}))


def reframed(data: bytes) -> Callable[[Path], None]:
    frame = np.frombuffer(pyarrow.compress(data, codec="zstd", asbytes=True), np.uint8)
    return lambda folder: edit(folder, lambda frames, checks: frames.update({"layer.2": frame}))


def unknown_tensor(folder: Path) -> None:
    def rename(frames: dict[str, Any], checks: dict[str, Any]) -> None:
        frames["other"], checks["other"] = frames["layer.2"], checks["layer.2"]

    edit(folder, rename)


def metadata(**fields: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(index | {"metadata": index["metadata"] | fields}))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *(torn, lacks_a_file, wrong_checksum, no_checksum, short_frame, unknown_tensor, shutil.rmtree),
        *(reframed(b"short"), reframed(bytes(1 << 16))),
        metadata(base_version="000000"),
        metadata(version="000003"),
        metadata(checksum_format="md5"),
        metadata(compression_format="lz4"),
        metadata(delta_encoding="add"),
    ],
)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_that_cannot_be_applied_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], encoding: str
) -> None:
    trainer = Trainer(tmp_path, 2)
    trainer.delta(1, encoding)
    trainer.pull(1)
    damage(trainer.delta(2, encoding))
    with pytest.raises(HttpError) as error:
        trainer.pull(2)
    assert error.value.status == 409 and trainer.has(1)
    shutil.rmtree(trainer.source / "weight_v000002", ignore_errors=True)
    trainer.delta(2, encoding)
    trainer.pull(2)
    assert trainer.has(2)


def test_an_overwritten_byte_past_the_end_of_a_tensor_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1)
    trainer.pull(0)
    past = trainer.versions[0]["layer.2"].nbytes
    reframed(b"".join(number.to_bytes(4, "little") for number in (1, past)) + b"x")(trainer.delta(1, "overwrite"))
    with pytest.raises(HttpError, match="layer"):
        trainer.pull(1)
    assert trainer.has(0)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_version_that_is_torn_changes_nothing(tmp_path: Path, there: bool) -> None:
    trainer = Trainer(tmp_path, 1)
    if there:
        trainer.pull(0)
    file = trainer.full(1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(HttpError, match="torn"):
        trainer.pull(1)
    assert trainer.has(0) if there else not tensors_of(trainer.local)


def test_a_checkpoint_that_was_left_half_written_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path, 1)
    trainer.pull(0)
    trainer.delta(1)
    opened = Path.open

    def full_disk(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
        if mode == "r+b" and threading.current_thread().name.endswith("_1"):
            raise OSError(28, "No space left on device")
        return opened(path, mode, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_disk)
        with pytest.raises(HttpError, match="No space"):
            for _ in range(20):  # until the second thread has written something
                trainer.pull(1)
                trainer.pull(0)
    trainer.pull(1)
    assert trainer.has(1)


def test_files_that_no_pull_wrote_stay_as_they_are(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1)
    trainer.delta(1)
    trainer.local = trainer.base
    with pytest.raises(HttpError) as error:
        trainer.pull(1)
    assert error.value.status == 400 and trainer.has(0) and (trainer.base / "config.json").exists()


def test_two_pulls_at_a_time_apply_each_delta_once(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 2)
    trainer.delta(1)
    trainer.delta(2)
    threads = [threading.Thread(target=trainer.pull, args=(2,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trainer.has(2)


def test_workers_use_a_pulled_checkpoint(worker: WorkerProcess, client: httpx.Client, tmp_path: Path) -> None:
    """As slime orders it: the base, a delta, then the update from the checkpoint."""
    ones, twos = tensors_of(ONES), tensors_of(TWOS)
    body = {"local_checkpoint_dir": "local", "source_dir": "source"}
    (tmp_path / "source").mkdir()
    with gateway([worker.endpoint], weights_root=str(tmp_path)) as other:
        assert post(other, "/pull_weights", body | {"target_version": 0})["success"]
        publish_delta(tmp_path / "source", 1, ones, twos)
        assert refused(other, "/pull_weights", body | {"target_version": 2}, 409) == "target_version"
        assert post(other, "/pull_weights", body | {"target_version": 1})["success"]
        assert same(tmp_path / "local", twos)
        before = other.get("/weight_info").json()["weight_version"]
        update = {"model_path": "local", "weight_version": str(before + 1)}
        assert post(other, "/update_weights_from_disk", update)["success"]
        (choice,) = post(other, "/v1/completions", {"prompt": "17:", "max_tokens": 6})["choices"]
        assert choice["text"] == " 19 21"
    post(client, "/update_weights_from_disk", {"model_path": str(ONES)})


def test_folders_outside_the_root_are_refused(client: httpx.Client, tmp_path: Path) -> None:
    body = {"local_checkpoint_dir": "pulled", "source_dir": "pulled", "target_version": 0}
    for name in ("local_checkpoint_dir", "source_dir"):
        assert refused(client, "/pull_weights", body | {name: str(tmp_path)}, 403) == name
    assert refused(client, "/pull_weights", body | {"local_checkpoint_dir": "."}) == "local_checkpoint_dir"
    assert refused(client, "/pull_weights", body | {"target_version": -1}) == "target_version"
