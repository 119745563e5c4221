"""Measures the cost of constraints in a decode step, and the gain of a forward that does not wait for the masks.

    PYTHONPATH=.:kernels python -m scripts.bench.constraints --shape qwen3-8b --rows 32 --out FILE

Random weights of the real shape, a synthetic tokenizer with as many tokens, and an endless JSON schema: an array of
objects with strings, numbers and choices. No rows, a quarter of them and all of them are constrained, in two ways. In
`ahead` the forward of the next step runs while the host commits, computes masks and uploads them. In `waiting` it
begins after all of that, as in an engine that draws in the forward (the blocking loop, masks first). The time of a step
is the wall time between commits; `held_ms` is the mean time that the device waits for masks between forward and draw.

--longest limits the number of characters of names. Inside of such a string xgrammar checks tokens one by one, which
takes milliseconds per mask.
"""

import argparse
import copy
import itertools
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout.config import EngineSettings, Settings
from rollout.constraints.compiler import ConstraintCompiler
from rollout.constraints.constraint_spec import ConstraintSpec
from rollout.constraints.matcher import ANYTHING
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import make_device
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams, StopParams
from rollout.engine.messages.to_engine import Submit
from rollout.engine.messages.to_service import Finish
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.step.slot import Slot
from rollout.engine.upload import RowNeeds, Upload, UploadStaging
from rollout.models import LoadedModel
from scripts.bench.output import print_table, write_results
from scripts.bench.peers.ours_engine import load_random, steady_figures
from scripts.bench.shapes import SHAPES

STOP = "<|end|>"
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1_000_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["point", "box", "outline"]},
            "x": {"type": "number"},
            "y": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "x", "y"],
        "additionalProperties": False,
    },
}


def make_tokenizer(folder: Path, tokens: int) -> Any:
    """A byte-level tokenizer with a vocabulary of words and fragments of JSON."""
    from transformers import AutoTokenizer

    rng = random.Random(0)
    letters = [*string.ascii_letters, *string.digits, *'{}[]",:.-', "Ġ"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict.fromkeys(alphabet)
    while len(texts) < tokens - 1:
        texts["".join(rng.choices(letters, k=rng.randint(2, 9)))] = None
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(STOP, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


class Bench:
    """Engines of one model, and the constraint of their rows."""

    def __init__(self, shape: str, device: str, longest: int | None) -> None:
        self.device = make_device(device)
        self.loaded: LoadedModel = load_random(shape, self.device.torch_device)
        vocab = self.loaded.spec.vocab
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = make_tokenizer(Path(folder), vocab)
        self.stop: int = tokenizer.eos_token_id
        self.compiler = ConstraintCompiler(tokenizer, vocab, 120.0)
        schema = copy.deepcopy(SCHEMA)
        if longest is not None:
            schema["items"]["properties"]["name"]["maxLength"] = longest
        began_s = time.perf_counter()
        self.constraint = self.compiler.compile(ConstraintSpec("json_schema", json.dumps(schema)), (self.stop,), [])
        self.compile_s = time.perf_counter() - began_s

    def engine(self, rows: int, tokens: int, waiting: bool) -> Engine:
        """An engine whose KV holds all rows to their end."""
        pages = rows * (-(-tokens // 16) + 1) + 2
        chosen = EngineSettings(
            max_rows=rows,
            max_context_tokens=tokens,
            kv_pages=pages,
            pipeline_depth=1 if waiting else 2,
            prefix_cache=False,
            mask_s=30.0,
        )
        settings, emit = Settings(engine=chosen), SimpleQueue[Any]().put
        built = build_engine(settings, self.device, self.loaded.model, local_links(settings, emit))
        if waiting:
            masks_first(built)
        return built

    def measure(self, engine: Engine, rows: int, prompt: int, new: int, bound: int) -> dict[str, float]:
        """Medians of the second half of the steps, with `bound` constrained rows."""
        vocab, rng, before = self.loaded.spec.vocab, np.random.default_rng(bound), engine.meter.steps
        for i in range(rows):
            request = Request(
                ("bench", f"{bound}-{before}-{i}"),
                Prompt.of_tokens(rng.integers(0, vocab, prompt).astype(np.int32)),
                new,
                sampling=SamplingParams(seed=i),
                stop=StopParams((self.stop,) if i < bound else ()),
                constraint=self.constraint if i < bound else ANYTHING,
            )
            engine.inbox.put(Submit(request))
        engine.tick()
        while engine.busy:
            engine.tick()
        taken = engine.meter.recent_steps()[-(engine.meter.steps - before) :]
        steps = [step for step in taken if step.kind == "decode" and step.rows == rows]
        steps = steps[len(steps) // 2 :]
        held = [0.0 if step.mask_wait is None else step.mask_wait[1] - step.mask_wait[0] for step in steps]
        return {**steady_figures(steps), "held_ms": statistics.mean(held) * 1e3}


def masks_first(engine: Engine) -> None:
    """Compute the masks of a step before its forward is launched; for the blocking loop."""
    build, pack, execute = engine.masks.build, engine.parts.packer.pack, engine.executor.execute
    packed: list[Plan] = []
    made: list[list[tuple[Sequence, Finish]]] = []

    def packing(plan: Plan, staging: UploadStaging) -> Upload:
        packed[:] = [plan]
        return pack(plan, staging)

    def executing(upload: Upload, slot: Slot) -> None:
        if packed[0].draws_later:
            made.append(build([seq for seq in packed[0].sampled if seq.group.needs & RowNeeds.CONSTRAIN], slot.masks))
        execute(upload, slot)

    engine.masks.build = lambda seqs, masks: made.pop()  # type: ignore[method-assign, assignment, return-value]
    engine.parts.packer.pack = packing  # type: ignore[method-assign]
    engine.executor.execute = executing  # type: ignore[method-assign]


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the rows of the table, one by one."""
    bench = Bench(args.shape, args.device, args.longest)
    print(f"compiled in {bench.compile_s:.2f} s", flush=True)
    for waiting, rows in itertools.product((True, False), args.rows):
        engine = bench.engine(rows, args.prompt + args.new, waiting)
        bench.measure(engine, rows, args.prompt, 16, rows)  # warm
        for bound in (0, -(-rows // 4), rows):
            figures = bench.measure(engine, rows, args.prompt, args.new, bound)
            way = "waiting" if waiting else "ahead"
            row = {"way": way, "rows": rows, "constrained": bound, **{k: round(v, 3) for k, v in figures.items()}}
            print(json.dumps(row), flush=True)
            yield row
        engine.check_integrity()
        engine.executor.close()
        del engine


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--longest", type=int, help="most characters of a name; default: no limit")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = list(cases(args))
    print_table(f"{args.shape}, constrained rows", rows)
    write_results(args.out, rows, shape=args.shape, longest=args.longest)


if __name__ == "__main__":
    main()
