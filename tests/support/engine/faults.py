"""Steps that fail."""

import pytest

from rollout.engine.device.streams import DeviceError
from tests.support.engine.harness import Bench


def fault(*_: object) -> None:
    raise RuntimeError("no such kernel")


def fail_a_step(bench: Bench) -> str:
    """Have a closure on the compute stream raise amid generation; returns what the engine was failed with."""
    over = bench.device.event()
    bench.engine.executor.compute.run(fault)
    bench.engine.executor.compute.record(over)
    over.synchronize()
    with pytest.raises(DeviceError, match="no such kernel") as caught:
        bench.run()
    bench.engine.fail(str(caught.value))
    return str(caught.value)
