"""Kernels that are compiled before the first step: what stands in for what they would have written, and who asks."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from rollout.engine.step.compile_ahead import _kind, zeroed_tensors

KERNELS = """
    import torch, triton
    import triton.language as tl
    from triton import knobs
    from rollout.engine.step.compile_ahead import compile_kernels_of

    @triton.jit
    def add_one(x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

    @triton.jit
    def add_all(x, a, b, c, d, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) + a + b + c + d, mask=at < n)

    def launch(x):
        for block in BLOCKS:
            add_one[1,](x, 64, BLOCK=block)
            add_all[1,](x, 2, 3.5, 4, 5.5, 64, BLOCK=block)

    compiled, BLOCKS = [], (64, 128, 256, 512)
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"]) and None
"""
#: Kernels are launched where launches only compile, and then for real. Two kinds of arguments take two modules of one
#: name to launch them, which threads must not mix up.
ON_GPU = """
    x = torch.zeros(64, device="cuda")
    compile_kernels_of(lambda: (launch(x), launch(x.clone())), threads=4)
    assert not x.any(), "nothing ran"
    assert len(compiled) == 8, compiled
    launch(x)
    assert (x == 64).all(), x
    assert len(compiled) == 8, "all were there"
    add_one[1,](x.double(), 64, BLOCK=64)
    assert len(compiled) == 9, "another dtype"
"""
#: Triton's compiler needs no GPU, but for what loads the code.
WITHOUT_GPU = """
    import threading
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from scripts.check.compile_kernels import OfflineDriver
    from rollout.process.compiling import compiling

    builders, device = [], OfflineDriver(90)
    device.launcher_cls = lambda source, metadata: builders.append(threading.current_thread().name)
    driver.set_active(device)
    CompiledKernel.run = property(lambda kernel: "what launches it")
    x = torch.zeros(64)
    compile_kernels_of(lambda: (launch(x), launch(x.clone())), threads=4)
    assert not x.any() and len(compiled) == len(builders) == 8
    assert threading.main_thread().name not in builders
    compile_kernels_of(lambda: launch(x), threads=4)
    assert len(compiled) == len(builders) == 8, "all were there"
    for _ in range(2):
        try:
            compile_kernels_of(lambda: add_one[1,](x, 64, BLOCK=100), threads=4)
        except triton.CompilationError as error:
            assert "power of 2" in str(error)
        else:
            raise AssertionError("compiled")
    assert not compiling() and type(add_one).__getitem__ is triton.KernelInterface.__getitem__
"""


def test_memory_that_nobody_wrote_holds_zeros():
    empty = torch.empty
    dirt = [torch.full((4096,), 7, dtype=torch.int32) for _ in range(8)]
    like = dirt[0].clone()
    del dirt
    with torch.inference_mode(), zeroed_tensors():
        made = [torch.empty(4096, dtype=torch.int32), torch.empty_like(like), like.new_empty(4096)]
        made += [torch.empty_strided((64, 64), (1, 64), dtype=torch.int32), like.new_empty_strided((64,), (2,))]
        kept = torch.full((3,), 5)
    assert not any(tensor.any() for tensor in made)
    assert "new_empty" not in vars(torch.Tensor) and torch.empty is empty, "all is as before"
    assert kept.tolist() == [5, 5, 5]
    assert (like == 7).all()


def test_layers_ask_for_one_kernel():
    weights = [torch.zeros(8, 16) for _ in range(2)]
    assert _kind((weights[0], 16, True)) == _kind((weights[1], 16, True))
    assert _kind(weights[0]) != _kind(weights[0].half()), "another dtype"
    assert _kind(weights[0]) != _kind(weights[0].view(-1)[1:]), "another alignment"
    assert _kind(1) != _kind(True), "Triton compiles for 1, and for true"
    assert _kind((1, (weights[0], 2))) == _kind((1, (weights[1], 2)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "then", [pytest.param(ON_GPU, marks=pytest.mark.gpu, id="gpu"), pytest.param(WITHOUT_GPU, id="without one")]
)
def test_launches_compile_and_do_not_run(tmp_path, then):
    script = tmp_path / "launches.py"
    script.write_text(textwrap.dedent(KERNELS) + textwrap.dedent(then))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
