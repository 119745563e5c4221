"""Makes the pages of tables of docs/benchmarks from the summaries; `scripts.bench.charts` writes them.

A page has a topic, a table one figure. Below a table of figures stands how it was measured, as its summaries say it.
Aims are targets of this project; they are in no summary, so they stand here.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.agents.loads import LOADS
from scripts.bench.agents.trace import FIELDS as TRACE_FIELDS
from scripts.bench.summaries import Cell, Row, figure, ratio, row, rows, source, summary, value

_ROWS = (1, 8, 32, 128)
_SHAPES = {"8B": "8b", "30B-A3B": "30b_a3b"}
_BESIDE = ("floor", "here", "over floor", "vLLM", "vLLM over here")
Where = Mapping[str, Any]
#: A column of a table: the field of a row, or how its cell is made.
Column = str | Callable[[Row], Cell]


@dataclass(frozen=True)
class Table:
    """One table: `files` are the summaries that its cells come from, `note` is what a reader must know of it."""

    title: str
    head: Sequence[str]
    cells: Sequence[Sequence[Cell]]
    files: Sequence[str]
    note: str = ""


def columns(title: str, files: str | Sequence[str], shown: Mapping[str, Column], note: str = "", **where: Any) -> Table:
    """A table with a line for each row of `files` that has the values of `where`."""
    files = (files,) if isinstance(files, str) else files
    found = [found for name in files for found in rows(name, **where)]
    cells = [[_cell(one, column) for column in shown.values()] for one in found]
    return Table(title, list(shown), cells, files, note)


def across(table: Table, by: str, head: Sequence[str]) -> Table:
    """The same figures with a column for each value of the column `by`, and a line for each value of `head`.

    A cell has the other columns, separated by slashes. Of two measurements of the same thing the later one counts.
    """
    places = [table.head.index(name) for name in head]
    own = [place for place in range(len(table.head)) if place not in places and table.head[place] != by]
    found: dict[tuple[Cell, ...], dict[Cell, str]] = {}
    for cells in table.cells:
        line = found.setdefault(tuple(cells[place] for place in places), {})
        line[cells[table.head.index(by)]] = " / ".join(figure(cells[place]) for place in own)
    values = dict.fromkeys(cells[table.head.index(by)] for cells in table.cells)
    columns = sorted(values, key=lambda cell: (isinstance(cell, str), cell))  # numbers first
    lines = [[*line, *(cells.get(column) for column in columns)] for line, cells in found.items()]
    shown = " / ".join(table.head[place] for place in own)
    note = f"By {by}{f': {shown}' if len(own) > 1 else ''}. {table.note}".strip()
    return Table(table.title, [*head, *map(figure, columns)], lines, table.files, note)


def beside(name: str, works: Mapping[str, Where], field: str = "ms", aims: Sequence[Cell] = ()) -> list[list[Cell]]:
    """Lines with floor, here, over floor, vLLM and ratio, for works that were measured; then the aims, if any."""
    found: list[list[Cell]] = []
    floor = "floor_s" if field.endswith("_s") else "floor_ms"
    for (label, where), aim in zip(works.items(), aims or [None] * len(works), strict=True):
        floors = (value(name, floor, engine=engine, **where) for engine in ("here", "vllm"))
        least = next((found for found in floors if found is not None), None)
        here, vllm = (value(name, field, engine=engine, **where) for engine in ("here", "vllm"))
        if here is not None or vllm is not None:
            cells: list[Cell] = [label, least, here, ratio(here, least, ""), vllm, ratio(vllm, here)]
            found.append([*cells, aim] if aims else cells)
    return found


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 8 rows."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cell(found: Row, column: Column) -> Cell:
    return found.get(column) if isinstance(column, str) else column(found)


def _contexts(contexts: Iterable[int]) -> dict[str, Where]:
    return {
        f"{count} x {context // 1024}K": {"experiment": "contexts", "rows": count, "context": context}
        for count in _ROWS
        for context in contexts
    }


def _times(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:.3f}x" if abs(number - 1) < 0.02 else f"{number:.2f}x"


# --- the pages ---


def _decode() -> list[Table]:
    note = "Prompts of 128; 512 new tokens, 256 of them from 256 rows on. ms is (t(n) - t(1)) / (n - 1)."
    side, steady, moe = "peers_8b_side_h200", "peers_8b_decode_h200", "peers_30b_a3b_side_h200"

    def shape(title: str, name: str, many: str, counts: Sequence[int], aims: Sequence[float]) -> Table:
        works = [{f"{n}": {"experiment": "decode", "rows": n} for n in group} for group in (_ROWS, counts)]
        cells = [*beside(name, works[0], aims=aims[:4]), *beside(many, works[1], aims=aims[4:])]
        return Table(f"{title}, ms a step", ("rows", *_BESIDE, "aim"), cells, (name, many), note)

    jobs: list[list[Cell]] = []
    for title, name, aims in (("8B", side, (192, None)), ("30B-A3B", moe, (287, 80))):
        here, vllm = (row(name, experiment="long_job", engine=engine) or {} for engine in ("here", "vllm"))
        for part, aim in zip(("total", "tail"), aims, strict=True):
            ours, theirs = here[f"{part}_s"], vllm[f"{part}_s"]
            floor = here["floor_s" if part == "total" else "tail_floor_s"]
            label = title if part == "total" else f"{title}, the last tenth of the completions"
            jobs.append([label, floor, ours, ratio(ours, floor, ""), theirs, ratio(theirs, ours), aim])

    def engines(label: str, field: str, **where: Any) -> list[Cell]:
        return [label, *(value(side, field, engine=engine, **where) for engine in ("here", "vllm", "transformers"))]

    transformers = [engines(f"{counted(n, 'row')}, ms a step", "ms", experiment="decode", rows=n) for n in _ROWS]
    transformers.append(engines("32 rows x 8,192 tokens, s (floor 61.6, aim 70)", "total_s", experiment="post"))
    for new in (3, 30):
        label = f"512 prompts of 700, {new} new tokens, requests/s"
        transformers.append(engines(label, "requests_per_s", experiment="short", new=new))
    starts = [
        [label, *(_ready(name, engine) for engine in ("ours", "vllm", "transformers"))]
        for label, name in (("8B, cold kernel caches", side), ("8B, warm", steady), ("30B-A3B, cold", moe))
    ]
    quantised = columns(
        "30B-A3B with quantised experts, ms a step",
        ("decode_30b_a3b_fp8_last_h200", "decode_30b_a3b_mxfp8_last_h200"),
        {"rows": "rows", "floor": "floor_ms", "here": "steady_ms", "over floor": "over_floor"},
        "The first lines are fp8 in blocks, the others mxfp8. They were measured with attention in bf16; the commands "
        "code attention, too. Aims: 1.9 at 1 row, 8.5 at 32. No peer.",
    )
    codes = "decode_8b_fp8_activations_h200"
    coded = columns(
        "8B with weights in fp8 blocks, ms a step",
        codes,
        {"rows": "rows", "weights": "weights", "floor": "floor_ms", "here": "steady_ms", "over floor": "over_floor"},
        "Codes: activations are codes from 33 rows on, which adds a relative error of 0.026 to a product. Contexts up "
        "to 336. Aims of fp8 at 1, 8, 32 and 128 rows: 2.4, 2.6, 3.0, 4.9. No peer in this run.",
    )
    prefilled = Table(
        "8B with weights in fp8 blocks, prefill of 4,096",
        ("weights", "tokens/s"),
        [[found["weights"], found["prefill_tokens_per_s"]] for found in summary(codes)["prefill"]],
        (codes,),
        "Aim of fp8: 65,000.",
    )
    small = columns(
        "Qwen3-0.6B, ms a step",
        "decode_06b_h200",
        {"rows": "rows", "floor": "floor_ms", "here": "steady_ms", "over floor": "over_floor"},
        "Prompts of 128, 257 new tokens. Aims: 0.55, 0.65, 0.85, 1.6, 2.5, 4.4. Where the time is: "
        "[a layer](kernels.md#a-layer-of-06b-us-in-the-order-of-its-kernels), measured with taller tiles for the gates "
        "at 128 rows.",
    )
    return [
        shape("Qwen3-8B", steady, "rows_8b_h200", (256, 512), (3.9, 4.1, 4.8, 6.5, 10.6, 19.0)),
        shape("Qwen3-30B-A3B", moe, "rows_30b_a3b_h200", (256,), (2.4, 7.0, 13.4, 16.5, 19.0)),
        small,
        Table(
            "The long job, s",
            ("", *_BESIDE, "aim"),
            jobs,
            (side, moe),
            "256 completions of log-normal lengths (984,729 tokens, at most 16,384), 128 rows.",
        ),
        *(
            Table(
                f"{title} by context, ms a step",
                ("rows x context", *_BESIDE),
                beside(name, _contexts((1024, 4096, 16384, 32768))),
                (name,),
            )
            for title, name in (("8B", side), ("30B-A3B", moe))
        ),
        Table("8B beside transformers", ("", "here", "vLLM", "transformers"), transformers, (side,)),
        quantised,
        coded,
        prefilled,
        Table("From start to first token, s", ("", "here", "vLLM", "transformers"), starts, (side, steady, moe)),
    ]


def _ready(name: str, engine: str) -> float | None:
    return next((fact["ready_s"] for fact in summary(name)["facts"] if fact.get("engine") == engine), None)


def _groups() -> list[Table]:
    names = [f"groups_{file}_h200" for file in _SHAPES.values()]
    whole: list[list[Cell]] = []
    for title, name, aim in zip(_SHAPES, names, (24, 27), strict=True):
        works = {
            f"{title}, {label}": {"experiment": "groups", "requests": requests}
            for requests, label in ((32, "32 requests with n = 8"), (256, "256 requests"))
        }
        whole += beside(name, works, "total_s", (aim, None))
    steps = []
    for title, file in _SHAPES.items():
        name = f"contexts_{file}_h200"
        works = {
            f"{found['rows']} x {found['context'] // 1024}K, n = {found['completions']}": {
                field: found[field] for field in ("experiment", "rows", "context", "completions")
            }
            for found in rows(name, engine="ours", experiment="contexts")
        }
        head = ("rows x prompt", *_BESIDE)
        steps.append(Table(f"{title}: rows that share their prompt, ms a step", head, beside(name, works), (name,)))
    return [
        Table(
            "32 prompts of 4,096 tokens, 8 completions of 1,024 tokens each, 256 rows, s",
            ("", *_BESIDE, "aim"),
            whole,
            names,
            "Floor: weights once and every page of KV once a step, no prefill. A tile of attention has the heads of 4 "
            "rows of 30B-A3B, so a group of 8 is read twice.",
        ),
        *steps,
        columns(
            "Prompt tokens computed, through the socket",
            "shared_prompts",
            {
                "requests": "arrival",
                "number": "requests",
                "distinct tokens": "distinct",
                "computed": "computed",
                "computed over distinct": lambda found: f"{found['ratio']:.3f}",
            },
            "Each of 32 equal prompts computes its last token for its own draw.",
        ),
    ]


def _agents() -> list[Table]:
    data, load = summary("agents_short_h200"), LOADS["short"]
    on_cpu = (
        *("agents_cpu_alone", "agents_cpu_little_host", "agents_cpu_disk", "agents_cpu", "agents_two_cpu"),
        *("agents_updates_cpu", "agents_updates_keep_cpu"),
    )
    sizes: list[list[Cell]] = [
        ["agents x turns", f"{data['agents']} x {load.turns.most:.0f}, the whole history in each turn"],
        ["system prompt of all, tokens", load.system],
        ["task, tokens", f"{load.task.least:,.0f} to {load.task.most:,.0f}"],
        ["turn, tokens", f"{load.out.least:.0f} to {load.out.most:,.0f}, log-normal, median {load.out.median:.0f}"],
        ["tool, s", f"{load.tool_s.least} to {load.tool_s.most:.0f}, mean {load.tool_s.mean:.0f}"],
        ["answer of a tool, tokens", f"{load.obs.least:,.0f} to {load.obs.most:,.0f}"],
        ["tokens drawn", data["drawn"]],
        ["tokens of prompts; distinct ones", f"{data['sent']:,}; {data['distinct']:,}"],
        ["tokens that all agents hold at their ends", data["held_tokens"]],
    ]
    return [
        columns(
            "96 agents, 8 turns each, 8B, bf16",
            ("agents_short_h200", "agents_short_fp8_h200"),
            {
                "": lambda found: {"ours": "here", "socket": "here, fp8 KV"}.get(
                    found["engine"], f"vLLM {data['versions']['vllm']}"
                ),
                "floor, s": "floor_s",
                "s": "total_s",
                "prompt tokens computed": "computed_prompt_tokens",
                "first token, median, s": lambda found: found["first_token_s"]["median"],
                "turn, median, s": lambda found: found["turn_s"]["median"],
                "turn, 99th percentile, s": lambda found: found["turn_s"]["p99"],
                "GPU active, %": "active_pct",
            },
            "Plain requests, without sessions or KV on the host. The aims are 125 s, and 85 s with fp8 KV.",
        ),
        columns(
            "48 of these agents, KV on the GPU for 0.4 of what they hold, 8B, bf16",
            (*(f"agents_short_small_pool{how}_h200" for how in ("", "_host", "_vllm")),),
            {
                "": lambda found: (
                    f"{'40 GiB of' if 'floor_s' in found else 'no'} host memory{', vLLM' * (found['engine'] == 'http')}"
                ),
                "floor, s": lambda found: found.get("floor_s"),
                "s": lambda found: found["total_s"] if "floor_s" in found else None,
                "trajectories/h": "trajectories_per_h",
                "prompt tokens computed over distinct": "computed_over_distinct",
                "first token, median, s": lambda found: found["first_token_s"]["median"],
                "turn, median, s": lambda found: found["turn_s"]["median"],
                "turn, 99th percentile, s": lambda found: found["turn_s"]["p99"],
                "GPU active, %": "active_pct",
            },
            "Expected with host memory: 80 s, 1.02; with vLLM: 90 s, 1.1. From the third tenth of the time on, 15 to "
            "21 agents wait for room on the GPU. The run without host memory was stopped early.",
        ),
        Table("The load", ("", ""), sizes, ("agents_short_h200",)),
        Table(
            "On a CPU, with KV for a third of what 8 agents hold",
            (
                "workers",
                "requests",
                "route",
                "host memory, GiB",
                "disk, GiB",
                "updates; max_kv_age",
                "distinct prompt tokens",
                "computed",
                "computed over distinct",
            ),
            [
                [
                    found["workers"],
                    found["requests"],
                    found["route"],
                    summary(name)["settings"]["host_kv_gib"],
                    summary(name)["settings"].get("disk_kv_gib", "0"),
                    f"{found.get('updates', 0)}; {summary(name)['settings'].get('max_kv_age', '0')}",
                    found["distinct_prompt_tokens"],
                    found["computed_prompt_tokens"],
                    found["computed_over_distinct"],
                ]
                for name in on_cpu
                for found in rows(name)
            ],
            on_cpu,
            "A toy model. 0.002 GiB hold a part of the KV. Without room for it, which turns find their KV depends on "
            "what else the machine does: runs differ by a fifth. Updates come every 2 s; without `max_kv_age` each "
            "drops all KV.",
        ),
        Table(
            "The format of a trace",
            ("field", "of a trajectory, one JSON object a line"),
            [[name, meaning] for name, meaning in TRACE_FIELDS.items()],
            (),
            "`python -m scripts.bench.agents --trace FILE` replays a file against workers, or with `--url` against a "
            "server of OpenAI's completions; `--load short --write FILE` makes one. Turns count from 0. Token ids are "
            "random; what the model drew is sent back as it came.",
        ),
    ]


def _prefill() -> list[Table]:
    names = [f"groups_{file}_h200" for file in _SHAPES.values()]
    speed: list[list[Cell]] = []
    waits: list[list[Cell]] = []
    for title, name, scale, aim in zip(_SHAPES, names, (12.0, 6.0), (44_000, 78_000), strict=True):
        here, vllm = (value(name, "prefill_tokens_per_s", engine=e, experiment="prefill") for e in ("here", "vllm"))
        speed.append([title, here, vllm, ratio(here, vllm), aim])
        for label, field in (("median latency, s", "latency_s"), ("99th percentile of gaps, ms", "gap_p99_ms")):
            here, vllm = (value(name, field, engine=e, experiment="arrivals", scale=scale) for e in ("here", "vllm"))
            waits.append([f"{title}, {scale:.0f} a second: {label}", here, vllm, ratio(vllm, here)])
    return [
        Table(
            "48 prompts of 4,096, tokens/s",
            ("", "here", "vLLM", "here over vLLM", "aim"),
            speed,
            names,
            "Steps of 8,192 tokens here, of 16,384 in vLLM.",
        ),
        Table("Prompts of 2,048 arrive", ("", "here", "vLLM", "vLLM over here"), waits, names, "256 new tokens each."),
        columns(
            "A teacher scores a batch, 8B",
            "scores_batch_h200",
            {
                **{name: name for name in ("way", "sequences")},
                "tokens of each": "tokens",
                "computed tokens": "computed",
                "tokens/s": "tokens_per_s",
                "over plain": "of_plain",
            },
            "`plain` is prefill alone; `last` scores the last 64 tokens, with 256 named tokens at each; `all` and "
            "`chosen` score all tokens, and every one of them needs the output layer; `shared` is `last` where four "
            "sequences share the rest. Aim: `last` at 0.95 of `plain`.",
        ),
    ]


def _speculation() -> list[Table]:
    both = [f"speculation_{file}_h200" for file in _SHAPES.values()]
    aims = {
        (1, 1.7): 1.5,
        (8, 1.7): 1.45,
        (32, 1.7): 1.3,
        (1, 2.5): 2.2,
        (8, 2.5): 2.1,
        (32, 2.5): 1.9,
        (128, 2.5): 1.5,
    }
    shapes = [*zip(_SHAPES, both, strict=True), ("Qwen3.5-35B-A3B", "speculation_qwen35_35b_h200")]
    tables = [_drafts(title, name, "auto", aims if title == "8B" else {}) for title, name in shapes]
    jobs: list[list[Cell]] = []
    for title, name in zip(_SHAPES, both, strict=True):
        for found in rows(name, job_scale=0.35):
            drafts = f"AL {found['aim']}" if found.get("aim") else found["mode"].replace("nothing", "wrong drafts")
            speeds = (_times(found.get("speedup")), _times(found.get("tail_speedup")))
            times = [found["floor_s"], found["total_s"], speeds[0], found["tail_s"], speeds[1]]
            jobs.append([f"{title}, {drafts}", *times])
    repeats: list[list[Cell]] = []
    for count in _ROWS:
        for chance in (0.8, 0.9, 0.96):
            of = {"rows": count, "chance": chance}
            engines = ("ours", "ours-ngram", "vllm", "vllm-ngram")
            ms = [value("repeats_8b_h200", "ms", engine=engine, **of) for engine in engines]
            repeats.append([count, f"{chance}", *ms, ratio(ms[3], ms[1])])
    return [
        *tables,
        _drafts("A draft head for 8B, H100", "speculation_8b_heads_h100", "heads", {}),
        Table(
            "The long job, 0.35 of its lengths",
            ("", "floor, s", "s", "speed", "last tenth, s", "its speed"),
            jobs,
            both,
        ),
        Table(
            "Repeating text, 8B, contexts of 1K, ms a token of a row",
            ("rows", "chance", "here", "here, n-grams", "vLLM", "vLLM, n-grams", "vLLM over here, n-grams"),
            repeats,
            ("repeats_8b_h200",),
            "The chance that the text goes on as it did before.",
        ),
        columns(
            "Deterministic mode: are log-probs equal bit for bit",
            ("speculation_8b_deterministic_h100", "speculation_qwen35_27b_deterministic_h200"),
            {
                "shape": "shape",
                "rows": "rows",
                "context": "context",
                "AL": "al",
                "segments from MiB": "least_saved_mib",
                "equal": lambda found: "yes" if found["equal_bits"] else "no",
            },
            mode="always",
        ),
        columns(
            "Real texts, easy ones: a trainer of a countdown, 16 completions of each prompt",
            "speculation_grpo_cpu",
            {"drafter": "speculation", "accepted, %": "accepted_pct", "tokens a step": "tokens_a_step"},
        ),
    ]


def _drafts(title: str, name: str, mode: str, aims: Mapping[tuple[int, float], float]) -> Table:
    cells: list[list[Cell]] = []
    for plain in rows(name, mode="plain", job_scale=None):
        of = {field: plain[field] for field in ("rows", "context")}
        steps = [f"{of['rows']} x {of['context'] // 1024}K", plain["floor_ms"], plain["step_ms"]]
        for found in rows(name, mode=mode, **of):
            aim = aims.get((of["rows"], found["aim"])) if of["context"] == 4096 else None
            speed = [_times(found["speedup"]), *([f"aim {_times(aim)}"] if aim else [])]
            cells.append([*steps, found["aim"], f"{found['al']:.2f}", ", ".join(filter(None, speed))])
        cells += [
            [*steps, "wrong drafts", f"{wrong['al']:.2f}", _times(wrong["speedup"])]
            for wrong in rows(name, mode="nothing", **of)
        ]
    note = (
        "AL, the accepted length: tokens a verify step. Drafts are replayed from a plain run and corrupted. Aim with "
    )
    note += "with wrong drafts: 0.98x."
    head = ("rows x context", "floor, ms", "plain step, ms")
    title = f"{title}: speed with drafts over plain steps"
    return across(Table(title, (*head, "AL asked", "AL", "speed"), cells, (name,), note), "AL asked", head)


def _several_gpus() -> list[Table]:
    works = {
        "2 GPUs, Qwen3-8B": ("8b_tp2", (2.8, 2.9, 3.2, 4.6)),
        "2 GPUs, Qwen3-30B-A3B": ("30b_a3b_tp2", (2.2, 4.9, 8.4, 10.5)),
        "2 GPUs, Qwen3-32B": ("32b_tp2", ()),
        "2 GPUs, Llama-3.1-70B": ("70b_tp2", ()),
        "4 GPUs, Qwen3-30B-A3B": ("30b_a3b_tp4", ()),
        "4 GPUs, Llama-3.1-70B": ("70b_tp4", ()),
        "4 GPUs, Qwen3-235B-A22B": ("235b_a22b_tp4", ()),
    }
    tables, room = [], []
    for title, (file, aims) in works.items():
        name = f"contexts_{file}_h200"
        few = {f"{count} x 128": {"experiment": "decode", "rows": count} for count in _ROWS}
        cells = [
            *beside(name, few, aims=aims),
            *beside(name, _contexts((1024, 16384)), aims=[None] * 8 if aims else ()),
        ]
        head = ("rows x context", *_BESIDE, *(["aim"] if aims else []))
        tables.append(Table(f"{title}, ms a step", head, cells, (name,)))
        for fact in (fact for fact in summary(name)["facts"] if "kv_tokens" in fact):
            engine = "vLLM" if fact["engine"] == "vllm" else "here"
            room.append([title, engine, fact["run"][:16].replace("T", " "), fact["kv_tokens"], fact["ready_s"]])

    def job(found: Row) -> str:
        workers = found.get("workers", 1)
        how = f"{counted(workers, 'worker')} of {counted(found['gpus'] // workers, 'GPU')}"
        return f"{found['shape']}, {found['scale']} of its lengths, {'vLLM' if found['engine'] == 'vllm' else how}"

    return [
        *tables,
        Table(
            "Room for KV, and the start",
            ("", "engine", "run", "KV, tokens", "from start to ready, s"),
            room,
            [f"contexts_{file}_h200" for file, _ in works.values()],
            "A staged update needs room for a copy of a rank's weights, so the settings of a run decide. The first run "
            "on a machine has cold kernel caches.",
        ),
        columns(
            "The long job, s",
            ("long_job_8b_tp2_h200", "long_job_30b_a3b_tp4_h200"),
            {"": job, "floor": "floor_s", "s": "total_s", "last tenth": "tail_s", "idle GPU-seconds": "idle_gpu_s"},
        ),
        columns(
            "A killed rank of four, 30B-A3B",
            "rank_workers_30b_a3b_tp4_h200",
            {"": "what", "rows": "rows", "s": "s", "ms": "ms"},
        ),
        columns(
            "2 GPUs, Qwen3-30B-A3B, attention split by heads and by rows",
            "attention_split_30b_a3b_tp2_h200",
            {
                "rows x 1K": "rows",
                "heads, ms": "heads_ms",
                "rows, ms": "rows_ms",
                "heads, prefill": "heads_tps",
                "rows, prefill": "rows_tps",
            },
            note="Floors of heads: the first table of this model. Prefill: tokens a second, by a script of these steps "
            "that timed prompts too. With rows each rank reads all of attention's weights. It is for latents and for "
            "KV heads that are fewer than ranks.",
        ),
        columns(
            "2 GPUs, attention split by heads and by contexts, a decode step",
            "context_split_tp2_h200",
            {
                "shape": "shape",
                "rows": "rows",
                "context": "context",
                "heads, ms": "heads_ms",
                "contexts, ms": "context_ms",
                "heads, KV bytes a token": "heads_kv_bytes",
                "contexts, KV bytes a token": "context_kv_bytes",
            },
            note="one_kv_head: 12 layers of Qwen3-8B with one KV head; latent: 5 layers of DeepSeek-V3, 32 experts. "
            "Random KV. Contexts give room for twice the tokens; faster only for many rows of 64K with one KV head.",
        ),
        _soak("Soak of two ranks", "soak_tp2_h200"),
    ]


def _soak(title: str, name: str) -> Table:
    data = summary(name)
    cells: list[list[Cell]] = [["no wrong token, nothing lost, no memory grew", "yes" if data["clean"] else "no"]]
    shown = {
        "tokens": "tokens",
        "lost": "lost completions",
        "restarts": "restarts of workers",
        "resumes": "resumed completions",
        "swapped_while_running": "completions that an update met",
        "drain_s": "drain, s",
        "most_pause_s": "longest pause of an update, s",
    }
    cells += [[label, data[field]] for field, label in shown.items()]
    return Table(
        title, ("", ""), [*cells, *([f"fault: {fault}", count] for fault, count in data["faults"].items())], (name,)
    )


def _families() -> list[Table]:
    plans, other, fallback = "peers_gpt_oss_20b_plans_h100", "peers_gpt_oss_20b_h100", "fallback_qwen3_8b_h100"
    aim = "Aim: 1.2 times vLLM's speed, or 1.3 times the floor."
    linear = [
        Table(f"{title}, ms a step", ("rows x context", *_BESIDE), beside(name, _contexts((1024, 16384))), (name,), aim)
        for title, name in (
            ("Qwen3.5-35B-A3B", "contexts_qwen35_35b_h200"),
            ("Qwen3.5-27B", "contexts_qwen35_27b_h200"),
        )
    ]
    for shape in ("glm-4-9b-0414", "gemma-3-12b", "olmo-3-7b"):
        works = {label: {**where, "shape": shape} for label, where in _contexts((1024, 16384)).items()}
        cells = beside("contexts_families_h200", works)
        linear.append(
            Table(f"{shape}, ms a step", ("rows x context", *_BESIDE), cells, ("contexts_families_h200",), aim)
        )
    oss = beside(plans, _contexts((16384,)))
    for count in reversed(_ROWS):
        found = row(plans, experiment="decode", rows=count) or {}
        vllm = value(other, "ms", engine="vllm", rows=count)
        least, here = found["floor_ms"], found["ms"]
        oss.insert(0, [f"{count} x 1K", least, here, ratio(here, least, ""), vllm, ratio(vllm, here)])
    fused = "decode_families_fused_h200"
    kernels: list[list[Cell]] = []
    for found in rows(fused, by="fused kernels"):
        torch_ms = value(fused, "steady_ms", shape=found["shape"], rows=found["rows"], by="torch")
        here = found["steady_ms"]
        kernels.append([found["shape"], found["rows"], found["floor_ms"], here, found["over_floor"], torch_ms])
        kernels[-1].append(ratio(torch_ms, here))
    through: list[list[Cell]] = []
    for count in _ROWS:
        own, slow = (value(fallback, "ms", engine=engine, rows=count) for engine in ("ours", "ours-fallback"))
        through.append([count, own, slow, ratio(slow, own)])
    return [
        *linear,
        Table("gpt-oss-20b, H100, ms a step", ("rows x context", *_BESIDE), oss, (plans, other), aim),
        Table(
            "Norms after blocks, factors and GELU in the fused kernels, ms a step",
            ("shape", "rows", "floor", "here", "over floor", "by torch, in graphs", "torch over here"),
            kernels,
            (fused,),
            "Aim: 1.3 times the floor. GLM-4, and 128 rows of each, miss it. No peer.",
        ),
        Table(
            "Qwen3-8B by transformers' code, ms a step",
            ("rows", "own code", "fallback", "fallback over own"),
            through,
            (fallback,),
            "Prompts of 1,024, 96 new tokens. Bound: 2.2x.",
        ),
        columns(
            "Qwen3-VL-8B, 48 prompts, n = 8, 256 new tokens, 128 rows",
            "images_qwen3_vl_8b_h100",
            {
                "": lambda found: "here" if found["engine"] == "ours" else f"vLLM {found['version']}",
                "prompts": lambda found: "an image each" if found["kind"] == "image" else "text alone",
                "completions/s": "completions_per_s",
                "median time to the first token, s": lambda found: found["first_token_s"]["median"],
            },
            "An image of 1,024 x 1,024, and 128 tokens of text. Aim: 1.15 times vLLM's completions/s.",
        ),
        columns(
            "The vision tower",
            "encode_h100",
            {"images": "images", "attention": "backend", "floor, ms": "floor_ms", "ms": "device_ms"},
        ),
    ]


def _pipeline() -> list[Table]:
    percentiles = ("median_ms", "p99_ms", "p99.9_ms")
    load: list[list[Cell]] = [[r["load"], *(r[key]["median"] for key in percentiles)] for r in rows("service_load")]
    for name, found in summary("service_load")["added"].items():
        load.append([f"added by {name}", *(f"{found[key]:.3f}" for key in percentiles)])
    return [
        columns(
            "Depth 2 beside depth 1",
            "pipeline_h200",
            {
                "shape": "shape",
                "rows": "rows",
                "GPU active at depth 1, %": lambda found: f"{found['active1_pct']:.2f}",
                "at depth 2, %": lambda found: f"{found['active2_pct']:.2f}",
                "faster, predicted, %": "predicted_pct",
                "observed, %": "observed_pct",
            },
            "Predicted from parts that were measured alone. Active: from the start to the end of each step.",
        ),
        columns(
            "A long run of 8B, 32 rows x 8,192 tokens",
            "peers_8b_side_h200",
            {"GPU active, %": lambda found: f"{found['active_pct']:.2f}", "idle a step, ms": "idle_ms", "s": "total_s"},
            "Aim: 99.7% active, 0.02 ms idle.",
            engine="ours",
            experiment="post",
        ),
        columns(
            "The host's part of a step, ms",
            "bookkeeping",
            {
                "rows": "rows",
                "length": "length",
                "plan": "plan_ms",
                "launch": "launch_ms",
                "commit": "commit_ms",
                "all, median": "median_ms",
            },
            "Bounds: 0.4 ms at 32 rows, 1.5 at 256.",
        ),
        columns(
            "Memory of a worker",
            "memory",
            {"tokens": "tokens", "MiB": "resident_mib"},
            "Bound: 3 MiB more in a million tokens.",
        ),
        Table(
            "Gaps between steps of 4 ms while clients are busy, ms",
            ("load", "median", "99th percentile", "99.9th"),
            load,
            ("service_load",),
            "Bound: 0.2 ms more at the 99.9th percentile.",
        ),
        columns(
            "HTTP beside zmq",
            "gateway",
            {
                "engine": "engine",
                "`stream_every`": "stream_every",
                "zmq, tokens/s": "zmq_tokens_per_s",
                "HTTP, tokens/s": "http_tokens_per_s",
                "HTTP over zmq": "http_share",
                "gateway's CPU, us a token": "gateway_cpu_us_per_token",
            },
        ),
        _soak("Soak", "soak"),
    ]


def _updates() -> list[Table]:
    works = {
        "8b": "8B, `cuda_ipc`, staged, one GPU (aim: pause 15)",
        "30b_a3b_ipc": "30B-A3B, `cuda_ipc`, in place, one GPU (aim: applied 250)",
        "30b_a3b_nccl_default": "30B-A3B, `nccl`, between two GPUs (aim: applied 500)",
        "30b_a3b_ipc_two_gpus": "30B-A3B, `cuda_ipc`, between two GPUs",
        "30b_a3b_nccl_host": "30B-A3B, `nccl`, staged in host memory",
        "8b_ranks": "8B, two trainer ranks, two workers, `nccl`",
        "8b_tp2": "8B, a worker of two ranks, `cuda_ipc`, whole tensors",
        "8b_tp2_sections": "8B, a worker of two ranks, `cuda_ipc`, sections",
        "8b_tp2_shm": "8B, a worker of two ranks, `shm`",
        "30b_a3b_tp2_nccl": "30B-A3B, a worker of two ranks, `nccl` from a third GPU",
        "30b_a3b_tp2_ipc": "30B-A3B, a worker of two ranks, two trainer ranks, `cuda_ipc`, whole tensors",
        "30b_a3b_tp2_sections": "30B-A3B, a worker of two ranks, two trainer ranks, `cuda_ipc`, sections",
        "235b_a22b_tp4": "235B-A22B, a worker of four ranks, four trainer ranks, `cuda_ipc`, in place",
    }
    cells: list[list[Cell]] = []
    for file, title in works.items():
        found = rows(f"swap_{file}_h200")
        first = next(update for update in found if update.get("version") == 1)
        median = next(update for update in found if "median_of" in update)
        times = [first["applied_ms"], *(median[f"{part}_ms"] for part in ("applied", "floor", "pause"))]
        cells.append([title, found[0]["bytes"] / 1e9, *times])
    broad = "swap_30b_a3b_nccl_default_h200"
    broadcast = next(found["gb_per_s"] for found in rows(broad) if "plain_broadcast_ms" in found)
    later = [update for update in rows(broad) if update.get("version", 1) > 1]
    received = statistics.median(update["bytes"] / update["receive_ms"] / 1e6 for update in later)
    many: list[list[Cell]] = []
    for title, name in (("8B", "swap_8b_many_h200"), ("8B, two ranks", "swap_8b_tp2_h200")):
        last = rows(name)[-1]
        fields = ("updates", "tokens", "wrong_tokens", "applied_ms", "grown_worker_mib")
        many.append([title, *(last[field] for field in fields)])
    return [
        Table(
            "One update while rows decode, ms",
            ("", "GB", "applied, the first", "applied, median of the next", "floor of the pause", "pause"),
            cells,
            [f"swap_{file}_h200" for file in works],
            "Applied: from `publish()` until every new token has the new weights. Pause: no step runs; its floor is 2 "
            "x bytes over the copy bandwidth. In place, the pause is the transfer. The trainer of 235B has one layer, "
            "sent in place of all 94. Sections are slower than whole tensors where trainer and worker share "
            "GPUs: the trainer packs. 8B with slots of 1, 2 (as today) and 4 GiB: 145, 119 and 133 ms.",
        ),
        Table(
            "30B-A3B between two GPUs by `nccl`, GB/s",
            ("a plain broadcast", "received, median"),
            [[broadcast, received]],
            (broad,),
        ),
        Table(
            "Many updates",
            ("", "updates", "tokens", "wrong tokens", "applied, ms", "MiB that the worker grew by"),
            many,
            ("swap_8b_many_h200", "swap_8b_tp2_h200"),
        ),
        columns(
            "Updates that come fast: 24 rows of a toy model on a loaded CPU",
            "swap_rate_cpu",
            {
                "KV on a swap, fraction": "kv",
                "an update every, s": lambda found: "never" if found["every_s"] is None else f"{found['every_s']}",
                "tokens/s, median": lambda found: found["tokens_per_s"]["median"],
                "published": "published",
                "applied": "applied",
            },
            "Compare only within the table. 0.3 is the default of `recompute_fraction`.",
        ),
        columns(
            "What a GRPO step of SmolLM2-135M changes",
            "changed_weights",
            {
                "learning rate": lambda found: f"{found['lr']:g}",
                "weights": "weights",
                "values, %": lambda found: 100 * found["changed"],
                "bytes of the changes, %": lambda found: 100 * found["bytes"],
            },
            "The sixth step. An update as a change has these bytes, as a share of a whole one.",
            step=6,
        ),
    ]


def _features() -> list[Table]:
    ms: Mapping[str, Column] = {"floor": "floor_ms", "ms": "steady_ms"}
    many = "adapters_many_h200"
    tenants = summary(many)
    return [
        columns(
            "JSON schema, 8B, 32 rows, ms a step",
            "constraints_h200",
            {
                "masks are made": lambda found: {"waiting": "before the forward", "ahead": "during it"}[found["way"]],
                "constrained rows": "constrained",
                "ms": "steady_ms",
            },
        ),
        columns(
            "LoRA adapters of rank 16, 1.7B, ms a step",
            "adapters_h200",
            {"rows": "rows", "adapters": "adapters", **ms},
        ),
        columns(
            "Adapters of many tenants, 8B, 8 slots, 300 requests at once",
            many,
            {
                "adapters": "adapters",
                "tokens/s": "tokens_per_s",
                "rows of a decode step": "rows_mean",
                "switches": "switches",
                "last end, s": lambda found: found["ends_s"]["most"],
            },
            f"Rank 16, {tenants['mib']:.0f} MiB each. To load one takes {tenants['load_ms']['median']:.0f} ms (floor: "
            f"to read its file, {tenants['load_floor_ms']:.0f}), to switch {tenants['switch_ms']['median']:.1f} ms "
            f"(floor: to copy its bytes, {tenants['switch_floor_ms']:.1f}). With 100 adapters a step has the rows of "
            "8 of them, so it is less full.",
        ),
        columns(
            "20 likeliest tokens, and log-probs of a prompt, 8B, ms",
            "scores_h200",
            {
                "": lambda found: (
                    f"{found['asking']} of {found['rows']} rows ask, a step"
                    if "asking" in found
                    else f"a prompt of {found['prompt']:,}, {'scored' if found['scored'] else 'plain'}"
                ),
                "ms": lambda found: found.get("steady_ms", found.get("prefill_ms")),
            },
        ),
        columns(
            "Truncation of all rows, 8B, ms a step",
            "truncate_h200",
            {"rows": "rows", "rules": lambda f: "top-k, top-p and min-p" if f.get("truncated") else "none", **ms},
        ),
        columns(
            "`return_routing`, 30B-A3B, 32 rows, ms a step",
            "routing_h200",
            {
                "experts returned": lambda found: "yes" if found.get("routing") else "no",
                "ms": lambda found: f"{found['steady_ms']:.3f}",
            },
        ),
        columns("Deterministic mode, 8B, ms a step", "decode_8b_deterministic_h200", {"rows": "rows", **ms}),
        columns(
            "Sleep and wake, 8B, s",
            "sleep_h200",
            {"level": "level", "GiB": "freed_gib", "sleep": "sleep_s", "wake": "wake_s", "rows decode again": "back_s"},
            "The first sleep of level 1 pins host memory.",
        ),
        columns(
            "KV offload, 1.7B, 64 rows x 16K",
            "offload_16k_h200",
            {
                "KV of preempted rows": lambda found: {
                    "offload": "offloaded, a pool for 24 rows",
                    "recompute": "computed again, a pool for 24 rows",
                    "whole": "none preempted, a pool for all rows",
                }[found["mode"]],
                "s": "seconds",
                "preemptions": "preemptions",
                "tokens of prefills": "prefilled",
            },
        ),
    ]


def _kernels() -> list[Table]:
    layers: list[Table] = []
    for title, file in {**_SHAPES, "0.6B": "06b"}.items():
        cells: list[list[Cell]] = []
        for found in rows(f"layer_{file}_h200"):
            least = sum(part["floor_us"] for part in found["layer"])
            cells += [
                [found["rows"], f"`{part['name']}`", part["floor_us"], part["adds_us"]] for part in found["layer"]
            ]
            cells.append([found["rows"], "the layer", least, found["layer_us"]])
        head = ("rows", "kernel", "floor", "us that it adds")
        layers.append(
            Table(f"A layer of {title}, us, in the order of its kernels", head, cells, (f"layer_{file}_h200",))
        )
    errors = next(found["errors"] for found in rows("moe_h200", format="plain", tokens=8) if "errors" in found)
    here, vllm = (errors[name]["relative"] for name in ("chosen", "vllm"))
    tuned = [f"moe_tuning{kind}_h200" for kind in ("", "_codes", "_fp8_row", "_tp4")]
    return [
        *layers,
        columns(
            "A layer of experts of 30B-A3B, us",
            "moe_h200",
            {
                "format": "format",
                "tokens": "tokens",
                "floor": "floor_us",
                "here": lambda found: found["us"]["chosen"],
                "vLLM": lambda found: found["us"].get("vllm"),
                "vLLM over here": lambda found: ratio(found["us"].get("vllm"), found["us"]["chosen"]),
            },
            f"Relative error against float64 at 8 tokens: here {here:.2e}, vLLM {vllm:.2e}: {vllm / here:.2f} times.",
        ),
        columns(
            "Attention of a decode step, one layer, us",
            ("attention_h200", "attention_fp8_h200"),
            {
                "rows x context": "shape",
                "heads": "heads",
                "floor": "floor_us",
                "us": lambda found: found["default"]["us"],
            },
            "The first lines have KV in bf16, the others in fp8.",
            kind="decode",
        ),
        columns(
            "Attention of rows in groups, one layer, us",
            "attention_groups_h200",
            {
                "rows x context x group": "shape",
                "heads": "heads",
                "floor": "floor_us",
                "before": "before_us",
                "us": lambda found: found["default"]["us"],
                "tiles of 64": lambda found: found.get("tall_us"),
            },
            "The kernel alone. Before, the last program of a row combined its parts. Whole steps of 30B-A3B gain less: "
            "10.1 to 9.81 ms in groups of 8. Tiles of 64 heads read such a group "
            "once, but 128 rows of 300 that share nothing are slower: 32.9 us, not 28.3 (32/4 heads).",
            kind="decode",
        ),
        across(
            columns(
                "Plans of experts, us a layer",
                tuned,
                {
                    "shape": "shape",
                    "format": "format",
                    "tokens": "tokens",
                    "floor": "floor_us",
                    "best plan": lambda found: min(found["us"].values()),
                },
                "Where two runs measured a value, the later one counts.",
            ),
            "tokens",
            ("shape", "format"),
        ),
        across(
            columns(
                "Products of few rows, us",
                ("linear_streamed_h200", "linear_27b_h100", "linear_tp_h200"),
                {
                    "shape": "shape",
                    "floor": lambda found: figure(found["floor_us"]),
                    "rows": "rows",
                    "by the table": "table_us",
                    "best": "best_us",
                    "cuBLAS": "cublas_us",
                },
                "Where two runs measured a value, the later one counts. Gate and up have SiLU here, not in cuBLAS.",
            ),
            "rows",
            ("shape",),
        ),
    ]


def _correctness() -> list[Table]:
    checks = ["8b_h200", "30b_a3b_h200", "mixtral_olmoe_h200", "families_h100", "sizes_a_h100", "sizes_b_h100"]
    checks += ["fallback_h100", "gemma_h200", "gemma_fallback_h200"]
    shown: Mapping[str, Column] = {
        "family": lambda found: found["family"] + (", fallback" if found.get("fallback") else ""),
        "rms error": lambda found: found["logits"]["ours"]["rms"],
        "transformers in bf16": lambda found: found["logits"]["wide"]["rms"],
        "over transformers": "logits_ratio",
        "the same of the median token": "median_ratio",
        "K3 against a trainer": lambda found: found["logprobs"]["ours_trainer"]["k3"],
        "depths equal": lambda found: "yes" if found["depths"]["equal"]["logprobs_equal"] else "no",
        "failures": lambda found: "; ".join(found["failures"]) or "none",
    }
    return [
        columns(
            "Logits of layers of real size against float32",
            [f"correctness_{name}" for name in checks],
            shown,
            "3 to 6 layers, random weights. Bound: 1.1 times transformers' error; where a few tokens have other "
            "experts, the median token's. Gemma 2 failed on 2026-11-25 because of its reference (transformers 5.17 "
            "drops a softcap). Its lines of 2026-11-26, the last ones, are right.",
        ),
        columns(
            "With a deliberate fault the check fails",
            [f"correctness_{name}_h200" for name in ("break_rope", "break_page", "gemma_break_page")],
            {name: shown[name] for name in ("family", "rms error", "over transformers", "failures")},
            "Faults: rope, a page; Gemma 2, a page.",
        ),
        columns(
            "A worker's log-probs against transformers, Qwen3-1.7B",
            "mismatch_h200",
            {
                "against": "against",
                "tokens": "tokens",
                "mean difference": "mean_abs",
                "largest": "max_abs",
                "K3": lambda found: f"{found['k3_kl']:.4f}",
            },
        ),
        *(
            columns(
                f"Log-probs by the format of weights, against float32: {model}",
                f"weight_formats_{name}_cpu",
                {
                    "format": "format",
                    "computed in": "computed_in",
                    "mean difference": lambda found: f"{found['mean_abs']:.3f}",
                    "99th percentile": lambda found: f"{found['p99_abs']:.2f}",
                    "KL a token": lambda found: f"{found['kl']:.4f}",
                    "least ratio": lambda found: f"{found['ratio_least']:.2f}",
                    "largest ratio": lambda found: f"{found['ratio_most']:.2f}",
                    "outside 0.8 to 1.25, %": lambda found: f"{100 * found['far']:.1f}",
                },
                note,
            )
            for model, name, note in (
                ("SmolLM2-135M, English text", "smollm2", "Its weights had 4 bits once; a small model is a hard case."),
                ("two layers of 8B, random weights", "8b", "A vocabulary of 8,192."),
            )
        ),
        columns(
            "Memory over a long run of 8B, MiB",
            "long_h200",
            {
                "rows x tokens": lambda found: f"{found['rows']} x {found['tokens']:,}",
                "least": lambda found: found["memory_mib"]["allocated"]["least"],
                "most": lambda found: found["memory_mib"]["allocated"]["most"],
            },
        ),
    ]


#: The runs of the chart.
LEARNING = ("learn_modes_01_h200", "learn_modes_2_h200", "learn_speculation_h200", "learn_missing_seeds_h200")
_FORMATS = ("learn_formats_h200", "learn_seeds_h200", "learn_more_seeds_h200")
TASKS = ("learn_tasks_h200", "learn_calculator_h200")
_TRL = "learn_trl_h200"
BESIDE_TRL = "learn_trl_copying_h200"


def _learning() -> list[Table]:
    runs: dict[str, Column] = {
        "run": "name",
        "seed": "seed",
        "steps": "steps_done",
        "a step, s": lambda found: found["step_s"]["median"],
        "waited, %": lambda found: 100 * found["time"]["wait"] / found["time"]["step"],
        "trained, %": lambda found: 100 * found["time"]["train"] / found["time"]["step"],
        "right, held out": lambda found: _from_to(found["held_out"]["accuracy"]),
        "steps until a quarter is right": lambda found: _until(found, 0.25, "evaluated"),
        "seconds until then": lambda found: _until(found, 0.25, "wall_s"),
        "staleness": lambda found: found["staleness"]["mean"],
    }
    agree: dict[str, Column] = {
        "run": "name",
        "seed": "seed",
        "tokens": lambda found: found["mismatch"]["tokens"],
        "mean difference": lambda found: f"{found['mismatch']['mean_abs']:.3f}",
        "99th percentile": lambda found: f"{found['mismatch']['p99_abs']:.2f}",
        "K3": lambda found: f"{found['mismatch']['k3_kl']:.4f}",
    }
    ratios = [
        [found["name"], found["seed"], age, of["tokens"], f"{of['mean']:.3f}", f"{of['p1']:.2f}", f"{of['p99']:.2f}"]
        for name in (LEARNING[0], *_FORMATS)
        for found in rows(name)
        for age, of in found["ratio_by_age"].items()
        if name not in _FORMATS or found["name"] in ("staleness 2", "staleness 4", "fp8 weights", "fp8 KV")
    ]
    every = (*LEARNING, *_FORMATS)
    by_seed: list[list[Cell]] = []
    for mode in (
        "sync",
        "staleness 1",
        "staleness 1, speculation",
        "staleness 2",
        "staleness 4",
        "fp8 weights",
        "fp8 KV",
    ):
        runs_of = (found for name in every for found in rows(name) if found["name"] == mode)
        seeds = {found["seed"]: _right_at(found, 57) for found in runs_of}
        by_seed.append([mode, *(seeds.get(seed) for seed in range(3)), sum(seeds.values()) / len(seeds)])
    drafts = [
        [
            found["name"],
            found["seed"],
            *(found["worker"][f"speculation/accepted_pct/age_{age}"] for age in ("0", "1", "2_to_4", "5_up")),
        ]
        for name in LEARNING[2:]
        for found in rows(name)
        if "speculation" in found["name"]
    ]
    return [
        Table(
            "Expected before the runs, and measured",
            ("what", "expected", "measured"),
            _EXPECTED,
            (),
            "SmolLM2-135M-Instruct learns by GRPO. Right, held out: greedy answers to 96 problems of all levels: one "
            "deviation is 0.05.",
        ),
        Table(
            "The recipe's choices, and where they come from",
            ("flag", "first recipe", "today", "source"),
            _CHOICES,
            (),
            "With one optimizer step a batch the ratio within a batch is 1, so `--clip-low` and `--clip-high` change "
            "nothing; older weights are the matter of `--importance-cap`.",
        ),
        columns("Runs of 107 and 240 s: modes and seeds", LEARNING, runs),
        Table("Right, held out, after 57 to 60 steps, by seed", ("run", "0", "1", "2", "mean"), by_seed, every),
        columns("Older weights and fp8, 147 to 250 s: the first recipe, and today's (sums)", _FORMATS, runs),
        columns(
            "A tool, and countdown, 126 to 198 s",
            TASKS,
            {
                "run": "name",
                "seed": "seed",
                "steps": "steps_done",
                "a step, s": lambda found: found["step_s"]["median"],
                "turns": lambda found: found["points"]["turns"][-1],
                "right, in training": lambda found: _from_to(found["points"]["right"]),
                "right, held out": lambda found: _from_to(found["held_out"]["accuracy"]),
                "prompt tokens computed again, %": lambda found: found["points"]["prompt/computed_again_pct"][-1],
            },
            "The calculator is a tool of several turns in one session.",
        ),
        columns(
            "A step beside TRL's, one run at a time",
            _TRL,
            {
                "run": "name",
                "steps": "steps_done",
                "a step, s": lambda found: found["step_s"]["median"],
                "right, in training": lambda found: _from_to(found["points"]["right"]),
            },
            "Sums of one digit, 32 problems x 16 answers, sync. TRL 1.16.",
        ),
        columns(
            "Beside TRL, long answers: 165 s each",
            BESIDE_TRL,
            {
                "run": "name",
                "steps": "steps_done",
                "a step, s": lambda found: found["step_s"]["median"],
                "reward": lambda found: _from_to(found["points"]["reward"]),
                "reward, steps 8 to 10": lambda found: f"{sum(found['points']['reward'][7:10]) / 3:.3f}",
            },
            "Repeat 80 numbers, about 160 tokens drawn, 32 prompts x 16 answers. The recipe draws while it trains "
            "(staleness 1), and trains on no group of equal rewards: its first steps take 1 to 2 s. TRL trains on all.",
        ),
        columns(
            "Worker's and trainer's log-probs under equal weights",
            (*LEARNING, *_FORMATS),
            agree,
            "The largest values of all compared steps; bfloat16 with float32 logits.",
        ),
        Table(
            "Ratios, trainer over worker, by the age of a token in versions",
            ("run", "seed", "age", "tokens", "mean", "1st percentile", "99th percentile"),
            ratios,
            (LEARNING[0], *_FORMATS),
        ),
        Table(
            "Accepted drafts by the age of the text that they come from, in versions, %",
            ("run", "seed", "0", "1", "2 to 4", "5 and more"),
            drafts,
            LEARNING[2:],
        ),
    ]


_EXPECTED: list[list[Cell]] = [
    [
        "seconds a step, alone on a GPU",
        "sync 1.0, staleness 1: 0.6",
        "32 x 16, sync: 1.16; 64 x 16, three runs on a GPU: sync 1.33, staleness 1: 1.04",
    ],
    ["right, held out, all levels, after 200 steps", "from 0.05 to 0.35", "from 0.07 to 0.28 to 0.34 after 150 to 190"],
    [
        "staleness 1, 2 and 4",
        "within 0.03 of each other; tokens whose weight is capped: 0.05, 0.3, 1.5%",
        "after 83 to 88 steps 0.28 and 0.27 with 2 and 4, where 1 has 0.29 to 0.31; capped 0.05 and 0.2%",
    ],
    [
        "fp8_block weights: log-probs under equal weights",
        "mean difference 0.08, ratios 0.65 to 1.5; the same right",
        "0.12, 0.55 to 1.66; 0.29 right after 90 steps: the same",
    ],
    [
        "fp8 KV: log-probs under equal weights",
        "mean difference 0.04; the same right",
        "0.08, 0.68 to 1.39; 0.27 right after 88 steps: the same",
    ],
    ["speculation", "within 5% of the time: at 512 rows drafts do not pay", "1.02 s a step against 1.04"],
    ["log-probs under equal weights, bf16", "mean difference 0.01, ratios 0.95 to 1.05", "0.03, 0.85 to 1.15"],
    [
        "today's recipe beside the first one, after the same time",
        "0.33 right against 0.28: three times the signal a step",
        "0.27 after 176 s and 51 steps, against 0.27 to 0.29 after 83 to 90 steps: equal",
    ],
    ["entropy, nats a token", "first recipe 0.10, today's 0.2, its target", "0.10 to 0.13, today's 0.15"],
    ["countdown, right, held out, after 100 steps", "from 0.02 to 0.3", "from 0.07 to 0.16 after 58 steps"],
    [
        "calculator, right after 60 steps",
        "from 0.01 to 0.3",
        "in training from 0.005 to 0.6 after 24 steps; held out 0.16 after 20",
    ],
    [
        "older weights and fp8, two more seeds, after 120 steps",
        "0.29, each mode within 0.03 of the others: equal",
        "staleness 4: 0.31; fp8 weights: 0.33 and 0.32; fp8 KV: 0.31. Four runs ended after 60 steps; there the modes' "
        "means over three seeds are 0.24 to 0.28: equal",
    ],
    [
        "calculator, two more seeds, after 60 steps, keep and recompute",
        "0.35 right, held out; 3 turns; seeds within 0.1; the same for both",
        "after 27 steps (195 s) 0.167 to 0.177 held out, 0.51 to 0.57 in training, 1.9 turns, all four equal",
    ],
    [
        "calculator, recompute against keep",
        "the same right by step, 5% longer steps",
        "the same right; 2.9 s and 3.1 s",
    ],
    [
        "a step of TRL, 32 x 16: transformers / this worker / the recipe",
        "6 s / 2 s / 0.6 s",
        "1.44 s / 1.10 s / 1.16 s: answers of 24 tokens, so training is most of it",
    ],
    [
        "copying, answers of 240 tokens, steps in 200 s: the recipe / TRL with a worker / vLLM / transformers",
        "50 / 30 / 28 / 13; the same reward by step",
        "in 146 to 180 s 48 / 18 / 10 / 10; the same reward by step; after them 0.93 / 0.03 / 0.00 / 0.00",
    ],
]

_CHOICES: list[list[Cell]] = [
    [
        "`--rounds`: groups of equal rewards are replaced",
        "dropped only",
        "at most 4 rounds",
        "DAPO, arXiv 2503.14476; ScaleRL, 2510.13786, leaves them out",
    ],
    [
        "`--scale-rewards`: advantages are divided by",
        "the group's deviation",
        "the batch's",
        "ScaleRL; against the group's: Dr. GRPO, 2503.20783",
    ],
    ["length of an answer in the loss", "mean over the batch's tokens", "the same", "DAPO; Dr. GRPO"],
    [
        "`--entropy-target`, `--entropy-step`",
        "no entropy term",
        "0.2 nats, 0.005",
        "Skywork-OR1, 2505.22312; TRL 1.16",
    ],
    ["`--kl`", "0", "0", "DAPO; Skywork-OR1"],
    ["`--temperature`", "1", "1", "Skywork-OR1: lower ones lose entropy sooner"],
    ["`--clip-low`, `--clip-high`", "0.2, 0.28", "0.2, 0.28", "DAPO"],
    [
        "`--importance-cap`: truncated weights, trainer over worker",
        "2",
        "2",
        "truncated importance sampling, also in verl and TRL",
    ],
    [
        "levels of problems",
        "p (1 - p) among open ones, the next opens at p = 0.5",
        "p (1 - p) among all",
        "sampling for learnability, 2502.12272",
    ],
    ["logits of the trainer", "float32", "float32", "ScaleRL; MiniMax-M1, 2506.13585"],
    ["`--lr`, `--warmup`", "1e-5, 10", "1e-5, 10", "runs below; published ones of 1e-6 are of larger models"],
]


def _right_at(found: Row, step: int) -> float:
    """Share of held-out problems that are right at the first evaluation from `step` on."""
    pairs = zip(found["held_out"]["evaluated"], found["held_out"]["accuracy"], strict=True)
    return float(next(right for evaluated, right in pairs if evaluated >= step))


def _until(found: Row, share: float, by: str) -> float | None:
    """The first evaluation with this share of right answers."""
    places = zip(found["held_out"][by], found["held_out"]["accuracy"], strict=True)
    return next((place for place, right in places if right >= share), None)


def _from_to(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} to {values[-1]:.3f}"


PAGES: Mapping[str, tuple[str, Callable[[], list[Table]]]] = {
    "decode": ("Decoding", _decode),
    "groups": ("Groups that share a prompt", _groups),
    "agents": ("Agents that come back", _agents),
    "prefill": ("Prefill", _prefill),
    "speculation": ("Speculation", _speculation),
    "several_gpus": ("Several GPUs", _several_gpus),
    "families": ("Other families, images, fallback", _families),
    "pipeline": ("The pipeline and the host", _pipeline),
    "updates": ("Updates of weights", _updates),
    "features": ("What features cost", _features),
    "kernels": ("Kernels", _kernels),
    "correctness": ("Correctness", _correctness),
    "learning": ("A real model learns", _learning),
}


def pages() -> dict[str, str]:
    """The text of each page of tables, by name."""
    return {name: page(title, tables()) for name, (title, tables) in PAGES.items()}


def page(title: str, tables: Sequence[Table]) -> str:
    """The text of one page.

    Raises:
        ValueError: a line of a table has another number of cells than its head.
    """
    parts = [
        f"# {title}: tables",
        "For readers who check a figure of [performance](../performance.md), which explains the "
        "[words](../performance.md#words). `python -m scripts.bench.charts` writes this page from "
        "`scripts/bench/results`; commands have the names that scripts have today.",
    ]
    known: set[str] = set()
    for table in tables:
        parts += _table(table, known)
        known |= set(table.files)
    return "\n\n".join(parts) + "\n"


def _table(table: Table, known: set[str]) -> list[str]:
    lines = [f"| {' | '.join(table.head)} |", "|" + "---|" * len(table.head)]
    for cells in table.cells:
        if len(cells) != len(table.head):
            raise ValueError(f"{table.title}: {len(cells)} cells below {len(table.head)} heads")
        lines.append(f"| {' | '.join(map(figure, cells))} |")
    names = dict.fromkeys(table.files)
    return [f"## {table.title}", "\n".join(lines), *filter(None, [table.note, *_sources(names, known)])]


def _sources(names: Iterable[str], known: set[str]) -> list[str]:
    """How the figures of a table were made: a line for the summaries of one machine and day, and the commands."""
    again = [f"`{name}`" for name in names if name in known]
    found = [source(name) for name in names if name not in known]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        alike.setdefault((each.machine, each.when, each.note), []).append(f"`{each.file}`")
    lines = [
        f"- {machine}, {when}: {', '.join(files)}{f'; {note}' if note else ''}"
        for (machine, when, note), files in alike.items()
    ]
    commands = dict.fromkeys(each.command for each in found if each.command)
    return [
        f"Measured as above: {', '.join(again)}." if again else "",
        "\n".join(lines),
        "\n".join(["```", *commands, "```"]) if commands else "",
    ]
