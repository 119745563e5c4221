"""Counter-based random numbers: Philox 4x32 with ten rounds, in torch integer arithmetic.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A 128-bit counter and a 64-bit key
give four 32-bit words; nothing is carried from call to call, so a draw depends on its seed and its position alone. The
words are bit-equal to `triton.language.philox` and to the authors' published answers.

32-bit words are held in int64 tensors: a product of two of them fills 64 bits, and masks after the (arithmetic) shift
make the sign bit harmless.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_4x32(even_2N: torch.Tensor, odd_2N: torch.Tensor, key_2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The four output words of each counter.

    Arguments are int64 tensors that broadcast together, each with a leading dimension of 2 and values below 2**32:
    `even_2N` holds counter words 0 and 2, `odd_2N` words 1 and 3, `key_2N` the two key words. Returns the output words
    in the same arrangement.
    """
    device = key_2N.device
    lanes = (2,) + (1,) * (key_2N.dim() - 1)
    multipliers = torch.tensor(_MULTIPLIERS, device=device).view(lanes)
    weyl = torch.tensor(_WEYL, device=device).view(lanes)
    rounds = torch.arange(_ROUNDS, device=device).view((_ROUNDS,) + (1,) * key_2N.dim())
    for key in ((key_2N + weyl * rounds) & _MASK).unbind(0):
        product = even_2N * multipliers
        high = (product >> 32) & _MASK
        even_2N, odd_2N = high.flip(0) ^ odd_2N ^ key, (product & _MASK).flip(0)
    return even_2N, odd_2N


def row_words(seed_S: torch.Tensor, index_S: torch.Tensor, count: int) -> torch.Tensor:
    """`count` 32-bit words for each row, int64 [S, count].

    `seed_S` int64, 63 bits, is the key; the counter is (word // 4, index, 0, 0), so word w of the draw at `index_S`
    (int64, the token's position in its completion) is the same whatever `count` is.
    """
    blocks = -(-count // 4)
    even = torch.zeros(2, 1, blocks, dtype=torch.int64, device=seed_S.device)
    even[0, 0] = torch.arange(blocks, device=seed_S.device)
    odd = torch.stack([index_S & _MASK, torch.zeros_like(index_S)])[:, :, None]
    key = torch.stack([seed_S & _MASK, seed_S >> 32])[:, :, None]
    even, odd = philox_4x32(even, odd, key)
    words = torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)  # [S, blocks, 4]
    return words.reshape(len(seed_S), blocks * 4)[:, :count]


def gumbel_noise(seed_S: torch.Tensor, index_S: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise for each row and token id, float32 [S, vocab].

    argmax(logits + noise) is a draw from softmax(logits). The uniform number is (word + 1/2) / 2**32, kept near zero
    where floats are dense, so that tokens down to a probability of 2**-33 can be drawn.
    """
    uniform = (row_words(seed_S, index_S, vocab).to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
