"""`scripts/compile_kernels.py`: kernels compile for GPUs that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen]]:
    """The script for each case, all of them at once."""
    script = str(ROOT / "scripts/compile_kernels.py")
    started = []
    for only, rows, capability, _ in CASES:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
        command = [sys.executable, script, "--only", only, "--rows", str(rows), "--capability", str(capability)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment, text=True, **streams))
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{only}-{capability}" for only, _, capability, _ in CASES])
def test_kernels_of_a_step_compile_for_hopper_and_before(compiling: list[subprocess.Popen], case: int) -> None:
    _, _, capability, kernels = CASES[case]
    out, error = compiling[case].communicate(timeout=240)
    assert compiling[case].returncode == 0, error
    *lines, last = out.splitlines()
    assert {re.split(r"  +", line)[1] for line in lines} >= kernels
    assert re.fullmatch(rf"{len(lines)} kernels compiled for compute capability {capability / 10} by Triton .*", last)
    assert all(re.search(r"\d+ registers +\d+ stack +\d+ shared", line) for line in lines)
