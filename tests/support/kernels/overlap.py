"""Kernels in a graph on a GPU that begin before their predecessors have ended, and the same kernels one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

_REPLAYS = 20


def replay_with_and_without(
    monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], run: Callable[[], torch.Tensor]
) -> list[torch.Tensor]:
    """Capture `run` twice, the second time without overlap of the kernels of `modules`; the results of all replays."""
    results = []
    for overlap in (True, False):
        with monkeypatch.context() as patch:
            if not overlap:
                for module in modules:
                    patch.setattr(module, "follow_options", lambda device: {})
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
        for _ in range(_REPLAYS):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            results.append(out.clone())
    return results
