"""`scripts/check/kernel_ir.py`: equal kernels are found equal whatever their names, and other kernels are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check.kernel_ir import canonical, compare

ROOT = Path(__file__).parents[3]
KERNEL = """{"num_warps": 4}
module {
  tt.func public @_add(%x_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %unused: i32, %n: i32) attributes {} {
    %two = arith.constant 2.000000e+00 : f32
    %one = arith.constant 1 : i32
    %at = tt.addptr %x_ptr, %one : !tt.ptr<f32>, i32
    %x = tt.load %at : !tt.ptr<f32>
    %sum = arith.addf %x, %two : f32
    tt.store %at, %sum : !tt.ptr<f32>
  }
}
"""
SAME = """{"num_warps": 4}
module {
  tt.func public @_plus(%n: i32, %to: !tt.ptr<f32> {tt.divisibility = 16 : i32}) attributes {} {
    %cst = arith.constant 1 : i32
    %cst_0 = arith.constant 2.000000e+00 : f32
    %0 = tt.addptr %to, %cst : !tt.ptr<f32>, i32
    %1 = tt.load %0 : !tt.ptr<f32>
    %2 = arith.addf %1, %cst_0 : f32
    tt.store %0, %2 : !tt.ptr<f32>
  }
}
"""


def test_names_unused_arguments_and_orders_of_constants_do_not_count():
    assert canonical(KERNEL) == canonical(SAME)


@pytest.mark.parametrize(
    "place",
    [
        "#loc7",
        '"a (1).py":3:4',
        '"x"(#loc3)',
        "callsite(#loc1 at #loc438)",
        'callsite("a.py":1:2 at callsite(#loc1 at #loc2))',
    ],
)
def test_lines_of_sources_do_not_count(place):
    located = KERNEL.replace(" : f32\n", f" : f32 loc({place})\n").replace("%n: i32)", f"%n: i32 loc({place}))")
    assert canonical(f"{located}#loc = loc({place})\n#loc7 = loc({place})\n") == canonical(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("addf", "mulf"),
        ("2.000000e+00", "3.000000e+00"),
        ("addf %x, %two", "addf %two, %x"),
        ('"num_warps": 4', '"num_warps": 8'),
        ("!tt.ptr<f32> {tt.divisibility = 16 : i32}", "!tt.ptr<f32>"),
    ],
)
def test_what_changes_instructions_counts(old, new):
    assert old in KERNEL and canonical(KERNEL.replace(old, new)) != canonical(KERNEL)


def test_kernels_of_one_folder_alone_are_counted(tmp_path, capsys):
    for folder, texts in (("old", (KERNEL, KERNEL.replace("addf", "mulf"))), ("new", (SAME,))):
        for number, text in enumerate(texts):
            to = tmp_path / folder / "_add"
            to.mkdir(parents=True, exist_ok=True)
            (to / f"{number}.ir").write_text(text)
    assert compare(tmp_path / "old", tmp_path / "new") == 1
    assert "old/_add/1.ir" in capsys.readouterr().out


@pytest.mark.nightly
def test_kernels_are_written_without_a_gpu_and_again_alike_and_not_into_tritons_cache(tmp_path):
    cache = tmp_path / "cache"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(cache)}
    for folder in ("once", "again"):
        command = [sys.executable, "-m", "scripts.check.kernel_ir", "write", str(tmp_path / folder)]
        subprocess.run([*command, "--only", "moe, 1 rows: router"], cwd=ROOT, env=environment, check=True)
    assert list((tmp_path / "once").rglob("*.ir")) and compare(tmp_path / "once", tmp_path / "again") == 0
    assert not list(cache.rglob("*.cubin"))
