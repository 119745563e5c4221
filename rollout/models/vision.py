"""The vision tower: transformers' own module, built from the config, with its weights under their names.

    embeddings   patches [N, V], grids  -->  [tokens, (1 + deepstack) H]: an embedding beside those for the first layers

The module runs eagerly. What it derives from grids is computed on the host, so that a call enqueues work and does not
wait for the device. Its attention and the embedding of patches are replaced by the same in fewer kernels.

Legend: N patches, V numbers of a patch, H hidden of the language model; in attention A heads of D numbers.
"""

import contextlib
import itertools
import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from rollout_kernels import rotate_heads
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollout.models.names import Region
from rollout.models.vision_spec import Grid, TowerSpec

#: Backends of attention that need no plan for each number of windows; on Hopper torch takes cuDNN, which does.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MOST_WINDOW = 256  # patches
#: The gain of random weights: most products keep their inputs' scale.
_GAIN = 1.0


class VisionTower(nn.Module):
    """A tower with uninitialised parameters; a loader or `fill_random` fills them."""

    def __init__(self, spec: TowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.module = _make_module(spec, dtype, device)

    @torch.inference_mode()
    def embeddings(self, patches_NV: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Embeddings of images one after the other, [tokens, (1 + deepstack) H] in the model's dtype.

        `patches_NV` are on the module's device, of any float dtype.
        """
        dtype = next(self.module.parameters()).dtype
        grid_thw = torch.tensor(grids, dtype=torch.int64)
        output = self.module(
            patches_NV.to(dtype), grid_thw=grid_thw, return_dict=True, **self._of_grids(grid_thw, patches_NV.device)
        )
        deepstack = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output, *deepstack], dim=-1)

    def _of_grids(self, grid_thw: torch.Tensor, device: torch.device) -> dict[str, Any]:
        """The values that the module would compute from the grids on its device, and then read back."""
        from transformers import vision_utils

        module, merge = self.module, self.spec.merge
        given: dict[str, Any] = {
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
            "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
        }
        if hasattr(module, "num_grid_per_side"):
            sizes = {"num_grid_per_side": module.num_grid_per_side, "spatial_merge_size": merge}
            if hasattr(module, "interpolation_mode"):
                modes = {"mode": module.interpolation_mode, "align_corners": module.interpolation_align_corners}
                parts = vision_utils.get_vision_interpolation_indices_and_weights(grid_thw, **sizes, **modes)
                given |= dict(zip(("interp_indices", "interp_weights"), parts, strict=True))
            else:  # transformers 5.10
                parts = vision_utils.get_vision_bilinear_indices_and_weights(grid_thw, **sizes)
                given |= dict(zip(("bilinear_indices", "bilinear_weights"), parts, strict=True))
        if hasattr(module, "window_size"):
            index, cu_seqlens = vision_utils.get_vision_window_index(
                grid_thw, spatial_merge_size=merge, window_size=module.window_size, patch_size=module.patch_size
            )
            given |= {"window_index": index, "cu_window_seqlens": cu_seqlens}
        on_host = ("cu_seqlens", "cu_window_seqlens")  # the module reads them there
        return {name: part if name in on_host else to_device(part, device) for name, part in given.items()}

    def fill_random(self, generator: torch.Generator) -> None:
        """Fill the parameters: products that keep the scale of their input, plain norms."""
        for name, parameter in self.module.named_parameters():
            if parameter.dim() > 1:
                std = _GAIN * math.prod(parameter.shape[1:]) ** -0.5
                parameter.data.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.data.zero_()
            else:
                parameter.data.fill_(1.0)

    def regions(self) -> list[Region]:
        """The tower's tensors; an update may leave them out: many trainers freeze the tower."""
        beginnings = self.spec.family.beginnings
        return [
            Region(tuple({beginning + name: parameter.detach()} for beginning in beginnings), kept_if_absent=True)
            for name, parameter in self.module.named_parameters()
        ]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host's tensor that is enqueued: one from pageable memory would wait for the stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _make_module(spec: TowerSpec, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.initialization import no_init_weights

    values = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.values}
    config_class: Any = CONFIG_MAPPING[spec.family.model_type]
    config = config_class(**values)
    code = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    module_class = getattr(code, spec.family.module)
    with no_init_weights(), torch.device(device):
        module = module_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
    module.patch_embed.forward = partial(_embed_patches, module.patch_embed.proj)
    for block in module.blocks:
        block.attn.forward = partial(_attend, block.attn)
    return module.requires_grad_(False).eval()


def _embed_patches(proj: nn.Conv3d, patches_NV: torch.Tensor) -> torch.Tensor:
    """The result of the module's convolution: its kernel is as large as a patch, so it is a product."""
    return F.linear(patches_NV, proj.weight.flatten(1), proj.bias)


def _attend(
    attention: Any,
    hidden_NH: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """The result of the module's attention: each image, or window, attends to itself.

    Neighbours of the same length are one call. Queries and keys turn in place: in torch this takes ten kernels, which
    are a quarter of the time of a tower.
    """
    qkv_N3AD = attention.qkv(hidden_NH).view(len(hidden_NH), 3, attention.num_heads, -1)
    rotate_heads(qkv_N3AD[:, :2].flatten(1, 2), *(part.float() for part in position_embeddings))
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    parts, start = [], 0
    for length, equal in itertools.groupby(lengths):
        count = len(list(equal))
        end = start + count * length
        # [equal images, heads, tokens of each, D]
        q, k, v = qkv_N3AD[start:end].unflatten(0, (count, length)).permute(2, 0, 3, 1, 4)
        windows = length <= _MOST_WINDOW and hidden_NH.is_cuda
        with sdpa_kernel(_WITHOUT_PLANS) if windows else contextlib.nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v, scale=attention.scaling)
        parts.append(attended.transpose(1, 2).reshape(end - start, -1))
        start = end
    return attention.proj(parts[0] if len(parts) == 1 else torch.cat(parts))
