"""Draw tokens on a GPU: one pass over the logits, then a small one over the partial results.

    pass 1   a program for each row and block of the vocabulary: Gumbel noise, the best noisy logit, and log-sum-exps of
             the raw, the tempered and the drawn logits
    pass 2   a program for each row: the best of all blocks, and three log-probs. The token goes to the output and
             to the row's state, where the next step reads it

Noise and order of operations are as in `rollout_kernels.sampling.sample`: same counter, same words. Logarithms and
exponentials are the GPU's approximate instructions, so noise differs by about 3e-6. Pass 1 is bound by arithmetic, not
by memory.

Each rank of a tensor group draws over its part of the vocabulary: pass 1 runs over that part with the random numbers of
its tokens, the ranks exchange the results of all blocks, and pass 2 merges them on every rank. If the tokens are drawn
from another distribution, the rank has its part of that distribution, too.

Legend: S rows that sample, V vocabulary, P planes of partial results, B blocks, R rows of the state, I and F columns of
its integers and floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import INTERPRETED
from rollout_kernels.sampling.sharded import VocabShard

_BLOCK = 2048
#: Pass 1 writes five planes: best noisy logit, its token, and the log-sums of raw, tempered and drawn logits. Of a part
#: of the vocabulary there are two more: the raw and the drawn logit of that token.
_PLANES, _PLANES_OF_PART = 5, 7


@triton.jit
def _fast_log(x):
    """Natural logarithm of positive normal float32 in two instructions; absolute or relative error up to 2e-7."""
    if INTERPRETED:
        return tl.log(x)
    else:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453


@triton.jit
def _fast_exp(x):
    """exp(x) of float32 in two instructions; 0 where it is below the smallest normal number."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        log2 = x * 1.4426950408889634
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [log2], tl.float32, is_pure=True, pack=1)


@triton.jit
def _philox(counter, index, low, high):
    """The four words of each counter (counter, index, 0, 0), as `philox.philox_4x32`.

    One multiplication gives both halves of a product. `tl.philox` takes two.
    """
    a, b = counter, index
    c = tl.zeros_like(counter)
    d = tl.zeros_like(counter)
    for _ in tl.static_range(10):
        of_a = a.to(tl.uint64) * 0xD2511F53
        of_c = c.to(tl.uint64) * 0xCD9E8D57
        a = (of_c >> 32).to(tl.uint32) ^ b ^ low
        c = (of_a >> 32).to(tl.uint32) ^ d ^ high
        b = of_c.to(tl.uint32)
        d = of_a.to(tl.uint32)
        low += tl.full([], 0x9E3779B9, tl.uint32)
        high += tl.full([], 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _gumbel(seed, index, first, BLOCK: tl.constexpr):
    """Standard Gumbel noise of tokens first .. first + BLOCK - 1, as `philox.gumbel_noise`; `first` divides by 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32, bitcast=True)
    indices = tl.zeros_like(counter) + index.to(tl.uint32)
    # The first conversion of the seed truncates to the low word.
    a, b, c, d = _philox(counter, indices, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - u). For small u, where the winners are and 1 - u loses digits, by its power series.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -_fast_log(tl.where(u < 0.0625, series, -_fast_log(1.0 - u)))


@triton.jit
def _log_sum(logs):
    """Log of the sum of exp(logs); -inf if all of them are."""
    most = tl.max(logs)
    safe = tl.where(most > -float("inf"), most, 0.0)
    return safe + tl.log(tl.sum(_fast_exp(logs - safe)))


@triton.jit
def _pass_1(
    logits_ptr, drawn_ptr, floats_ptr, ints_ptr, rows_ptr, partial_ptr,
    V, blocks, first_token,
    INTS: tl.constexpr, FLOATS: tl.constexpr, LENGTH: tl.constexpr, PROMPT: tl.constexpr, SEED: tl.constexpr,
    TEMPERATURE: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    sampled = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows_ptr + sampled)
    seed = tl.load(ints_ptr + row * INTS + SEED)
    index = tl.load(ints_ptr + row * INTS + LENGTH) + 1 - tl.load(ints_ptr + row * INTS + PROMPT)
    temperature = tl.load(floats_ptr + row * FLOATS + TEMPERATURE)
    noise_scale = tl.load(floats_ptr + row * FLOATS + NOISE)
    v = block * BLOCK + tl.arange(0, BLOCK)
    live = v < V
    logits = tl.load(logits_ptr + sampled * V + v, mask=live, other=-float("inf"))
    out = partial_ptr + sampled * blocks + block
    plane = tl.num_programs(0).to(tl.int64) * blocks
    plain_sum = _log_sum(logits)
    tempered = logits
    tempered_sum = plain_sum
    if temperature != 1.0:
        tempered = logits / temperature
        tempered_sum = _log_sum(tempered)
    drawn = tempered
    drawn_sum = tempered_sum
    if drawn_ptr is not None:
        drawn = tl.load(drawn_ptr + sampled * V + v, mask=live, other=-float("inf"))
        drawn_sum = _log_sum(drawn)
        if SHARD:  # NaN if a histogram of a peer did not come: then no log-prob of the row is a number
            tempered_sum = tl.where(drawn_sum == drawn_sum, tempered_sum, drawn_sum)
    noisy = drawn
    if noise_scale != 0.0:
        noise_from = block * BLOCK
        if SHARD:
            noise_from += first_token
        noisy = drawn + _gumbel(seed, index, noise_from, BLOCK) * noise_scale
    # A NaN is never the best. The host notices it, because the log-probs become NaN.
    noisy = tl.where(live & (noisy == noisy), noisy, -float("inf"))
    best = tl.max(noisy)
    token = tl.min(tl.where(live & (noisy == best), v, 2147483647))
    if SHARD:
        tl.store(out + 5 * plane, tl.sum(tl.where(v == token, logits, 0.0)))
        if drawn_ptr is not None:
            tl.store(out + 6 * plane, tl.sum(tl.where(v == token, drawn, 0.0)))
        token = tl.where(token == 2147483647, token, token + first_token)
    tl.store(out, best)
    tl.store(out + plane, token.to(tl.float32, bitcast=True))
    tl.store(out + 2 * plane, plain_sum)
    tl.store(out + 3 * plane, tempered_sum)
    tl.store(out + 4 * plane, drawn_sum)


@triton.jit
def _pass_2(
    logits_ptr, drawn_ptr, floats_ptr, ints_ptr, rows_ptr, partial_ptr, output_ptr,
    output_stride,
    V, blocks,
    INTS: tl.constexpr, FLOATS: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr, TEMPERATURE: tl.constexpr,
    BLOCKS: tl.constexpr, SHARDS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    sampled = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sampled)
    b = tl.arange(0, BLOCKS)
    live = b < blocks
    plane = tl.num_programs(0).to(tl.int64) * blocks
    if SHARDS == 1:
        at = partial_ptr + sampled * blocks + b
    else:  # all planes of the first rank, then all planes of the next
        live = b < blocks * SHARDS
        at = partial_ptr + b // blocks * (PLANES * plane) + sampled * blocks + b % blocks
    noisy = tl.load(at, mask=live, other=-float("inf"))
    tokens = tl.load(at + plane, mask=live, other=0.0).to(tl.int32, bitcast=True)
    best = tl.max(noisy)
    token = tl.min(tl.where(live & (noisy == best), tokens, 2147483647))
    if SHARDS == 1:
        logit = tl.load(logits_ptr + sampled * V + token)
    else:
        of_winner = live & (noisy == best) & (tokens == token)
        logit = tl.sum(tl.where(of_winner, tl.load(at + 5 * plane, mask=live, other=0.0), 0.0))
    temperature = tl.load(floats_ptr + row * FLOATS + TEMPERATURE)
    tempered = logit / temperature
    drawn = tempered
    if drawn_ptr is not None:
        if SHARDS == 1:
            drawn = tl.load(drawn_ptr + sampled * V + token)
        else:
            drawn = tl.sum(tl.where(of_winner, tl.load(at + 6 * plane, mask=live, other=0.0), 0.0))
    plain = logit - _log_sum(tl.load(at + 2 * plane, mask=live, other=-float("inf")))
    tempered -= _log_sum(tl.load(at + 3 * plane, mask=live, other=-float("inf")))
    drawn -= _log_sum(tl.load(at + 4 * plane, mask=live, other=-float("inf")))
    tl.store(output_ptr + sampled, token)
    tl.store(output_ptr + output_stride + sampled, tempered.to(tl.int32, bitcast=True))
    tl.store(output_ptr + 2 * output_stride + sampled, plain.to(tl.int32, bitcast=True))
    tl.store(output_ptr + 3 * output_stride + sampled, drawn.to(tl.int32, bitcast=True))
    if row != 0:  # row 0 is padding
        length = tl.load(ints_ptr + row * INTS + LENGTH)
        tl.store(ints_ptr + row * INTS + LAST, token.to(tl.int64))
        tl.store(ints_ptr + row * INTS + LENGTH, length + 1)


def draw_and_advance(
    logits_SV: torch.Tensor,
    drawn_SV: torch.Tensor | None,
    rows_S: torch.Tensor,
    ints_RI: torch.Tensor,
    floats_RF: torch.Tensor,
    output_4S: torch.Tensor,
    columns: dict[str, int],
    shard: VocabShard | None = None,
) -> None:
    """Draw a token for each row, write it and its log-probs to the output, and advance the row's state by one token.

    Args:
        logits_SV: float32, contiguous.
        drawn_SV: float32 logits to draw from, already tempered; None to draw from `logits / temperature`.
        rows_S: int64 row of each; distinct, except for the padding row 0.
        ints_RI: int64 row state, changed in place: LAST becomes the token, and LENGTH (the number of tokens before this
            step's own) grows by one.
        floats_RF: float32 row state.
        output_4S: int32 [4, >= S]: token ids, then log-probs, raw log-probs and drawn log-probs as float32 bits.
        columns: columns of LAST, LENGTH, PROMPT, SEED in `ints_RI`, and of TEMPERATURE, NOISE in `floats_RF`.
        shard: if the logits are one rank's part of the vocabulary. All ranks call this.
    """
    count, vocab = logits_SV.shape
    most, planes, shards = vocab, _PLANES, 1
    if shard is not None:
        # Without `drawn_SV` the last plane is not needed, and is left out.
        planes = _PLANES_OF_PART - (drawn_SV is None)
        most, shards = shard.most_tokens, shard.group.size
    blocks = triton.cdiv(most, _BLOCK)
    partial_PSB = torch.empty(planes, count, blocks, dtype=torch.float32, device=logits_SV.device)
    sizes = {"INTS": ints_RI.shape[1], "FLOATS": floats_RF.shape[1]}
    _pass_1[(count, blocks)](
        logits_SV, drawn_SV, floats_RF, ints_RI, rows_S, partial_PSB, vocab, blocks,
        0 if shard is None else shard.first_token,
        LENGTH=columns["LENGTH"], PROMPT=columns["PROMPT"], SEED=columns["SEED"], TEMPERATURE=columns["TEMPERATURE"],
        NOISE=columns["NOISE"], BLOCK=_BLOCK, SHARD=shard is not None, num_warps=4, **sizes,
    )  # fmt: skip
    if shard is not None:
        partial_PSB = shard.group.all_gather(partial_PSB)
    _pass_2[(count,)](
        logits_SV, drawn_SV, floats_RF, ints_RI, rows_S, partial_PSB, output_4S, output_4S.stride(0), vocab, blocks,
        LAST=columns["LAST"], LENGTH=columns["LENGTH"], TEMPERATURE=columns["TEMPERATURE"],
        BLOCKS=triton.next_power_of_2(blocks * shards), SHARDS=shards, PLANES=planes, num_warps=1 if shards == 1 else 4,
        **sizes,
    )  # fmt: skip
