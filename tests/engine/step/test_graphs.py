"""Captured decode steps without a GPU: what would be captured is run anew at each replay, on the same buffers.

It shows which graph a step takes, its padding, and what a replay reads and writes; not that CUDA can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.config import EngineSettings
from rollout.engine import build_steps
from rollout.engine.device.streams import DeviceStream
from rollout.engine.messages.to_engine import PutAdapter
from rollout.engine.step.device_step import DeviceStep
from rollout.engine.step.graphs import (
    NO_GRAPHS,
    DecodeGraphs,
    capturable,
    captured_sizes,
    capturing,
    forward_sizes,
    graph_sizes,
)
from rollout.engine.upload import RowNeeds
from rollout.models.decoder import Decoder
from rollout.models.layers import SparseFeedForward
from rollout.models.spec import DenseSpec, MoESpec, RouterSpec
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.harness import Bench, load
from tests.support.models.families import make_checkpoint

SHAPED = {"top_k": 5, "presence_penalty": 0.3}


class Recorder:
    """In the place of torch.cuda, for CPU engines."""

    def __init__(self) -> None:
        self.under_way: Recording | None = None
        self.pools: list[object] = []  # of the captures
        self.replays: list[tuple[str, int]] = []  # kind and rows of each replay
        self._handles = count()

    def CUDAGraph(self) -> Recording:  # noqa: N802 -- torch's name
        return Recording(self)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self._handles)

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()


class Recording:
    """In the place of a CUDA graph."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.replay: Callable[[], object] | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.recorder.under_way is None and capture_error_mode == "thread_local"  # weights may arrive
        self.recorder.under_way = self
        self.recorder.pools.append(pool)

    def capture_end(self) -> None:
        self.recorder.under_way = None


class RecordedGraphs(DecodeGraphs):
    _stream = SimpleNamespace(synchronize=lambda: None)

    def __init__(
        self, recorder: Recorder, step: DeviceStep, compute: DeviceStream, max_context: int, most: int
    ) -> None:
        super().__init__(step, compute, max_context, most, recorder)
        self.recorder, self.captured_sizes, self.vocab = recorder, list[int](), step.model.spec.vocab

    def _capture(self, slots, size):
        self.captured_sizes.append(size)
        super()._capture(slots, size)

    def run_whole(self, step, slot):
        recording, whole = self.recorder.under_way, super().run_whole
        if recording is None:
            return whole(step, slot)
        recording.replay = lambda: (self.recorder.replays.append(("whole", len(step["rows"]))), whole(step, slot))

    def run_forward(self, step, experts, features=RowNeeds.NONE):
        recording, forward = self.recorder.under_way, super().run_forward
        if recording is None:
            return forward(step, experts, features)
        logits = torch.zeros(len(step["rows"]), self.vocab)
        kind = "adapted" if features else "forward"
        recording.replay = lambda: (
            self.recorder.replays.append((kind, len(logits))),
            logits.copy_(forward(step, experts, features)),
        )
        return logits


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    """Makes CPU engines capture."""
    recorder = Recorder()

    def make(step: DeviceStep, compute: DeviceStream, max_context: int, most: int) -> DecodeGraphs:
        return RecordedGraphs(recorder, step, compute, max_context, most) if most else NO_GRAPHS

    monkeypatch.setattr(build_steps, "make_graphs", make)
    monkeypatch.setattr(build_steps, "capturable", lambda model: True)
    return recorder


@pytest.mark.parametrize("most", [1, 5, 33, 256, 512, 1000, 4096])
def test_a_step_wastes_at_most_a_fifth_of_its_rows_or_three(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert size - (below + 1) <= max(3, size / 5)


def test_every_step_of_512_rows_is_captured_unless_asked_otherwise():
    engine = EngineSettings(max_rows=512)
    assert captured_sizes(min(engine.step_rows, engine.cuda_graph_rows)).size_for(512) == 512


@pytest.fixture
def replays(recorder) -> list[tuple[str, int]]:
    """The replays of CPU engines that capture, (kind, rows)."""
    return recorder.replays


def run(model, prompt_of, **fields) -> list[list[int]]:
    bench = Bench(model, max_rows=11, **fields)
    assert bench.engine.executor.captures == (fields.get("cuda_graph_rows", 256) > 0)
    for i in range(9):
        shaped = SHAPED if i == 4 else {}
        bench.submit(f"r{i}", prompt_of(5 + 3 * i, i), 12 + i, sampling={"temperature": 1.0, "seed": i, **shaped})
    bench.run()
    tokens = [bench.tokens(f"r{i}") for i in range(9)]
    bench.close()
    return tokens


def test_captured_steps_give_the_tokens_of_launched_ones(model, prompt_of, replays):
    launched = run(model, prompt_of, cuda_graph_rows=0)
    assert not replays
    assert run(model, prompt_of) == launched
    kinds = set(replays)
    assert {size for kind, size in kinds if kind == "forward"} <= set(forward_sizes(graph_sizes(11)))
    assert ("forward", 11) in kinds and ("whole", 4) in kinds, "a row whose logits change takes all rows along"


def test_captured_steps_tell_the_experts_of_launched_ones(tmp_path, prompt_of, replays):
    """Whole steps write to the slot, forwards that the slots share to a record of their own."""
    make_checkpoint("mixtral", tmp_path)
    model, told = load(tmp_path), []
    for captured in (False, True):
        bench = Bench(model, max_rows=6, cuda_graph_rows=256 * captured, routing=True)
        for i in range(6):
            prompt = [token % 71 for token in prompt_of(5 + 3 * i, i)]
            shaped = SHAPED if i == 4 else {}
            bench.submit(f"r{i}", prompt, 12 + i, routing_from=0, sampling={"temperature": 1.0, "seed": i, **shaped})
        bench.run()
        told.append([np.concatenate(bench.completions[f"r{i}", 0].routing).tolist() for i in range(6)])
        bench.close()
    assert told[0] == told[1]
    assert {kind for kind, _ in replays} == {"whole", "forward"}


def test_rows_that_ask_for_the_likeliest_tokens_take_the_graph_that_ends_at_the_logits(model, prompt_of, replays):
    told = []
    for captured in (False, True):
        bench = Bench(model, max_rows=6, cuda_graph_rows=256 * captured)
        for i in range(6):
            sampling = {"temperature": 1.0, "seed": i, **(SHAPED if i == 2 else {})}
            bench.submit(f"r{i}", prompt_of(9 + i, i), 8 + 4 * i, sampling=sampling, logprobs=(0, 2, 3, 0, 1, 0)[i])
        bench.run()
        told.append([(bench.tokens(f"r{i}"), bench.completions[f"r{i}", 0].top_ids) for i in range(6)])
        bench.close()
    assert told[0] == told[1] and len(told[0][4][1]) == 24
    kinds = [kind for kind, _ in replays]
    assert "forward" in kinds and kinds[-2:] == ["whole", "whole"], "whole again without such a request"


def test_steps_with_adapters_take_graphs_of_their_own(model, prompt_of, replays):
    told = []
    for captured in (False, True):
        bench = Bench(model, max_rows=6, cuda_graph_rows=256 * captured, adapter_slots=2, adapter_rank=4)
        for i in range(2):
            weights = random_adapter(model.spec, 4, torch.float32, i, scale=0.3)
            bench.engine.inbox.put(PutAdapter(f"a{i}", weights))
        for i in range(6):
            sampling = {"temperature": 1.0, "seed": i, **(SHAPED if i == 2 else {})}
            adapter = (None, "a0", "a1", "a0", None, None)[i]
            bench.submit(f"r{i}", prompt_of(9 + i, i), 8 + 4 * i, sampling=sampling, adapter=adapter)
        bench.run()
        told.append([bench.tokens(f"r{i}") for i in range(6)])
        bench.close()
    assert told[0] == told[1]
    kinds = [kind for kind, _ in replays]
    assert set(kinds) == {"adapted", "whole"} and kinds[-2:] == ["whole", "whole"], "whole again without an adapter"


def test_larger_steps_than_captured_are_launched_singly(model, prompt_of, replays):
    launched = run(model, prompt_of, cuda_graph_rows=0)
    assert run(model, prompt_of, cuda_graph_rows=4) == launched
    assert replays and {size for _, size in replays} <= {1, 2, 3, 4}


def test_progress_is_reported_for_every_size_largest_first(model, recorder):
    bench, told = Bench(model, max_rows=6, cuda_graph_rows=0), []
    executor = bench.engine.executor
    made = RecordedGraphs(recorder, executor.step, executor.compute, 1024, 6)
    made.capture(list(bench.engine.pipeline.free_slots), lambda done, total: told.append((done, total)))
    assert made.captured_sizes == [6, 4, 3, 2, 1] and told == [(i, 5) for i in range(1, 6)]
    assert made.count == 2 * 5 + 4 and made.kept_bytes == (1 + 2 + 4) * bench.engine.executor.step.rows.vocab * 4


def test_all_captures_of_an_engine_share_one_memory_pool(model, recorder):
    bench = Bench(model, max_rows=6)
    assert len(recorder.pools) == bench.engine.executor.graphs.count and len(set(recorder.pools)) == 1


def test_a_forward_that_is_to_be_measured_reads_the_slots_input(model, replays):
    bench = Bench(model, max_rows=6)
    slot = bench.engine.pipeline.free_slots[0]
    slot.input.fill_(1)
    step = bench.engine.executor.graphs.captured(slot, 3)
    forward = bench.engine.executor.graphs.forwards[3, False, False]
    assert step.logits_SV.shape[0] == 3 and forward.step.words.eq(1).all() and step.forward is forward.graph


def test_a_capture_that_fails_is_ended_and_says_why():
    recorder = Recorder()
    with pytest.raises(KeyError, match="why"), capturing(Recording(recorder), None):
        raise KeyError("why")
    assert recorder.under_way is None


class OneLayer(Decoder):
    """As much of a decoder as `capturable` asks for."""

    def __init__(self, embed, spec, layers):
        torch.nn.Module.__init__(self)
        self.embed, self.spec, self.layers = embed, spec, layers


def model_of(feed_forward, on_gpu, dtype):
    """What `capturable` asks of a model of one layer."""
    moe = feed_forward if isinstance(feed_forward, MoESpec) else None
    block = SimpleNamespace(spec=feed_forward, reads_host=SparseFeedForward.reads_host and moe is not None)
    layer = SimpleNamespace(blocks=(SimpleNamespace(spec=None, reads_host=False), block))
    spec = SimpleNamespace(moe=moe, layers=[SimpleNamespace(blocks=(feed_forward,))])
    return OneLayer(SimpleNamespace(is_cuda=on_gpu, dtype=dtype), spec, [layer])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_dense_models_on_a_gpu_are_captured(on_gpu):
    model = model_of(DenseSpec(64, 32, bias=False), on_gpu, torch.float32)
    assert capturable(model) == on_gpu


def test_a_new_block_that_reads_on_the_host_is_not_captured():
    model = model_of(DenseSpec(64, 32, bias=True), True, torch.bfloat16)
    assert capturable(model)
    for block in model.layers[0].blocks:
        block.reads_host = True
        assert not capturable(model)
        block.reads_host = False


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "width", "captured"),
    [
        (True, torch.bfloat16, 32, True),
        (True, torch.float16, 32, True),
        (True, torch.float32, 32, False),
        (True, torch.bfloat16, 33, False),
        (False, torch.bfloat16, 32, False),
    ],
)
def test_experts_are_captured_where_the_fused_kernels_run_them(on_gpu, dtype, width, captured):
    moe = MoESpec(hidden=64, experts=4, intermediate=width, router=RouterSpec("softmax", 2, renormalize=True))
    model = model_of(moe, on_gpu, dtype)
    assert capturable(model) == captured
