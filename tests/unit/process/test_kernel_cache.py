"""Compiled kernels are found in a folder that was moved since Triton filled it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollout.cli.main import main
from rollout.process.compiling import use_kernels
from tests.support.models.families import make_checkpoint

pytest.importorskip("triton")

COMPILE = """
    import sys
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from rollout.process.compiling import use_kernels

    @triton.jit
    def double(x_ptr, BLOCK: tl.constexpr):
        at = x_ptr + tl.arange(0, BLOCK)
        tl.store(at, 2 * tl.load(at))

    use_kernels(sys.argv[1] if len(sys.argv) > 1 else None)
    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    source = ASTSource(double, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 32})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert kernel.asm["cubin"]
    print(hits)
"""


@pytest.fixture
def found(tmp_path):
    """Whether a process with this own folder, and these shipped ones, finds the kernel that it asks for."""
    script = tmp_path / "compile.py"
    script.write_text(textwrap.dedent(COMPILE))

    def run(own: str, *shipped: Path) -> bool:
        paths = os.pathsep.join(sys.path)
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / own), "PYTHONPATH": paths}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(script), *map(str, shipped)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert ran.returncode == 0, ran.stderr
        return {"[True]": True, "[False]": False}[ran.stdout.strip()]

    return run


def test_kernels_of_a_moved_folder_are_not_compiled_again(tmp_path, found):
    assert not found("first") and found("first")
    shipped = tmp_path / "elsewhere" / "kernels"
    shutil.copytree(tmp_path / "first", shipped)
    shutil.rmtree(tmp_path / "first")
    assert found("second", shipped)
    shutil.move(shipped, tmp_path / "second moved")
    assert found("second moved"), "Triton's own folder may move, too"


def test_a_kernel_that_lacks_a_file_or_whose_list_is_damaged_is_compiled(tmp_path, found):
    assert not found("shipped")
    shipped = tmp_path / "shipped"
    before = sorted(path.read_bytes() for path in shipped.rglob("*") if path.is_file())
    (cubin,) = shipped.rglob("*.cubin")
    taken = cubin.rename(tmp_path / "taken")
    assert not found("second", shipped)
    taken.rename(cubin)
    (listed,) = shipped.rglob("__grp__*")
    listed.write_text("{")
    assert not found("third", shipped)
    assert len(before) == sum(path.is_file() for path in shipped.rglob("*")), "it is never written"


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kernel_cache"):
        use_kernels(str(tmp_path / "missing"))


def test_the_command_says_that_a_worker_without_a_gpu_compiles_nothing(tmp_path, capsys):
    make_checkpoint("qwen3", tmp_path / "model")
    flags = ["--device", "cpu", "--ready-file", str(tmp_path / "ready"), "--kernel-cache", str(tmp_path / "missing")]
    assert main(["kernels", str(tmp_path / "model"), "--into", str(tmp_path / "kernels"), *flags]) == 1
    told = capsys.readouterr()
    assert "0 kernels" in told.out and "no kernel" in told.err
    assert main(["kernels", "--into", str(tmp_path / "kernels")]) == 2
