"""What tests on a GPU share: a bf16 model there, a check of steady steps, and a watch on compilation."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.device.streams import _CudaClock
from rollout.models import load_model
from rollout.models.decoder import Decoder
from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint

#: Sizes of a small model, for a config of transformers: the fused kernels take them.
FUSED_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}

TokensAndLogprobs = dict[str, tuple[list[int], list[float]]]


def load_bf16(folder: Path) -> Decoder:
    """The model of a checkpoint, in bf16 on the GPU."""
    return load_model(ModelSettings(path=str(folder), dtype="bfloat16"), torch.device("cuda")).model


def make_fused_checkpoint(folder: Path) -> Path:
    """A small checkpoint of sizes that the fused kernels take."""
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint("qwen3", folder, vocab_size=4001, head_dim=64, max_position_embeddings=1024, **shape)
    return folder


def use_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines made from now on run the modules instead of the fused kernels."""
    monkeypatch.setattr("rollout.engine.step.device_step.supports", lambda model: False)


def assert_steady(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode cost no allocation and no synchronisation but one event a step; then run to the end."""
    bench.ticks(20)
    monkeypatch.setattr(_CudaClock, "_RENEW_MS", 0.5)  # every few steps instead of every few thousand
    with no_allocation():
        tick_without_waiting(bench)
    bench.run()


def assert_one_launch_a_step(bench: Bench, steps: int = 32) -> None:
    """Of rows that decode a step is one graph launch, one copy to the device and one from it, and nothing else."""
    bench.ticks(20)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        bench.ticks(steps)
        torch.cuda.synchronize()
    calls = Counter(event.name for event in profiler.events())
    assert calls["cudaGraphLaunch"] == steps, calls
    assert calls["cudaMemcpyAsync"] == 2 * steps, calls
    assert not [name for name in calls if "LaunchKernel" in name or name.startswith(("cudaMemset", "cudaMalloc"))], (
        calls
    )


def tick_without_waiting(bench: Bench) -> None:
    """100 steps, and an error if one of them waits for the device other than by its event."""
    with no_waiting():
        bench.ticks(100)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the device, other than by an event, is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def no_allocation() -> Iterator[None]:
    """What stands inside allocates no device memory, not even from torch's own pool."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    yield
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def tokens_and_logprobs(bench: Bench) -> TokensAndLogprobs:
    """What each request got, by its name."""
    done = {name: completion for (name, _), completion in bench.completions.items()}
    return {name: (completion.token_ids, completion.logprobs) for name, completion in sorted(done.items())}


def watch_compilation(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of every Triton kernel that is compiled from now on."""
    from triton.runtime.jit import JITFunction

    compiled, compile_it = [], JITFunction._do_compile

    def compile_and_tell(self, *rest):
        compiled.append(self.fn.__name__)
        return compile_it(self, *rest)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_and_tell)
    return compiled
