"""Low-rank adapters: each token's product gets the correction of the adapter that its row uses.

buffers      where the adapters of one product lie in memory
add          `lora_add`: the op and its torch twin
triton_lora  the same on a GPU, and the pieces that fuse a correction into another kernel
"""

from rollout_kernels.lora.add import lora_add
from rollout_kernels.lora.lora_buffers import LEAST_RANK, MOST_RANK, Correction, LoraBuffers, padded_rank

__all__ = ["LEAST_RANK", "MOST_RANK", "Correction", "LoraBuffers", "lora_add", "padded_rank"]
