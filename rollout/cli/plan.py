"""`rollout plan`: prints how a worker would divide the memory of a GPU, without that GPU and without the weights."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli import serve
from rollout.cli.parser import CommandError, Parser, UsageError
from rollout.config import Settings
from rollout.settings_sources import SettingsError, flags_hint, load_settings, setting_keys

if TYPE_CHECKING:
    from rollout.memory_plan import Machine, MemoryPlan, Outline

DESCRIPTION = (
    "Print how a worker would divide the memory of a GPU, from config.json and the headers of the weights alone. Every "
    "setting of `rollout serve` is a flag here, too. Without --gpu each kind of GPU gets a line; with --device cpu the "
    "plan is for this machine's CPU. Exit code 1: it does not fit."
)
_GIB = 2**30


def add_arguments(parser: Parser) -> None:
    """Declare the arguments: all of `rollout serve`, and the machine."""
    serve.add_arguments(parser)
    parser.usage, parser.description = "rollout plan MODEL [--gpu NAME] [--gpus N] [--SETTING VALUE ...]", DESCRIPTION
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--gpu", metavar="NAME|GIB", help="kind of GPU, such as h200, or its memory in GiB (a GPU with fp8)"
    )
    for flag, path in (
        ("--gpus", "engine.tensor_parallel"),
        ("--context", "engine.max_context_tokens"),
        ("--rows", "engine.max_rows"),
    ):
        key = next(key for key in setting_keys() if key.path == path)
        group.add_argument(flag, metavar="N", dest=path, default=argparse.SUPPRESS, help=f"the same as {key.flag}")
    group.add_argument("--host-memory", metavar="GIB", type=float, help="free memory of the host; not known without it")
    group.add_argument("--json", action="store_true", help="print JSON, one object a line")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    given = vars(args)
    flags = {key.path: given[key.path] for key in setting_keys() if key.path in given}
    try:
        settings = load_settings(args.config, os.environ, flags)
    except SettingsError as error:
        raise UsageError(f"{error}{flags_hint(str(error), flags)}") from error
    if not settings.model.path:
        raise UsageError("no model: name a checkpoint folder or a hub id, as in: rollout plan MODEL --gpu h200")
    if args.gpu is not None and settings.model.device == "cpu":
        raise UsageError("--gpu and --device cpu exclude each other: leave one flag out")
    if args.host_memory is not None and not 0 < args.host_memory < float("inf"):
        raise UsageError(f"--host-memory is {args.host_memory:g}: give the GiB that are free")
    from rollout.checkpoint_folder import resolve_folder

    try:
        machines = _machines(args, settings)
    except ValueError as error:
        raise UsageError(f"--gpu: {error}") from error
    try:
        folder = resolve_folder(settings.model.path, settings.model.revision, weights=False)
        named = settings.engine.speculation_model
        draft = None if named is None else resolve_folder(named, None, weights=False)
        with _quiet():
            plans = _plans(settings, machines, folder, draft)
    except ValueError as error:
        raise CommandError(f"{error}{flags_hint(str(error), flags)}") from error
    if args.json:
        for plan in plans:
            print(json.dumps(plan.fields()))
    elif args.gpu is None and len(plans) > 1:
        print("\n".join(_table(plans)))
    else:
        print("\n".join(_lines(plans[0])))
    return int(not any(plan.fits for plan in plans))


@contextmanager
def _quiet() -> Iterator[None]:
    """Log only errors in this block: loading a model logs more than a plan needs."""
    log = logging.getLogger("rollout")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _machines(args: argparse.Namespace, settings: Settings) -> list[Machine]:
    from rollout.memory_plan import GPUS, Machine

    if settings.model.device == "cpu":
        return [Machine.this_cpu()]
    host = float("inf") if args.host_memory is None else args.host_memory * _GIB
    names = list(GPUS) if args.gpu is None else [args.gpu]
    return [Machine.gpu(name)._replace(host=host) for name in names]


def _plans(settings: Settings, machines: list[Machine], folder: Path, draft: Path | None) -> list[MemoryPlan]:
    """A plan for each machine. If there is one machine and the model does not fit, its plan has advice."""
    from rollout.memory_plan import outline, plan_outline

    shapes = outline(settings, folder, draft)
    plans = []
    for machine in machines:
        try:
            plans.append(plan_outline(settings, machine, shapes))
        except ValueError:  # such as fp8 on a GPU without fp8
            if len(machines) == 1:
                raise
    if not plans:
        raise ValueError("no GPU of the table can run these settings: name one with --gpu for the reason")
    if len(plans) == 1 and not plans[0].fits:
        plans[0].advice.extend(_advice(settings, machines[0], folder, draft, shapes))
    return plans


def _advice(settings: Settings, machine: Machine, folder: Path, draft: Path | None, shapes: Outline) -> Iterator[str]:
    """Changes that make the plan fit. Each is tried; a size gets its first value that fits."""
    from rollout.memory_plan import outline, plan_outline

    engine, spec, on_gpu = settings.engine, shapes.model.spec, machine.target.kind == "cuda"
    context = engine.max_context_tokens or spec.max_positions
    contexts: list[dict[str, Any]] = []
    while (context := context // 2) >= 1024:
        contexts.append({"max_context_tokens": context})
    kv = [{"kv_dtype": "fp8_e4m3"}] if engine.kv_dtype == "auto" else []
    coded = [{"weight_dtype": "fp8_block"}] if shapes.model.format == "plain" and on_gpu else []
    both = [{**a, **b} for a in kv for b in coded]
    gpus = [{"tensor_parallel": n} for n in (2, 4, 8) if n > engine.tensor_parallel and on_gpu]
    flags = {key.path: key.flag for key in setting_keys()}
    outlines = {(engine.weight_dtype, engine.tensor_parallel): shapes}
    found = False
    for sizes in (contexts, kv, coded, both, gpus):
        for change in sizes:
            tried = settings.model_copy(update={"engine": engine.model_copy(update=change)})
            made_for = tried.engine.weight_dtype, tried.engine.tensor_parallel
            try:
                if made_for not in outlines:
                    outlines[made_for] = outline(tried, folder, draft)
                fits = plan_outline(tried, machine, outlines[made_for]).fits
            except ValueError:  # the model or the GPU does not allow this change
                continue
            if fits:
                found = True
                yield " ".join(f"{flags[f'engine.{name}']} {value}" for name, value in change.items())
                break
    if not found:
        yield "a GPU with more memory, or a smaller model"


def _table(plans: list[MemoryPlan]) -> Iterator[str]:
    """A line for each machine."""
    pool = next((plan.pool for plan in plans if plan.pool is not None), None)
    context = "full" if pool is None else str(pool.context)
    quarter = "a quarter" if pool is None else str(max(1, pool.context // 4))
    first = plans[0]
    yield f"weights {_gib(first.weights)} a GPU ({first.dtype}), {first.ranks} GPU{'s' * (first.ranks > 1)}"
    columns = ("GPU", "MEMORY", "UPDATE", "KV POOL", "KV TOKENS", f"ROWS OF {context}", f"ROWS OF {quarter}")
    rows = [columns]
    for plan in plans:
        if plan.pool is None:
            rows.append((plan.machine, _gib(plan.total), "does not fit", "", "", "", ""))
            continue
        length = plan.pool.context
        counts = str(plan.rows_of(length)), str(plan.rows_of(max(1, length // 4)))
        memory = _gib(plan.total), plan.staging.replace("_", " "), _gib(plan.kv_pool), str(plan.pool.tokens)
        rows.append((plan.machine, *memory, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield "`--gpu NAME` says how the memory is divided, and what helps where it does not fit."


def _lines(plan: MemoryPlan) -> Iterator[str]:
    each = f" (each of {plan.ranks})" if plan.ranks > 1 else ""
    yield f"{plan.machine}{each}: {_gib(plan.total)}"
    at = {"device": "in GPU memory", "host": "in host memory", "in_place": "none: updates are written in place"}
    source = "" if plan.from_headers else "; from config.json, as no safetensors are there"
    rows: list[tuple[str, str, str]] = [("weights", _gib(plan.weights), f"{plan.dtype}{source}")]
    on_device = _gib(plan.update) if plan.staging == "device" else ""
    where = f"{at[plan.staging]}{f', {_gib(plan.update)}' if plan.staging == 'host' else ''}"
    rows.append(("staging of updates", on_device, where))
    rows.append(("state of rows", _gib(plan.row_state), ""))
    rows += [
        (name, _gib(size), "")
        for name, size in (
            ("states of linear attention", plan.states),
            ("adapters", plan.adapters),
            ("embeddings of images", plan.images),
            ("buffers for KV on the host", plan.kv_buffers),
        )
        if size
    ]
    if plan.steps:
        made = "estimate from the pools that workers measured; a worker measures its own"
        rows.append(("working memory of steps", _gib(plan.steps), made))
    if plan.pool is not None:
        tokens = f"{plan.pool.tokens} tokens in {plan.pool.pages} pages, {plan.kv_dtype}"
        rows.append(("KV pool", _gib(plan.kv_pool), tokens))
        rows.append(("kept free", _gib(plan.fields()["bytes_a_rank"]["kept_free"]), ""))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, size, note in rows:
        yield f"  {name.ljust(widths[0])}  {size.rjust(widths[1])}  {note}".rstrip()
    if plan.host_kv_tokens:
        states = f" and {plan.host_states} states" if plan.host_states else ""
        yield f"host: KV of {plan.host_kv_tokens} tokens{states} of each GPU"
    if plan.host_adapters:
        yield f"host: adapters take up to {_gib(plan.host_adapters)}"
    if plan.pool is not None:
        quarter = max(1, plan.pool.context // 4)
        yield (
            f"rows that fit: {plan.rows_of(plan.pool.context)} of {plan.pool.context} tokens, {plan.rows_of(quarter)} "
            f"of {quarter}; max_rows is {plan.pool.max_rows}"
        )
    yield from _warnings(plan)


def _warnings(plan: MemoryPlan) -> Iterator[str]:
    pool = plan.pool
    if plan.problem is not None:
        yield f"does not fit: {plan.problem}"
    elif pool is not None and not plan.fits:
        yield f"does not fit: a sequence can have {pool.longest} tokens only, and the context is {pool.context}"
    elif pool is not None and plan.rows_of(pool.context) < pool.max_rows:
        yield (
            f"only {plan.rows_of(pool.context)} of max_rows = {pool.max_rows} rows fit at full length: if more become "
            "as long, the youngest give up their pages and are computed again later"
        )
    for change in plan.advice:
        yield f"it fits with: {change}" if change.startswith("--") else f"it needs {change}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
