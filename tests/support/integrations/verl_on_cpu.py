"""A platform of verl for CPUs, so that its own trainers run in tests: `VERL_PLATFORM=cpu` and this module's name in
`VERL_USE_EXTERNAL_MODULES`.

verl has platforms for accelerators only. All that its engine does on one is done by torch on the CPU; what it asks of
the accelerator's memory is answered with 0.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

_plain_init = torch.distributed.init_process_group


def _init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
    """torch's, which refuses the backend that verl makes of a platform's device: one for the CPU, twice."""
    _plain_init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)


torch.distributed.init_process_group = _init_process_group


def _nothing(*args: Any, **options: Any) -> None:
    pass


DEVICE = types.SimpleNamespace(
    **dict.fromkeys(("empty_cache", "synchronize", "set_device", "ipc_collect", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda *args: 0
    ),
    mem_get_info=lambda *args: (0, 1),
    is_available=lambda: False,
    current_device=lambda: "cpu",
    device_count=lambda: 1,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    get_device_name=lambda *args: "CPU",
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """A GPU's place is a CPU's; Ray counts it as a GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
