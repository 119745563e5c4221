"""Draws the charts of docs/performance.md and writes the tables of docs/benchmarks from the committed summaries.

python -m scripts.bench.charts            write docs/benchmarks
python -m scripts.bench.charts --check    fail if a file there differs from what this script writes
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.bench.bars import Panel, draw
from scripts.bench.summaries import Row, rows, summary, value
from scripts.bench.tables import BESIDE_TRL, LEARNING, TASKS, pages
from scripts.learn.curves import draw_runs

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
_ROWS = (1, 8, 32, 128)


def beside(name: str, groups: Mapping[str, Mapping[str, object]], title: str, field: str = "ms") -> Panel:
    """A panel of one summary: a group for each of `groups`, a name with what its rows have; here, vLLM and floor."""
    floor = {"ms": "floor_ms", "total_s": "floor_s"}[field]
    return Panel(
        title,
        list(groups),
        {
            label: [value(name, field, engine=engine, **where) for where in groups.values()]
            for label, engine in (("here", "here"), ("vLLM", "vllm"))
        },
        [value(name, floor, engine="here", **where) for where in groups.values()],
    )


def joined(title: str, *panels: Panel) -> Panel:
    """One panel with the groups of several."""
    names = panels[0].series
    return Panel(
        title,
        [group for panel in panels for group in panel.groups],
        {name: [number for panel in panels for number in panel.series[name]] for name in names},
        [number for panel in panels for number in panel.floor],
    )


def _decode() -> str:
    def shape(title: str, side: str, many: str, counts: Sequence[int]) -> Panel:
        few = {f"{count}": {"experiment": "decode", "rows": count} for count in _ROWS}
        more = {f"{count}": {"experiment": "decode", "rows": count} for count in counts}
        return joined(title, beside(side, few, title), beside(many, more, title))

    panels = [
        shape("Qwen3-8B, by rows", "peers_8b_decode_h200", "rows_8b_h200", (256, 512)),
        shape("Qwen3-30B-A3B, by rows", "peers_30b_a3b_side_h200", "rows_30b_a3b_h200", (256,)),
    ]
    return draw("Decoding: ms a step", [panels])


def _groups() -> str:
    works = {f"{count} x {context // 1024}K": (count, context) for count in (32, 128) for context in (4096, 16384)}
    where = {
        label: {"experiment": "contexts", "rows": count, "context": context, "completions": 8}
        for label, (count, context) in works.items()
    }
    request = {"32 prompts x 8": {"experiment": "groups", "requests": 32}}
    shapes = {"8B": "8b", "30B-A3B": "30b_a3b"}
    panels = [beside(f"contexts_{file}_h200", where, f"{shape}, n = 8: ms a step") for shape, file in shapes.items()]
    whole = [
        joined("", *(beside(f"groups_{file}_h200", request, "", "total_s") for file in shapes.values())),
    ]
    whole = [Panel("32 prompts of 4K x 8 completions, s", list(shapes), whole[0].series, whole[0].floor)]
    return draw("Groups that share a prompt: rows x prompt", [[*panels, *whole]])


def _agents() -> str:
    found = [*rows("agents_short_h200"), *rows("agents_short_fp8_h200")]
    labels = [{"ours": "here", "socket": "here, fp8 KV"}.get(row["engine"], "vLLM") for row in found]
    here = [label != "vLLM" for label in labels]

    def panel(title: str, numbers: Sequence[float], floor: Sequence[float | None]) -> Panel:
        pairs = list(zip(numbers, here, strict=True))
        series = {
            "here": [number if ours else None for number, ours in pairs],
            "vLLM": [None if ours else number for number, ours in pairs],
        }
        return Panel(title, labels, series, floor)

    distinct = summary("agents_short_h200")["distinct"] / 1e6
    panels = [
        panel("96 agents x 8 turns, s", [row["total_s"] for row in found], [row["floor_s"] for row in found]),
        panel(
            "prompt tokens computed, millions",
            [row["computed_prompt_tokens"] / 1e6 for row in found],
            [distinct] * len(found),
        ),
        panel("99th percentile of a turn, s", [row["turn_s"]["p99"] for row in found], []),
    ]
    return draw("Agents that come back: Qwen3-8B", [panels])


def _several_gpus() -> str:
    where = {f"{count}": {"experiment": "contexts", "rows": count, "context": 1024} for count in _ROWS}
    works = [
        ("2 GPUs: 8B", "8b_tp2"),
        ("2 GPUs: 30B-A3B", "30b_a3b_tp2"),
        ("2 GPUs: 32B", "32b_tp2"),
        ("2 GPUs: Llama 70B", "70b_tp2"),
        ("4 GPUs: 30B-A3B", "30b_a3b_tp4"),
        ("4 GPUs: Llama 70B", "70b_tp4"),
        ("4 GPUs: 235B-A22B", "235b_a22b_tp4"),
    ]
    panels = [beside(f"contexts_{file}_h200", where, title) for title, file in works]
    return draw("One worker on several GPUs: ms a step by rows, contexts of 1K", [panels[:4], panels[4:]])


def _updates() -> str:
    works = {
        "8B\nipc, 1 GPU": "8b",
        "8B\nipc, 2 ranks": "8b_tp2",
        "8B\n2 + 2 ranks, nccl": "8b_ranks",
        "30B-A3B\nipc in place": "30b_a3b_ipc",
        "30B-A3B\nnccl": "30b_a3b_nccl_default",
        "30B-A3B\nipc, 2 GPUs": "30b_a3b_ipc_two_gpus",
    }
    large = {"235B-A22B\nipc in place, 4 ranks": "235b_a22b_tp4"}

    def panel(title: str, files: Mapping[str, str], field: str, floor: bool) -> Panel:
        found = [_median(file) for file in files.values()]
        return Panel(
            title,
            list(files),
            {field.removesuffix("_ms"): [row[field] for row in found]},
            [row["floor_ms"] for row in found] if floor else [],
        )

    return draw(
        "Updates of weights, while rows decode",
        [
            [panel("from publish to applied, ms", works, "applied_ms", False), panel("", large, "applied_ms", False)],
            [panel("pause, ms", works, "pause_ms", True), panel("", large, "pause_ms", True)],
        ],
    )


def _median(file: str) -> Row:
    return next(row for row in rows(f"swap_{file}_h200") if "median_of" in row)


def _pipeline() -> str:
    found = rows("pipeline_h200")
    labels = [f"{row['shape'].removeprefix('qwen3-').upper()}\n{row['rows']}" for row in found]
    panels = [
        Panel(
            "GPU idle, % of the time; active is the rest",
            labels,
            {f"depth {depth}": [100 - row[f"active{depth}_pct"] for row in found] for depth in (1, 2)},
        ),
        Panel(
            "depth 2 over depth 1, % faster",
            labels,
            {
                "predicted": [row["predicted_pct"] for row in found],
                "observed": [row["observed_pct"] for row in found],
            },
        ),
    ]
    return draw("The pipeline: by model and rows", [[panel] for panel in panels])


def _learning() -> str:
    return draw_runs("SmolLM2-135M-Instruct learns sums", [found for name in LEARNING for found in rows(name)])


def _learning_a_tool() -> str:
    found = [found for name in TASKS for found in rows(name) if found["name"].startswith("calculator")]
    return draw_runs("SmolLM2-135M-Instruct learns to use a calculator", found)


def _learning_beside_trl() -> str:
    return draw_runs("SmolLM2-135M-Instruct learns to repeat 80 numbers, beside TRL", rows(BESIDE_TRL))


CHARTS: Mapping[str, Callable[[], str]] = {
    "decode": _decode,
    "groups": _groups,
    "agents": _agents,
    "several_gpus": _several_gpus,
    "updates": _updates,
    "pipeline": _pipeline,
    "learning": _learning,
    "learning_a_tool": _learning_a_tool,
    "learning_beside_trl": _learning_beside_trl,
}


def written() -> dict[str, str]:
    """All files of docs/benchmarks, by name."""
    return {
        **{f"{name}.svg": draw_chart() for name, draw_chart in CHARTS.items()},
        **{f"{name}.md": text for name, text in pages().items()},
    }


def stale(folder: Path) -> list[str]:
    """The names of files in `folder` that differ from what this script writes, are missing, or are left over."""
    files = written()
    there = {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}
    return sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write or check the files of docs/benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.charts", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    options = parser.parse_args(arguments)
    if options.check:
        if wrong := stale(options.folder):
            parser.exit(1, f"not as the script writes them: {', '.join(wrong)}; run it without --check\n")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in stale(options.folder):
        if name in (files := written()):
            (options.folder / name).write_text(files[name])
        else:
            (options.folder / name).unlink()


if __name__ == "__main__":
    main()
