"""`scripts/compile_kernels.py`: kernels compile for GPUs that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("only", "rows", "capability", "kernels"),
    [
        ("8 rows: norm", 8, 90, {"_add_rms_norm_kernel", "_norm_router_kernel"}),
        ("8 rows: norm", 8, 80, {"_add_rms_norm_kernel", "_norm_router_kernel"}),
        ("dense, 32 rows: adapters, rank 16, qkv", 32, 90, {"_shrink_kernel", "_expand_kernel"}),
        ("dense, 8 rows: adapters later, rank 16, qkv", 8, 90, {"_shrink_kernel", "_finish_qkv_kernel"}),
        ("dense, 32 rows: adapters, product", 32, 90, {"_stream_kernel"}),
        ("2 rows: experts, fp8_row", 2, 90, {"_gate_up_kernel", "_down_kernel", "_group_kernel", "_combine_kernel"}),
    ],
)
def test_kernels_of_a_step_compile_for_hopper_and_before(
    only: str, rows: int, capability: int, kernels: set[str], tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts/compile_kernels.py"), "--only", only, "--rows", str(rows)]
    command += ["--capability", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert {re.split(r"  +", line)[1] for line in lines} >= kernels
    assert re.fullmatch(rf"{len(lines)} kernels compiled for compute capability {capability / 10} by Triton .*", last)
    assert all(re.search(r"\d+ registers +\d+ stack +\d+ shared", line) for line in lines)
