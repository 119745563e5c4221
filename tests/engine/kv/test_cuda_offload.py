"""KV of preempted sequences through pinned memory and CUDA streams: transformers' tokens, and no step that waits."""

import pytest
import torch

from rollout.engine.messages.to_engine import PutAdapter
from rollout.models.peft_tensors import AdapterPacker, load_peft_folder
from tests.support.engine.cuda_harness import no_allocation, no_waiting
from tests.support.engine.harness import Bench, load
from tests.support.models.families import make_checkpoint
from tests.support.peft_adapters import make_adapter, merged

pytestmark = pytest.mark.gpu


def cuda_bench(model, **fields) -> Bench:
    from rollout.engine.device.streams import make_device

    return Bench(model, make_device("cuda"), **fields)


@pytest.mark.parametrize(("depth", "piece_mib"), [(1, 0.004), (2, 0.004), (2, 32.0)])
def test_offloaded_rows_have_transformers_tokens(folders, prompt_of, greedy, depth, piece_mib):
    bench = cuda_bench(
        load(folders[0], "cuda"), kv_pages=40, pipeline_depth=depth, host_kv_gib=0.01, host_kv_piece_mib=piece_mib
    )
    memory = bench.engine.executor.mover.host_memory
    assert all(memory.page(number, torch.uint8).is_pinned() for number in range(memory.pages))
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    status = bench.status().offload
    assert status.restored == status.parked > 0 and status.bytes_in > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)
        assert bench.completions[f"r{i}", 0].recomputed == ()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_pages_come_back_bit_for_bit(folders, kv_dtype):
    bench = cuda_bench(load(folders[0], "cuda"), kv_pages=40, kv_dtype=kv_dtype, host_kv_gib=0.001)
    mover, tensors = bench.engine.executor.mover, bench.engine.executor.step.kv.tensors
    for tensor in tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape, device="cuda").to(tensor.dtype))
    torch.cuda.synchronize()
    before = [tensor[[7, 30]].clone() for tensor in tensors]
    mover.out.start([7, 30], [3, 1], None)
    mover.wait()
    assert not mover.out.finished()[0].failure
    mover.back.start([11, 12], [3, 1], None, mover.compute)
    mover.wait()
    assert not mover.back.finished()[0].failure
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[11, 12]], was)


def test_copying_allocates_and_synchronises_nothing(folders):
    bench = cuda_bench(load(folders[0], "cuda"), kv_pages=60, host_kv_gib=0.001)
    mover = bench.engine.executor.mover

    def round_trip() -> None:
        mover.out.start([7, 30], [3, 1], None)
        mover.back.start([11, 12], [3, 1], None, mover.compute)
        for queue in (mover.out, mover.back):
            queue.under_way[0].end.synchronize()
            assert not queue.finished()[0].failure

    round_trip()  # kernels are loaded at their first use
    with no_allocation(), no_waiting():
        round_trip()


@pytest.mark.parametrize("captured", [True, False])
def test_offloaded_rows_come_back_with_their_adapters(tmp_path, prompt_of, captured):
    base = make_checkpoint("qwen3", tmp_path / "base")
    model, references = load(tmp_path / "base", "cuda"), []
    bench = cuda_bench(
        model,
        cuda_graph_rows=256 * captured,
        kv_pages=40,
        adapter_slots=2,
        adapter_rank=16,
        host_kv_gib=0.01,
        page_size=4,
    )
    for i in range(2):
        folder = make_adapter(base, tmp_path / str(i), i)
        weights = load_peft_folder(folder, model.spec, 16, torch.float32, AdapterPacker(pinned=True))
        bench.engine.inbox.put(PutAdapter(f"a{i}", weights))
        references.append(merged(base, folder))
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60, adapter=f"a{i % 2}")
    bench.run()
    status = bench.status().offload
    assert status.restored == status.parked > 0 and status.bytes_in > 0
    for i in range(6):
        prompt, got = prompt_of(10, i), bench.tokens(f"r{i}")
        with torch.no_grad():
            logits = references[i % 2](torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        took = logits[torch.arange(len(got)), torch.tensor(got)]
        assert (logits.max(-1).values - took).max() < 5e-3 and bench.completions[f"r{i}", 0].recomputed == ()
