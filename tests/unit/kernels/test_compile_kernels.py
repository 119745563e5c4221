"""`scripts/check/compile_kernels.py`: kernels compile for GPUs that are not there.

In what it leaves of them one can see which thread has which element, what neither the source nor the interpreter shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
CASES = [
    ("8 rows: norm", 8, 90, {"_add_rms_norm_kernel", "_norm_router_kernel"}),
    ("8 rows: norm", 8, 80, {"_add_rms_norm_kernel", "_norm_router_kernel"}),
    ("dense, 32 rows: adapters, rank 16, qkv", 32, 90, {"_shrink_kernel", "_expand_kernel"}),
    ("dense, 8 rows: adapters later, rank 16, qkv", 8, 90, {"_shrink_kernel", "_finish_qkv_kernel"}),
    ("dense, 32 rows: adapters, product", 32, 90, {"_stream_kernel"}),
    ("dense, 32 rows: decode attention, fp8 KV", 32, 90, {"decode_codes_kernel", "_plan_kernel"}),
    ("dense, 32 rows: sampling", 32, 90, {"_search_kernel", "_cut_kernel", "_pass_1", "_pass_2", "_allow_kernel"}),
    ("2 rows: experts, fp8_row", 2, 90, {"_gate_up_kernel", "_down_kernel", "_group_kernel", "_combine_kernel"}),
]
#: Operations of Triton's GPU dialect that hand on the addresses of their first operand.
PASSES = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.bitcast", "ttg.convert_layout"}
LOADS = {"tt.load", "ttg.async_copy_global_to_local"}
STORES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas"}


class Compiling(NamedTuple):
    """The script at work, and where the kernels come to lie."""

    process: subprocess.Popen[str]
    cache: Path


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Compiling]]:
    """The script for each case, all of them at once."""
    script = str(ROOT / "scripts/check/compile_kernels.py")
    started = []
    for only, rows, capability, _ in CASES:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        cache = tmp_path_factory.mktemp("cache")
        environment["TRITON_CACHE_DIR"] = str(cache)
        command = [sys.executable, script, "--only", only, "--rows", str(rows), "--capability", str(capability)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(Compiling(subprocess.Popen(command, env=environment, text=True, **streams), cache))
    yield started
    for process, _ in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{only}-{capability}" for only, _, capability, _ in CASES])
def test_kernels_of_a_step_compile_for_hopper_and_before(compiling: list[Compiling], case: int) -> None:
    _, _, capability, kernels = CASES[case]
    process, cache = compiling[case]
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    *lines, last = out.splitlines()
    assert {re.split(r"  +", line)[1] for line in lines} >= kernels
    assert re.fullmatch(rf"{len(lines)} kernels compiled for compute capability {capability / 10} by Triton .*", last)
    assert all(re.search(r"\d+ registers +\d+ stack +\d+ shared", line) for line in lines)
    compiled = list(cache.glob("*/*.ttgir"))
    assert {path.stem for path in compiled} >= kernels
    assert [(path.stem, found) for path in compiled for found in between_threads(path.read_text())] == []


def between_threads(ttgir: str) -> list[str]:
    """Reads and writes through one argument that may meet in an element, by different threads and without a barrier.

    Of tensors, in the order of the text. Where a load and a store have one layout, a thread stores what it has read.
    """
    argument_of: dict[str, str] = {}  # of pointers
    since_barrier: list[tuple[str, bool, str]] = []
    found = []
    for line in ttgir.splitlines():
        if "tt.func" in line:
            argument_of = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", line)}
        for inner, outer in re.findall(r"(%\w+) = (%\w+)", line):  # what a loop carries
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
        touch = (argument_of[operand], operation in LOADS, layout[1])
        for earlier in since_barrier:
            if earlier[0] == touch[0] and earlier[1] != touch[1] and earlier[2] != touch[2]:
                found.append(f"{touch[0]}: {line.strip()}")
        since_barrier.append(touch)
    return found


@pytest.mark.parametrize(("barrier", "layout", "meet"), [("", "#b", 1), ("ttg.barrier all", "#b", 0), ("", "#a", 0)])
def test_a_store_over_what_another_thread_reads_is_seen(barrier: str, layout: str, meet: int) -> None:
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
