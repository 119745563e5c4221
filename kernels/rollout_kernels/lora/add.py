"""Add the corrections of low-rank adapters to a product: the op and its torch twin.

Legend: see `lora_buffers`.
"""

from __future__ import annotations

import torch

from rollout_kernels.lora.lora_buffers import LoraBuffers


def lora_add(
    y_MN: torch.Tensor, x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor, segmented: bool = False
) -> None:
    """Add each token's correction to `y_MN` in place; tokens of slot 0 do not change, bit for bit.

    Args:
        y_MN: contiguous; float32 or the dtype of `x_MK`.
        x_MK: the product's input, in the dtype of the buffers.
        buffers: the product's slots.
        slots_M: int32 slot of each token, 0 for none.
        segmented: a hint for speed: neighbouring tokens mostly have the same slot, as in chunks of prompts.
    """
    if x_MK.is_cuda:
        from rollout_kernels.lora.triton_lora import lora_add as on_gpu

        on_gpu(y_MN, x_MK, buffers, slots_M, segmented)
        return
    rank, starts = buffers.rank, (0, *buffers.ends[:-1])
    for slot in torch.unique(slots_M).tolist():
        if slot == 0:
            continue
        at = (slots_M == slot).nonzero().squeeze(1)
        low_MA = x_MK[at].float() @ buffers.a_SAK[slot - 1].float().t()
        b_NR = buffers.b_SNR[slot - 1].float()
        added = [
            low_MA[:, j * rank : (j + 1) * rank] @ b_NR[start:end].t()
            for j, (start, end) in enumerate(zip(starts, buffers.ends, strict=True))
        ]
        y_MN[at] = (y_MN[at].float() + torch.cat(added, dim=1)).to(y_MN.dtype)
