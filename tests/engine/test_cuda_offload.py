"""KV of preempted sequences through pinned memory and CUDA streams: transformers' tokens, and no step that waits."""

from __future__ import annotations

import pytest
import torch
from harness import Bench, load

pytestmark = pytest.mark.gpu


def cuda_bench(model, **fields) -> Bench:
    from rollout.engine.device import make_device

    return Bench(model, make_device("cuda"), **fields)


@pytest.mark.parametrize(("depth", "piece_mib"), [(1, 0.004), (2, 0.004), (2, 32.0)])
def test_offloaded_rows_have_transformers_tokens(folders, prompt_of, greedy, depth, piece_mib):
    bench = cuda_bench(
        load(folders[0], "cuda"), kv_pages=40, pipeline_depth=depth, host_kv_gib=0.01, host_kv_piece_mib=piece_mib
    )
    assert all(block.is_pinned() for block in bench.engine.runner.mover.room._blocks_HW)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    status = bench.engine.status().offload
    assert status.restored == status.parked > 0 and status.bytes_in > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)
        assert bench.completions[f"r{i}", 0].recomputed == ()
    bench.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_pages_come_back_bit_for_bit(folders, kv_dtype):
    bench = cuda_bench(load(folders[0], "cuda"), kv_pages=40, kv_dtype=kv_dtype, host_kv_gib=0.001)
    mover, tensors = bench.engine.runner.mover, bench.engine.runner.kv.tensors
    for tensor in tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape, device="cuda").to(tensor.dtype))
    torch.cuda.synchronize()
    before = [tensor[[7, 30]].clone() for tensor in tensors]
    mover.out.start([7, 30], [3, 1], None)
    mover.wait()
    assert not mover.out.landed()[0].failure
    mover.back.start([11, 12], [3, 1], None, mover.compute)
    mover.wait()
    assert not mover.back.landed()[0].failure
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[11, 12]], was)
    bench.close()


def test_copying_allocates_and_synchronises_nothing(folders):
    bench = cuda_bench(load(folders[0], "cuda"), kv_pages=60, host_kv_gib=0.001)
    mover = bench.engine.runner.mover

    def round_trip() -> None:
        mover.out.start([7, 30], [3, 1], None)
        mover.back.start([11, 12], [3, 1], None, mover.compute)
        for lane in (mover.out, mover.back):
            lane.flying[0].end.synchronize()
            assert not lane.landed()[0].failure

    round_trip()  # kernels are loaded at their first use
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_trip()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    bench.close()
