"""Updates of a tensor group whose ranks are on GPUs: pinned memory, streams, and pieces that go from GPU to GPU."""

import mmap
import random
from pathlib import Path

import pytest
import torch

from rollout.models.cut import Cut, CutView
from rollout.ranks.follower_updates import FollowerUpdates
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit, ParameterMap
from rollout.weights.pinned_memory import PinnedMemory
from rollout.weights.staging import WeightStaging
from tests.support.bridge.harness import TinyModel, new_tensors
from tests.support.bridge.tensor_group import GroupWorker, TinyShard
from tests.support.worker.harness import check, launch, tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.triton_fingerprint import _fingerprint_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_rank_keeps_its_part_on_a_gpu(tmp_path: Path, transport: str, staging: str, stacked: bool) -> None:
    with GroupWorker(2, relay_bytes=1 << 10, block_bytes=256, device="cuda", staging=staging) as worker:
        assert worker.receiver.summary()["staging"] == staging
        with WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=192) as publisher:
            for version in range(1, 5):
                sent = new_tensors(TinyModel(), version, stacked=stacked)
                publisher.publish({name: tensor.cuda() for name, tensor in sent.items()}, version).applied(60)
                assert worker.serve(sent)


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("staging", ["device", "host"])
def test_large_tensors_are_cut_on_their_way(staging: str, source: str) -> None:
    """Tensors larger than a copy, cut by rows, by columns and by both halves of columns, in pieces of odd sizes."""
    shapes = {"rows": (6000, 3000), "columns": (6000, 3000), "halves": (40, 100, 4000), "whole": (3000, 1000)}
    cuts: dict[str, Cut | None] = {
        "rows": Cut(0, 6000, ((1500, 4500),)),
        "columns": Cut(1, 3000, ((1000, 2000),)),
        "halves": Cut(2, 4000, ((500, 1000), (2500, 3000))),
        "whole": None,
    }
    views, wanted, sent = {}, {}, {}
    for name, shape in shapes.items():
        whole, cut = torch.randn(shape, device="cuda").bfloat16(), cuts[name]
        kept = [i for begin, end in cut.ranges for i in range(begin, end)] if cut is not None else []
        part = whole if cut is None else whole.index_select(cut.dim, torch.tensor(kept, device="cuda"))
        views[name], wanted[name], sent[name] = CutView.of(torch.zeros_like(part), cut), part, whole
    payload = Payload(sent, 1, 64 << 20)
    stream = torch.empty(payload.manifest.total_bytes, dtype=torch.uint8, device="cuda")
    for index in range(payload.manifest.bucket_count):
        payload.pack_bucket(index, stream[payload.manifest.bucket_span(index)[0] :])
    stream = stream.cpu().pin_memory() if source == "cpu" else stream
    own = WeightStaging(StagedMemory(views, staging, shard=True))  # type: ignore[arg-type]
    draws = random.Random(0)
    for _ in range(2):
        own.open(payload.manifest, ManifestFit(tuple(shapes), ()))
        marks = sorted({0, stream.numel(), *(64 * draws.randrange(stream.numel() // 64) for _ in range(9))})
        pieces = list(zip(marks[:-1], marks[1:], strict=True))
        draws.shuffle(pieces)
        for start, end in pieces:
            event = own.take(start, stream[start:end])
            assert event is not None
        own.abandon()
        own.check()
        for target, staged in own.memory.copies():
            target.copy_(staged, non_blocking=True)
        torch.cuda.synchronize()
        for name, part in wanted.items():
            view = views[name]
            kept_part = view.kept_part if isinstance(view, CutView) else view
            assert torch.equal(kept_part, part), name
            kept_part.zero_()


def test_a_follower_compiles_the_check_of_buckets_at_its_start() -> None:
    _fingerprint_kernel.device_caches.clear()
    views = TinyShard(1, 2, device="cuda").views
    pieces, manifest = (SharedMemory.create(name, 1 << 12) for name in ("pieces", "manifest"))
    reports = RankReports(SharedMemory.create("lines", RankReports.line_bytes()), 1)
    FollowerUpdates(ParameterMap(views), WeightStaging(StagedMemory(views, shard=True)), pieces, manifest, reports, 0)
    assert _fingerprint_kernel.device_caches


def test_memory_is_pinned_until_it_is_collected_and_a_refusal_is_no_error_of_later_kernels() -> None:
    pages = torch.frombuffer(mmap.mmap(-1, 3000), dtype=torch.uint8)  # no whole number of pages
    pins = PinnedMemory()
    for _ in range(2):
        pins.add(pages)
        assert pages.is_pinned()
    again = PinnedMemory()
    again.add(pages)  # CUDA refuses what is pinned already
    assert torch.ones(8, device="cuda").sum().item() == 8
    del again
    assert pages.is_pinned()
    del pins
    assert not pages.is_pinned()
    once_more = PinnedMemory()
    once_more.add(pages)
    assert pages.is_pinned()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("staging", ["device", "host"])
def test_updates_of_a_worker_on_two_gpus_by_every_transport(tmp_path: Path, staging: str) -> None:
    flags = {"tensor_parallel": 2, "device": "cuda", "max_rows": 8, "max_context_tokens": 4096, "staging": staging}
    versions: dict[int, int] = {0: 1}
    with launch(log=tmp_path / "worker.log", **flags) as worker, RolloutClient(worker.endpoint, timeout_s=60) as client:
        version = 0
        for transport, device in (("cuda_ipc", 0), ("nccl", 1), ("shm", 0), ("zmq", 1), ("disk", 0), ("auto", 0)):
            with WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path)) as publisher:
                for step in (2, 1):
                    version += 1
                    versions[version] = step
                    sent = {name: tensor.to(f"cuda:{device}") for name, tensor in tensors(step).items()}
                    (report,) = publisher.publish(sent, version).applied(60)
                    assert report.transport == transport or transport == "auto"
                    (completion,) = client.generate("17:", max_tokens=40).completions
                    check("17:", completion, versions)
    assert "go through the host" not in (tmp_path / "worker.log").read_text(), "pieces on a GPU stay on GPUs"
