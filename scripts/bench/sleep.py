"""Measures sleep and wake of an engine whose rows decode: seconds, and the device memory that is freed.

    PYTHONPATH=.:kernels python -m scripts.bench.sleep --shape qwen3-8b --out scripts/bench/results/sleep_h200.json

Through the whole engine with random weights. A row of the table is one sleep and the wake after it:

    sleep_s, wake_s    from the order to its answer; a sleep includes the steps in flight and copies of weights and KV
    parked             rows whose KV is kept on the host; the KV of other rows is computed again
    freed_gib          memory that the driver reports as freed, and its share of weights and KV
    back_s             from the wake (level 2: from the update after it) until all rows decode again
    same               a request that runs alone has the same tokens as before any sleep

The first row of each level includes the allocation of pinned memory. `plain` is the median decode step of the same
engine without `engine.sleep`, `step_ms` with it; the difference is the cost of releasable memory. After level 2 the
same random weights arrive as an update. The exit status is 1 if a token differs or less than 95 % was freed. `--device
cpu --shape toy` tries the script on a CPU.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import Device, make_device
from rollout.engine.messages.requests import SamplingParams
from rollout.engine.messages.to_engine import Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Event, Failed
from rollout.engine.sizing import weight_bytes
from rollout.models import LoadedModel, load_model
from rollout.models.decoder import Decoder
from rollout.models.language_model import native
from rollout.models.random_init import fill_random
from scripts.bench.driver import Driver, random_prompt
from scripts.bench.output import print_table, write_results
from scripts.bench.shapes import SHAPES, write_checkpoint

_GIB = 2**30
_LEAST_FREED = 0.95
_ALONE = 64  # most tokens of the request that runs alone


class SameWeights:
    """An update with the weights from before the sleep."""

    nbytes = 0

    def __init__(self, version: int, model: Decoder) -> None:
        self.version, self.names = version, tuple(model.hf_views())
        self._model = model

    def copy_into(self) -> None:
        """Draw them again."""
        fill_random(self._model, 0)


class Updates:
    """A receiver that offers the update in `ready`, if there is one."""

    alive = True

    def __init__(self) -> None:
        self.ready: SameWeights | None = None

    def rest(self) -> None:
        """No-op: the receiver keeps nothing."""

    def take_ready(self) -> SameWeights | None:
        """It, once."""
        ready, self.ready = self.ready, None
        return ready

    def applied(self, update: Any, pause_s: float) -> None:
        """No-op: no publisher waits."""

    def refused(self, update: Any, message: str) -> None:
        """No update can be refused: raises RuntimeError."""
        raise RuntimeError(message)

    def failed(self, update: Any, message: str) -> None:
        """No update can fail: raises RuntimeError."""
        raise RuntimeError(message)


class SleepDriver(Driver):
    """An engine, ticked by hand, that takes orders."""

    def __init__(self, settings: Settings, device: Device, model: Decoder) -> None:
        self.updates, self.answers = Updates(), 0
        self.answered: dict[int, Done | Failed] = {}
        super().__init__(settings, device, model, self.updates)

    def order(self, kind: type[Sleep] | type[WakeUp], *fields: Any) -> tuple[float, dict[str, int | float]]:
        """Give an order; returns the seconds to the answer, and its facts. Raises RuntimeError for a failure."""
        self.answers += 1
        began_s = time.perf_counter()
        self.engine.inbox.put(kind(*fields, token=self.answers))  # type: ignore[misc]
        while self.answers not in self.answered:
            self.engine.tick()
        answer = self.answered[self.answers]
        if isinstance(answer, Failed):
            raise RuntimeError(answer.message)
        return time.perf_counter() - began_s, dict(answer.facts)

    def _take(self, events: list[Event]) -> None:
        self.answered |= {event.token: event for event in events if isinstance(event, (Done, Failed))}
        super()._take([event for event in events if not isinstance(event, (Done, Failed))])


def settings_of(args: argparse.Namespace, sleep: bool) -> Settings:
    """Rows and KV of all measurements."""
    context = args.prompt + args.new
    engine = EngineSettings(
        max_rows=args.rows,
        max_context_tokens=context,
        prefill_chunk_tokens=min(2048, context),
        kv_pages=args.kv_pages,
        kv_memory_max_gib=args.kv_gib,
        prefix_cache=False,
        sleep=sleep,
        host_kv_gib=args.host_kv_gib if sleep else 0.0,
    )
    return Settings(engine=engine)


def begin_rows(driver: SleepDriver, args: argparse.Namespace, vocab: int, name: str) -> None:
    """Submit the rows, and tick until all of them decode."""
    for i in range(args.rows):
        prompt = random_prompt(vocab, args.prompt, i)
        driver.submit(f"{name}-{i}", prompt, args.new, SamplingParams(temperature=1.0, seed=i), stream_every=1)
    driver.tick_until(lambda: len(driver.engine.roster.decoding) == args.rows)


def step_ms(driver: SleepDriver, args: argparse.Namespace) -> float:
    """The median decode step of all rows."""
    for _ in range(args.steps):
        driver.engine.tick()
    steps = [step for step in driver.engine.meter.recent_steps()[-args.steps :] if step.kind == "decode"]
    return 1e3 * statistics.median(step.end_s - step.start_s for step in steps if step.rows == args.rows)


def alone(driver: SleepDriver, args: argparse.Namespace, vocab: int, name: str) -> list[int]:
    """Tokens of a request that runs alone."""
    sampling = SamplingParams(temperature=1.0, seed=99)
    driver.submit(name, random_prompt(vocab, args.prompt, 99), min(_ALONE, args.new), sampling)
    driver.finish()
    return driver.completions[name].tokens


def one_round(
    driver: SleepDriver, device: Device, loaded: LoadedModel, args: argparse.Namespace, level: int, number: int
) -> dict[str, Any]:
    """Let rows decode, sleep, wake, and let them continue."""
    memory, vocab = driver.engine.sleeper.memory, loaded.spec.vocab
    begin_rows(driver, args, vocab, f"rows{level}-{number}")
    before_ms = step_ms(driver, args)
    before = free_bytes(device)
    sleep_s, slept = driver.order(Sleep, level)
    freed = free_bytes(device) - before
    wake_s, _ = driver.order(WakeUp)
    began_s = time.perf_counter()
    if level == 2:
        driver.updates.ready = SameWeights(driver.engine.roster.version + 1, native(loaded.model))
    while len(driver.engine.roster.decoding) < args.rows:
        driver.engine.tick()
    back_s = time.perf_counter() - began_s
    after_ms = step_ms(driver, args)
    driver.drop_all()
    return {
        "level": level,
        "sleep_s": sleep_s,
        "wake_s": wake_s,
        "back_s": back_s,
        "parked": slept["parked"],
        "freed_gib": freed / _GIB,
        "memory_gib": memory.nbytes / _GIB,
        "freed_share": freed / memory.nbytes,
        "weights_gib": weight_bytes(loaded.model) / _GIB,
        "step_ms": before_ms,
        "step_after_ms": after_ms,
    }


def free_bytes(device: Device) -> int:
    """Memory in use by the driver's account (on a CPU: the system's)."""
    device.synchronize()
    return torch.cuda.mem_get_info()[0] if device.torch_device.type == "cuda" else device.free_bytes()


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of results, printed at once, and the facts of the whole run."""
    device = make_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        model_settings = ModelSettings(path=str(write_checkpoint(args.shape, Path(folder))), load_format="random")
        loaded = load_model(model_settings, device.torch_device)
    plain = SleepDriver(settings_of(args, sleep=False), device, native(loaded.model))
    begin_rows(plain, args, loaded.spec.vocab, "plain")
    facts: dict[str, Any] = {"shape": args.shape, "batch": args.rows, "plain_step_ms": step_ms(plain, args)}
    plain.drop_all()
    plain.close()
    del plain
    gc.collect()
    driver = SleepDriver(settings_of(args, sleep=True), device, native(loaded.model))
    tokens = alone(driver, args, loaded.spec.vocab, "before")
    rows = []
    for level in args.levels:
        for number in range(args.repeat):
            row = one_round(driver, device, loaded, args, level, number)
            row["same"] = alone(driver, args, loaded.spec.vocab, f"after{level}-{number}") == tokens
            rows.append(row)
            print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}), flush=True)
    driver.close()
    return rows, facts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--levels", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100, help="decode steps in a median")
    parser.add_argument("--kv-gib", type=float, default=40.0)
    parser.add_argument("--kv-pages", type=int, default=None, help="pages of KV, instead of --kv-gib")
    parser.add_argument("--host-kv-gib", type=float, default=0.0, help="host memory for the KV of sleeping rows")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    rows, facts = measure(args)
    print_table(f"{args.shape}, {args.rows} rows; a step without it {facts['plain_step_ms']:.3f} ms", rows)
    write_results(args.out, rows, **facts)
    given_back = args.device == "cpu" or all(row["freed_share"] >= _LEAST_FREED for row in rows)
    return 0 if given_back and all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
