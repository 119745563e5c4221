"""Weights over process groups, held against the packages whose trainers use them.

Single source files are read from their wheels, which `make test-integrations` downloads and does not install: TRL would
import an installed vllm. They are `init_custom_process_group` of SGLang and AReaL, and the packing of vLLM's weight
transfer.
"""

import importlib.util
import random
import socket
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.bridge.group_trainer import trainer
from tests.support.bridge.harness import Worker, new_tensors, serves
from trainer_bridge.transports.torch_group.group_member import cut
from trainer_bridge.wire.manifest import pack

WHEELS = Path(sys.prefix) / "wheels"


def source(package: str, file: str, folder: Path) -> Path:
    """A source file of a package's wheel, in `folder`."""
    wheels = list(WHEELS.glob(f"{package}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of {package} in {WHEELS}: make test-integrations downloads it")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{package}/{file}", folder))


@pytest.mark.parametrize(
    ("package", "file"), [("sglang", "srt/utils/common.py"), ("areal", "engine/core/distributed.py")]
)
def test_a_worker_meets_the_group_of_a_real_helper(package: str, file: str, tmp_path: Path) -> None:
    with Worker() as worker, trainer(HELPER=str(source(package, file, tmp_path))) as sender:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        sender.join(port, 2, "weights")
        told = {"kind": "torch", "backend": "gloo", "host": "127.0.0.1", "port": port, "rank": 1, "size": 2}
        assert worker.control(action="join", group="weights", meeting=told) == {"op": "ok"}
        assert sender.done() == {"ok": True}
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            save_file(tensors, tmp_path / "weights.safetensors")
            rows: list[list[Any]] = [[name, str(each.dtype)[6:], list(each.shape)] for name, each in tensors.items()]
            sender.broadcast("weights", tmp_path / "weights.safetensors", list(tensors))
            answer = worker.control(action="gather", group="weights", part=0, tensors=rows, packed_bytes=None)
            assert answer["missing"] == [] and sender.done() == {"ok": True}
            manifest = pack(version, [tuple(row) for row in rows], 1 << 20).to_wire()
            update = {"version": version, "manifest": manifest, "transport": "torch_group", "options": {}}
            token = worker.control(action="begin", **update)["token"]
            assert worker.control(action="commit", token=token, options={})["version"] == version
            assert serves(worker.model, tensors)


def test_packed_broadcasts_are_cut_as_vllm_cuts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = source("vllm", "distributed/weight_transfer/packed_tensor.py", tmp_path)
    spec = importlib.util.spec_from_file_location("packed_tensor_of_vllm", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.randrange(1, 40) for _ in range(draw.randrange(1, 30))]
        limit = draw.randrange(1, 60)
        tensors = iter([(str(place), torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)])
        chunks = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are larger than a broadcast
            while (chunk := module.pack_tensors(tensors, lambda item: item[1], limit)) is not None:
                chunks.append(chunk.tensor_sizes)
        assert cut(sizes, limit) == chunks
