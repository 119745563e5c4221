"""Philox against its authors' published test vectors and against Triton's implementation."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from rollout_kernels import gumbel_noise, philox_4x32
from rollout_kernels.sampling.philox import row_words

# Random123's known answers for philox4x32-10: counter, key, output.
ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

TRITON_PROGRAM = """
import torch, triton, triton.language as tl

@triton.jit
def words(out, seed, index, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    zero = tl.zeros([BLOCKS], tl.int32)
    c0 = block.to(tl.uint32, bitcast=True)
    c1 = (zero + index).to(tl.uint32, bitcast=True)
    a, b, c, d = tl.philox(seed, c0, c1, zero.to(tl.uint32, bitcast=True), zero.to(tl.uint32, bitcast=True))
    tl.store(out + block * 4 + 0, a.to(tl.int32, bitcast=True))
    tl.store(out + block * 4 + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + block * 4 + 2, c.to(tl.int32, bitcast=True))
    tl.store(out + block * 4 + 3, d.to(tl.int32, bitcast=True))

for seed, index in ((5, 0), (2**62 + 12345, 16383), (2**33 + 1, 7)):
    out = torch.zeros(64, dtype=torch.int32)
    words[(1,)](out, seed, index, 16)
    print(*(out.long() & 0xFFFFFFFF).tolist())
"""


@pytest.mark.parametrize(("counter", "key", "expected"), ANSWERS)
def test_published_answers(counter, key, expected):
    even, odd = philox_4x32(*(torch.tensor([[a], [b]]) for a, b in (counter[::2], counter[1::2], key)))
    assert [int(even[0]), int(odd[0]), int(even[1]), int(odd[1])] == expected


@pytest.mark.nightly
def test_bit_equal_to_triton_in_its_interpreter(tmp_path):
    # A process of its own: Triton reads TRITON_INTERPRET when it is imported. A file, since it reads kernels' source.
    program = tmp_path / "words.py"
    program.write_text(textwrap.dedent(TRITON_PROGRAM))
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    for (seed, index), line in zip(((5, 0), (2**62 + 12345, 16383), (2**33 + 1, 7)), lines, strict=True):
        assert row_words(torch.tensor([seed]), torch.tensor([index]), 64)[0].tolist() == line


def test_a_rows_words_depend_on_seed_and_index_only():
    seeds, indices = torch.tensor([3, 4, 3]), torch.tensor([7, 7, 8])
    words = row_words(seeds, indices, 33)
    assert torch.equal(words[0], row_words(torch.tensor([3]), torch.tensor([7]), 33)[0])
    assert torch.equal(words[0, :5], row_words(torch.tensor([3]), torch.tensor([7]), 5)[0])
    assert not torch.equal(words[0], words[1]) and not torch.equal(words[0], words[2])


def test_gumbel_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64), 8).double().flatten()
    # Mean: the Euler-Mascheroni constant; variance: pi^2 / 6. Five standard errors.
    assert abs(noise.mean().item() - 0.5772157) < 5 * (1.6449 / len(noise)) ** 0.5
    assert abs(noise.var().item() - 1.6449341) < 5 * 4.0 / len(noise) ** 0.5
    assert noise.isfinite().all()
