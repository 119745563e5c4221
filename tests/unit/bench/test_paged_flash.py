"""The stand-in for flash-attn: what transformers gets from it is attention."""

import torch

from scripts.bench.peers.paged_flash import PagedDecode, append, varlen_attention


def exact(q_HD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
    group = q_HD.shape[0] // k_NGD.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_NGD, v_NGD))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q_HD.double(), k) * q_HD.shape[1] ** -0.5, -1)
    return torch.einsum("hn,nhd->hd", weights, v)


def test_queries_stand_at_the_end_of_their_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    starts_q, starts_k = torch.tensor([0, 2, 6]), torch.tensor([0, 7, 12])
    got = varlen_attention(q, k, v, starts_q, starts_k, 4, 7, causal=True)
    for sequence, query, seen in ((0, 0, 6), (0, 1, 7), (1, 0, 2), (1, 3, 5)):
        at, first = int(starts_q[sequence]) + query, int(starts_k[sequence])
        expected = exact(q[at], k[first : first + seen], v[first : first + seen])
        torch.testing.assert_close(got[at].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_token_is_appended_and_seen_in_every_layer():
    torch.manual_seed(0)
    page, rows, layers = 4, 3, 2
    table = torch.tensor([[3, 1, -1], [-1, -1, -1], [2, 5, 4]], dtype=torch.int32)
    decode = PagedDecode()
    caches = [(torch.randn(6, page, 2, 8), torch.randn(6, page, 2, 8)) for _ in range(layers)]
    for lens in ([5, -1, 8], [6, -1, 9], [7, -1, 10]):  # each step has a new plan
        for k_cache, v_cache in caches:
            q, k, v = torch.randn(rows, 1, 4, 8), torch.randn(rows, 1, 2, 8), torch.randn(rows, 1, 2, 8)
            before = k_cache.clone()
            got = decode.append_and_attend(
                q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens, dtype=torch.int32), block_table=table
            )
            for row in (0, 2):
                at = lens[row]
                assert torch.equal(k_cache[table[row, at // page], at % page], k[row, 0])
                pages = table[row, : at // page + 1].long()
                seen = [cache[pages].flatten(0, 1)[: at + 1] for cache in (k_cache, v_cache)]
                torch.testing.assert_close(got[row, 0].double(), exact(q[row, 0], *seen), atol=1e-5, rtol=1e-5)
            assert (k_cache != before).flatten(2).any(-1).sum() == 2, "a padding row was written"


def test_padding_rows_write_nothing():
    caches = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
    append(torch.ones(1, 1, 4), torch.ones(1, 1, 4), *caches, torch.tensor([[-1]]), torch.tensor([-1]))
    assert not any(cache.any() for cache in caches)
