"""A failure on a device is reported, never hidden."""

import pytest
import torch

from rollout.engine.device.streams import CpuEvent, CpuStream, DeviceError
from tests.support.engine.harness import Bench


def test_logits_that_are_not_finite_end_their_rows_with_an_error(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 50, sampling={"temperature": 1.0, "seed": 1})
    bench.ticks(6)
    bench.engine.executor.compute.run(lambda: model.norm.weight.fill_(float("nan")))
    bench.run()
    done = bench.completions["a", 0]
    assert done.finish.reason == "error" and "not finite" in done.finish.error
    assert 0 < len(done.token_ids) < 50 and all(torch.tensor(done.logprobs).isfinite())


@pytest.mark.parametrize("fault", [RuntimeError("broken"), SystemExit(3)], ids=["an error", "an exit"])
def test_a_failed_stream_raises_and_does_not_block(fault):
    stream, event, ran = CpuStream("test"), CpuEvent(), []

    def fail() -> None:
        raise fault

    stream.run(fail)
    stream.run(lambda: ran.append(1))
    stream.record(event)
    event.synchronize()
    with pytest.raises(DeviceError):
        stream.check()
    assert not ran, "what follows a fault does not run"
    stream.close()
