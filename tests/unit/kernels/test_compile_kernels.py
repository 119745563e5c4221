"""`scripts/check/compile_kernels.py` compiles kernels for GPUs that are not present, and the result is free of races.

Compiled kernels show which thread owns which element. Neither their source nor Triton's interpreter shows this.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]


class Case(NamedTuple):
    """Arguments of the script, and the kernels that it must compile."""

    only: list[str]
    rows: int
    capability: int
    kernels: set[str]


NORM = ["8 rows: norm", "dense, 8 rows: rotate heads"]
NORM_KERNELS = {"_add_rms_norm_kernel", "_norm_router_kernel", "_rotate_heads_kernel"}
CASES = {
    "norms": Case(
        [*NORM, "dense, 8 rows: adapters later, rank 16, qkv"],
        8,
        90,
        NORM_KERNELS | {"_shrink_kernel", "_finish_qkv_kernel"},
    ),
}
MORE_CASES = {
    "linear attention": Case(
        ["moe, 8 rows: delta"],
        8,
        90,
        {
            "_conv_step_kernel",
            "_conv_spans_kernel",
            "_step_kernel",
            "_walk_kernel",
            "_prepare_kernel",
            "_scan_kernel",
            "_gated_norm_kernel",
        },
    ),
    "steps": Case(
        ["dense, 32 rows: sampling", "dense, 32 rows: decode attention, fp8 KV"],
        32,
        90,
        {"_search_kernel", "_merge_kernel", "_cut_kernel", "_pass_1", "_pass_2", "_allow_kernel"}
        | {"_decode_kernel", "_plan_kernel"},
    ),
    "drafts": Case(
        ["dense, 32 rows: set drafts up", "dense, 32 rows: accept drafts"], 32, 90, {"_set_up_kernel", "_accept_kernel"}
    ),
    "group attention": Case(
        ["dense, 32 rows: group attention"], 32, 90, {"_decode_kernel", "_plan_kernel", "combine_kernel"}
    ),
    "norms before Hopper": Case(NORM, 8, 80, NORM_KERNELS),
    "adapters": Case(["dense, 32 rows: adapters, rank 16, qkv"], 32, 90, {"_shrink_kernel", "_expand_kernel"}),
    "product": Case(["dense, 32 rows: adapters, product"], 32, 90, {"_stream_kernel"}),
    "experts": Case(
        ["2 rows: experts, fp8_row"], 2, 90, {"_gate_up_kernel", "_down_kernel", "_group_kernel", "_combine_kernel"}
    ),
}
#: Operations of Triton's GPU dialect whose result has the addresses of their first operand.
PASSES = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.bitcast", "ttg.convert_layout"}
LOADS = {"tt.load", "ttg.async_copy_global_to_local"}
STORES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.nightly) for case in MORE_CASES.values())],
    ids=[*CASES, *MORE_CASES],
)
def test_kernels_of_a_step_compile_for_hopper_and_before(case: Case, tmp_path: Path) -> None:
    script = str(ROOT / "scripts/check/compile_kernels.py")
    command = [sys.executable, script, "--only", *case.only, "--rows", str(case.rows)]
    command += ["--capability", str(case.capability)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert {re.split(r"  +", line)[1] for line in lines} >= case.kernels
    assert re.fullmatch(rf"{len(lines)} kernels compiled for compute capability {case.capability / 10} by .*", last)
    assert all(re.search(r"\d+ registers +\d+ stack +\d+ shared", line) for line in lines)
    compiled = list(tmp_path.glob("*/*.ttgir"))
    assert {path.stem for path in compiled} >= case.kernels
    assert [(path.stem, found) for path in compiled for found in between_threads(path.read_text())] == []


class Touch(NamedTuple):
    """A load or a store of a tensor through an argument of the kernel."""

    argument: str
    is_load: bool
    layout: str


def between_threads(ttgir: str) -> list[str]:
    """Loads and stores through one argument that may race: other layouts (so other threads), and no barrier between.

    It looks at tensors, in the order of the text: one pass of a loop, one branch of a condition. Where a loop or a
    branch may be skipped, its barriers do not count for the rest. If a load and a store have the same layout, a thread
    stores only elements that it has loaded itself.
    """
    argument_of: dict[str, str] = {}  # of pointers
    since_barrier: list[Touch] = []
    regions: list[tuple[int, list[Touch], list[Touch]]] = []  # indent, touches before, touches if another way is taken
    found = []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        before = otherwise = since_barrier.copy()
        if regions and indent == regions[-1][0] and line.startswith("}", indent):
            _, before, otherwise = regions.pop()
            if "else {" in line:
                otherwise, since_barrier = since_barrier, before.copy()
            else:
                since_barrier += [touch for touch in otherwise if touch not in since_barrier]
        if line.endswith("{") and ("scf." in line or "else {" in line):
            regions.append((indent, before, otherwise))
        if "tt.func" in line:
            argument_of = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", line)}
        for inner, outer in re.findall(r"(%\w+) = (%\w+)", line):  # values that a loop carries
            argument_of[inner] = argument_of.get(outer, "")
        match = re.match(r"\s*(?:(%\w+)\S* = )?([\w.]+) [^%]*(%\w+)?", line)
        if match is None:
            continue
        result, operation, operand = match.groups()
        if result is not None:
            argument_of[result] = argument_of.get(operand, "") if operation in PASSES else ""
        if operation in ("gpu.barrier", "ttg.barrier", "ttg.local_barrier"):
            since_barrier.clear()
        layout = re.search(r"!tt\.ptr<\w+>, (#[^>]*)", line)
        if operation not in LOADS | STORES or layout is None or not argument_of.get(operand):
            continue
        touch = Touch(argument_of[operand], operation in LOADS, layout[1])
        for earlier in since_barrier:
            one_stores, other_thread = earlier.is_load != touch.is_load, earlier.layout != touch.layout
            if earlier.argument == touch.argument and one_stores and other_thread:
                found.append(f"{touch.argument}: {line.strip()}")
        since_barrier.append(touch)
    return found


@pytest.mark.parametrize(("barrier", "layout", "meet"), [("", "#b", 1), ("ttg.barrier all", "#b", 0), ("", "#a", 0)])
def test_a_store_over_what_another_thread_loads_is_found(barrier: str, layout: str, meet: int) -> None:
    ttgir = f"""
      tt.func public @k(%p: !tt.ptr<i64> loc("p")) {{
        %s = tt.splat %p : !tt.ptr<i64> -> tensor<64x!tt.ptr<i64>, #a>
        %a = tt.addptr %s, %r : tensor<64x!tt.ptr<i64>, #a>, tensor<64xi32, #a>
        %x = tt.load %a cacheModifier = cg : tensor<64x!tt.ptr<i64>, #a>
        {barrier}
        %c = ttg.convert_layout %a : tensor<64x!tt.ptr<i64>, #a> -> tensor<64x!tt.ptr<i64>, {layout}>
        tt.store %c, %zero : tensor<64x!tt.ptr<i64>, {layout}>
    """
    assert len(between_threads(ttgir)) == meet


@pytest.mark.parametrize(
    ("text", "meet"),
    [
        ("IF LOAD ELSE STORE END", 0),
        ("IF LOAD END STORE", 1),
        ("LOAD IF BARRIER ELSE BARRIER END STORE", 0),
        ("LOAD IF BARRIER ELSE END STORE", 1),
        ("LOAD IF BARRIER END STORE", 1),
        ("LOAD LOOP BARRIER STORE END", 0),
        ("LOAD LOOP BARRIER END STORE", 1),
    ],
)
def test_a_barrier_counts_only_on_the_ways_that_meet_it(text: str, meet: int) -> None:
    lines = {
        "IF": "  scf.if %c {",
        "ELSE": "  } else {",
        "LOOP": "  scf.for %i = %0 to %1 step %2  : i32 {",
        "END": "  }",
        "BARRIER": "    ttg.barrier all",
        "LOAD": "    %x = tt.load %a : tensor<64x!tt.ptr<i64>, #a>",
        "STORE": "    tt.store %b, %zero : tensor<64x!tt.ptr<i64>, #b>",
    }
    head = [
        'tt.func public @k(%p: !tt.ptr<i64> loc("p")) {',
        "  %a = tt.splat %p : !tt.ptr<i64> -> tensor<64x!tt.ptr<i64>, #a>",
        "  %b = tt.splat %p : !tt.ptr<i64> -> tensor<64x!tt.ptr<i64>, #b>",
    ]
    ttgir = "\n".join([*head, *(lines[word] for word in text.split()), "}"])
    assert len(between_threads(ttgir)) == meet
