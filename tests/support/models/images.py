"""Tiny random models of text and images, prompts with made-up pixels, and what transformers makes of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.models.multimodal import random_model

VOCAB, IMAGE, VIDEO = 91, 88, 89
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_INTERLEAVED = {"num_position_embeddings": 25}


def _rope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}}


_QWEN3_5 = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    **_rope(2, 1, 1, partial_rotary_factor=0.25),
}  # fmt: skip
_EXPERTS = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 18, "shared_expert_intermediate_size": 22,
}  # fmt: skip
#: Stem of the classes; text_config; vision_config; keys beside the two.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen3-VL": (
        "Qwen3VL",
        {"head_dim": 16} | _rope(4, 2, 2),
        _INTERLEAVED | {"deepstack_visual_indexes": [0, 2]},
        {"tie_word_embeddings": False},
    ),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoe",
        {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 18} | _rope(4, 2, 2),
        _INTERLEAVED | {"deepstack_visual_indexes": [0, 2]},
        {"tie_word_embeddings": False},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VL",
        _rope(1, 2, 3),
        {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        {"tie_word_embeddings": True},
    ),
    "Qwen3.5": ("Qwen3_5", _QWEN3_5, _INTERLEAVED, {"tie_word_embeddings": False}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", _QWEN3_5 | _EXPERTS, _INTERLEAVED, {"tie_word_embeddings": False}),
}
#: All that differs between families; the others are for nightly runs.
FAMILIES = ("Qwen3-VL", "Qwen2.5-VL", "Qwen3.5")
#: Sizes that the fused kernels take.
_LARGE_VISION = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 256}
_LARGE_TEXT = {"hidden_size": 256, "intermediate_size": 640, "max_position_embeddings": 2048}
_LARGE: dict[str, dict[str, Any]] = {
    "Qwen3-VL": _LARGE_TEXT | {"head_dim": 64} | _rope(16, 8, 8),
    "Qwen2.5-VL": _LARGE_TEXT | _rope(8, 12, 12),
    "Qwen3.5": _LARGE_TEXT
    | {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    | _rope(4, 2, 2, partial_rotary_factor=0.25),
}
#: Models in which each frame of a video stands on its own in a prompt.
SINGLE_FRAMES = ("Qwen3-VL", "Qwen3-VL-MoE", "Qwen3.5", "Qwen3.5-MoE")


def make_model(name: str, folder: Path, seed: int = 0, large: bool = False) -> Any:
    """A model with random float32 weights, saved to `folder` as transformers saves it; `large` for a GPU."""
    stem, text, vision, rest = MODELS[name]
    if large:
        text, vision = text | _LARGE[name], vision | _LARGE_VISION
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    model = random_model(stem, seed, text_config=_TEXT | text, vision_config=_VISION | vision, **ids, **rest)
    with torch.no_grad():
        model.get_output_embeddings().weight[[IMAGE, VIDEO]] = 0.0  # never the likeliest: transformers would look for
    model.save_pretrained(folder)
    return model


@dataclass
class Picture:
    """An image, or a video, as a processor returns it."""

    grid: tuple[int, int, int]
    pixels: np.ndarray  # float32 [patches, values]
    video: bool = False
    seconds: float | None = None  # between two frames


def picture(height: int, width: int, seed: int = 0, frames: int = 1, video: bool = False, seconds: float | None = None):
    """An image of `height` x `width` patches."""
    generator = torch.Generator().manual_seed(1000 + seed)
    pixels = torch.randn(frames * height * width, 3 * 2 * 4 * 4, generator=generator).numpy()
    return Picture((frames, height, width), pixels, video, seconds)


@dataclass
class ImagePrompt:
    """Token ids with placeholders, and where the pictures are."""

    ids: list[int] = field(default_factory=list)
    places: list[tuple[int, Picture]] = field(default_factory=list)  # offset of the first token

    def length(self, index: int) -> int:
        """Tokens of a picture."""
        frames, height, width = self.places[index][1].grid
        return frames * height * width // 4


def prompt_with(*parts: int | Picture, seed: int = 0) -> ImagePrompt:
    """A prompt: so many tokens of text, or a picture, one after the other; a video has as many runs as frames."""
    generator, prompt = torch.Generator().manual_seed(seed), ImagePrompt()
    for part in parts:
        if isinstance(part, Picture):
            prompt.places.append((len(prompt.ids), part))
            frames, height, width = part.grid
            prompt.ids += [VIDEO if part.video else IMAGE] * (frames * height * width // 4)
        else:
            prompt.ids += torch.randint(3, IMAGE, (part,), generator=generator).tolist()
    return prompt


def logits_of(reference: Any, prompt: ImagePrompt, generated: list[int] = []) -> torch.Tensor:  # noqa: B006
    """Logits of the whole model for a prompt and tokens after it, float32 [tokens, vocabulary]."""
    return _logits(reference, reference, prompt, generated, len(prompt.ids) + len(generated))


def logits_across(old: Any, new: Any, prompt: ImagePrompt, generated: list[int], first_new: int) -> torch.Tensor:
    """Logits for each generated token: those from `first_new` on are by another model, over KV of the first one."""
    before = len(prompt.ids) + first_new - 1
    return _logits(old, new, prompt, generated, before)[len(prompt.ids) - 1 : -1]


@torch.no_grad()
def _logits(old: Any, new: Any, prompt: ImagePrompt, generated: list[int], split: int) -> torch.Tensor:
    """Logits by `old` before the position `split`, and by `new` from there on."""
    ids = torch.tensor([prompt.ids + generated])
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    types[:, len(prompt.ids) :] = 0
    given: dict[str, Any] = {}
    for video, pixels_name, grid_name in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        pictures = [picture for _, picture in prompt.places if picture.video == video]
        if pictures:
            given[pixels_name] = torch.from_numpy(np.concatenate([picture.pixels for picture in pictures]))
            given[grid_name] = torch.tensor([picture.grid for picture in pictures])
    if any(picture.seconds is not None for _, picture in prompt.places):
        given["second_per_grid_ts"] = torch.tensor([p.seconds or 1.0 for _, p in prompt.places if p.video])
    old.model.rope_deltas = new.model.rope_deltas = None
    if not prompt.places:
        return old(input_ids=ids).logits[0].float()
    prefix = torch.tensor([prompt.ids])
    grids = {name: value for name, value in given.items() if not name.startswith("pixel")}
    positions, delta = old.model.get_rope_index(prefix, mm_token_type_ids=types[:, : len(prompt.ids)], **grids)
    after = torch.arange(len(prompt.ids), ids.shape[1]).view(1, 1, -1).expand(3, 1, -1) + delta
    positions = torch.cat([positions, after], dim=-1)
    first = old(
        input_ids=ids[:, :split],
        mm_token_type_ids=types[:, :split],
        position_ids=positions[..., :split],
        use_cache=split < ids.shape[1],
        **given,
    )
    if split == ids.shape[1]:
        return first.logits[0].float()
    rest = new(input_ids=ids[:, split:], position_ids=positions[..., split:], past_key_values=first.past_key_values)
    return torch.cat([first.logits, rest.logits], dim=1)[0].float()
