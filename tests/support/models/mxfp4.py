"""Checkpoints of gpt-oss with experts in MXFP4, and what transformers decodes them to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.families import make_checkpoint
from tests.support.models.variants import CONFIGS, SIZES


def make_mxfp4(folder: Path, seed: int = 0, **sizes: Any) -> Any:
    """Save a random checkpoint to `folder`; transformers' model of it, with decoded experts."""
    reference = make_checkpoint("GptOss", folder, seed, **(SIZES | CONFIGS["GptOss"] | sizes))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3 + seed)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 123, shape[:-1], generator=generator, dtype=torch.uint8)
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    return reference
