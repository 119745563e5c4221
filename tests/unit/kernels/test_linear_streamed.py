"""Streamed products: on a Hopper GPU against float64; elsewhere the kernel is only compiled for Hopper."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rollout_kernels import gated
from rollout_kernels.linear.table import linear_config
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear, linear_parts

from tests.support.kernels.linear_cases import DEVICE, operands, relative

#: block_n, block_k, split, warps, stages, programs; a tile of `gated_linear` holds gate and up rows.
SHAPES = [
    (64, 64, 1, 4, 6, 132),
    (64, 128, 2, 4, 4, 7),
    (128, 64, 1, 4, 3, 132),
    (128, 64, 4, 8, 4, 50),
    (192, 64, 1, 4, 4, 5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 4096), (3, 150), (9, 1024), (32, 2048), (100, 512), (200, 512)])
def test_streamed_products_are_those_of_float64(rows, outputs, shape, stagger):
    """The bound is 1e-5, because the tensor cores' float32 sums lose low bits (2e-6 of the result)."""
    x, w, expected = operands(rows, outputs, 2048)
    config = LinearConfig(*shape, streamed=True, stagger=stagger)
    parts = linear_parts(x, w, config)
    assert parts.shape == (config.split, rows, outputs) and relative(parts.double().sum(0), expected) < 1e-5
    if config.split == 1:
        assert relative(linear(x, w, config), expected) < 5e-3
    if config.split == 1 and outputs % 2 == 0:
        for activation in ("silu", "gelu_tanh"):
            assert relative(gated_linear(x, w, config, activation), gated(expected, activation)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_programs_stages_and_other_rows_change_no_bit(shape, stagger):
    block_n, block_k, split, warps, _, _ = shape
    x, w, _ = operands(60, 2048, 2048)
    whole = linear_parts(x, w, LinearConfig(*shape, streamed=True, stagger=stagger))
    for stages, programs in ((2, 1), (3, 20), (8, 500)):
        config = LinearConfig(block_n, block_k, split, warps, stages, programs, True, stagger)
        assert torch.equal(linear_parts(x, w, config), whole)
    assert torch.equal(linear_parts(x[7:8], w, LinearConfig(*shape, streamed=True, stagger=stagger))[:, 0], whole[:, 7])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (48, 192), (16, 128)])
def test_models_smaller_than_a_tile(outputs, inputs):
    x, w, expected = operands(2, outputs, inputs)
    parts, whole, silu = (linear_config(outputs, inputs, kind, 2) for kind in ("parts", "whole", "silu"))
    assert parts is not None and whole is not None and silu is not None
    assert parts.streamed and whole.streamed and silu.streamed and silu.stagger
    assert relative(linear_parts(x, w, parts).double().sum(0), expected) < 1e-5
    assert relative(linear(x, w, whole, torch.float32), expected) < 1e-5
    gate, up = expected.chunk(2, dim=1)
    assert relative(gated_linear(x, w, silu), torch.nn.functional.silu(gate) * up) < 5e-3


@pytest.mark.gpu
def test_a_chain_in_a_graph_waits_for_what_it_reads():
    """Each product reads the result of the one before. Weights may be prefetched, results must not."""
    x, _, _ = operands(8, 64, 2048)
    generator = torch.Generator().manual_seed(3)
    weights = [(torch.randn(2048, 2048, generator=generator) / 45).bfloat16().to(DEVICE) for _ in range(40)]

    def run(streamed: bool) -> torch.Tensor:
        hidden = x
        for weight in weights:
            hidden = linear(hidden, weight, LinearConfig(64, 64, 1, 4, 6, 132, streamed))
        return hidden

    expected = run(streamed=False)
    run(streamed=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(streamed=True)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative(got, expected.double()) < 0.05, "bf16 between 40 products, summed in another order"


COMPILE = """
import triton
from rollout_kernels.linear import gluon_linear
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

kernel = gluon_linear._stream_kernel
layout, paired = (gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 4))
for block_m, silu, split, blocks in ((8, True, 1, 1), (32, False, 2, 3)):
    given = dict(K=2048, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64, SPLIT=split, STAGES=5, num_warps=4)
    given |= {"BLOCKS": blocks, "BESIDE": False, "STAGGER": silu, "ACTIVATION": "silu" if silu else None}
    signature = dict.fromkeys(given, "constexpr") | dict.fromkeys(("rows", "N", "items", "tiles"), "i32")
    signature |= {"out_ptr": "*bf16", "w_desc": f"tensordesc<bf16[64, 64],{layout!r}>"}
    if silu:
        signature["w_desc"] = f"tensordesc<bf16[4, 2, 8, 64],{paired!r}>"
    signature["x_desc"] = f"tensordesc<bf16[{block_m}, 64],{layout!r}>"
    signature = {name: signature[name] for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    source = GluonASTSource(kernel, signature, constants)
    options = {"num_warps": 4, "launch_pdl": True}
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    print("=" * 10)
"""


@pytest.mark.nightly
def test_the_kernel_compiles_for_hopper_and_asks_for_weights_before_it_waits(tmp_path: Path):
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root / "kernels"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    silu, parts, _ = done.stdout.split("=" * 10)
    for ptx, copies in ((silu, 3), (parts, 9)):  # one copy for each block, for all stages of the ring except two
        before, after = ptx.split("griddepcontrol.wait")
        assert len(re.findall(r"cp\.async\.bulk\.tensor", before)) == copies
        assert "griddepcontrol.launch_dependents" in before and "wgmma.mma_async" in after
        assert "wgmma.mma_async" not in before and "st.global" not in before
