"""Counter-based random numbers: Philox 4x32 with ten rounds, in torch integer arithmetic.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A function of a 128-bit counter and a
64-bit key gives four 32-bit words. There is no state between calls, so a draw depends only on its seed and its
position. The words are bit-equal to `triton.language.philox` and to the authors' published test vectors.

Tensors hold 32-bit words as int64: a product of two words fills 64 bits, and masking after the arithmetic shift removes
the effect of the sign bit.

Legend: S rows that sample, V vocabulary, N counters.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_4x32(even_2N: torch.Tensor, odd_2N: torch.Tensor, key_2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The four output words of each counter.

    The arguments are int64 tensors that broadcast together, each with a leading dimension of 2 and values below 2**32.
    `even_2N` holds words 0 and 2 of the counter, `odd_2N` words 1 and 3, `key_2N` the two words of the key. Returns the
    output words in the same arrangement: even words, odd words.
    """
    device = key_2N.device
    shape = (2,) + (1,) * (key_2N.dim() - 1)
    multipliers = torch.tensor(_MULTIPLIERS, device=device).view(shape)
    weyl = torch.tensor(_WEYL, device=device).view(shape)
    rounds = torch.arange(_ROUNDS, device=device).view((_ROUNDS,) + (1,) * key_2N.dim())
    for key in ((key_2N + weyl * rounds) & _MASK).unbind(0):
        product = even_2N * multipliers
        high = (product >> 32) & _MASK
        even_2N, odd_2N = high.flip(0) ^ odd_2N ^ key, (product & _MASK).flip(0)
    return even_2N, odd_2N


def row_words(seed_S: torch.Tensor, index_S: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
    """`count` 32-bit words for each row from word `first` on, a multiple of 4; int64 [S, count].

    The key is `seed_S` (int64, 63 bits). The counter is (word // 4, index, 0, 0), where `index_S` (int64) is the
    token's position in its completion. So a word does not depend on `count`.
    """
    assert first % 4 == 0, "a counter makes four words"
    blocks = -(-count // 4)
    even = torch.zeros(2, 1, blocks, dtype=torch.int64, device=seed_S.device)
    even[0, 0] = torch.arange(first // 4, first // 4 + blocks, device=seed_S.device)
    odd = torch.stack([index_S & _MASK, torch.zeros_like(index_S)])[:, :, None]
    key = torch.stack([seed_S & _MASK, seed_S >> 32])[:, :, None]
    even, odd = philox_4x32(even, odd, key)
    words = torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)  # [S, blocks, 4]
    return words.reshape(len(seed_S), blocks * 4)[:, :count]


def gumbel_noise(seed_S: torch.Tensor, index_S: torch.Tensor, vocab: int, first: int = 0) -> torch.Tensor:
    """Standard Gumbel noise for each row and token id, float32 [S, vocab]; for token ids from `first` on.

    argmax(logits + noise) is a draw from softmax(logits) (the Gumbel-max trick). The uniform number u is
    (word + 1/2) / 2**32, and the noise is -log(-log(1 - u)): large noise comes from u near zero, where floats are
    dense. So tokens with a probability down to 2**-33 can be drawn.
    """
    uniform = (
        (row_words(seed_S, index_S, vocab, first).to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    )
    return uniform.neg_().log1p_().neg_().log_().neg_()
