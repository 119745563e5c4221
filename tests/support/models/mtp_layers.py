"""Checkpoints with a layer for multi-token prediction, and its forward by a decoder layer of transformers.

What is around that layer is written here from the definition of the layout (arXiv 2412.19437, section 2.2, and the
names of published tensors): a norm of the embedding of the next token, a norm of the model's last hidden state, a
product of both side by side, the layer, a last norm, the model's output layer.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask

from tests.support.models.every_family import EVERY_FAMILY, Make
from tests.support.models.hybrids import HYBRIDS, make_hybrid


class Layout(NamedTuple):
    """How published checkpoints name what is around the layer; `{}`: the number of layers of the model."""

    prefix: str
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool
    copies: tuple[str, ...] = ()  # of tensors of the model
    layer: str = ""  # what the names of the layer's tensors begin with, after the prefix
    count: str = "num_nextn_predict_layers"  # the key in config.json that counts such layers
    offset: float = 0.0  # the weights of norms are stored less this


_NEXTN = Layout(
    *("model.layers.{}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", False),
    ("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = Layout(
    *("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", False),
    layer="layers.0.",
    offset=1.0,
)
LAYOUTS = {
    "MiMo": Layout(
        *("model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", True)
    ),
    "Glm4Moe": _NEXTN,
    "DeepseekV3": _NEXTN,
    "Glm4MoeLite": _NEXTN,
    "BailingHybrid": _NEXTN._replace(norm="final_layernorm"),
    "Qwen3_5": _QWEN._replace(count="mtp_num_hidden_layers"),
    "Qwen3_5Moe": _QWEN._replace(count="mtp_num_hidden_layers"),
    "Qwen3Next": _QWEN,
}


def _make(name: str) -> Make:
    """What makes the model; of models with linear attention the last layer has none, as in published ones."""
    if name not in HYBRIDS:
        return EVERY_FAMILY[name]
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return lambda folder, seed: make_hybrid(name, folder, seed, layer_types=kinds)


@dataclass
class Predicting:
    """A model with such a layer: transformers' model and layer, the layer's tensors by the names in the checkpoint."""

    name: str  # one of `LAYOUTS`
    model: Any
    block: Any
    tensors: dict[str, torch.Tensor]

    def part(self, name: str) -> torch.Tensor:
        """The weight of a module around the layer."""
        return self.tensors[f"{self.prefix}{name}.weight"]

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    @property
    def prefix(self) -> str:
        return self.layout.prefix.format(self.model.config.num_hidden_layers)

    def joined(self, embeds_TH: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The input of the layer."""
        both = self.norm(embeds_TH, self.layout.embed_norm), self.norm(hidden_TH, self.layout.hidden_norm)
        return F.linear(torch.cat(both[::-1] if self.layout.hidden_first else both, dim=-1), self.part(self.layout.fc))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return (self.layout.offset + self.part(name)) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    @torch.inference_mode()
    def forward(self, embeds_TH: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Hidden states of a whole sequence after the last norm, [T, H]: causal attention, without a cache."""
        x_1TH, positions_1T = self.joined(embeds_TH, hidden_TH)[None], torch.arange(len(hidden_TH))[None]
        mask = create_causal_mask(self.model.config, x_1TH, None, None, position_ids=positions_1T)
        turned = self.model.model.rotary_emb(x_1TH, positions_1T)
        x_1TH = self.block(x_1TH, attention_mask=mask, position_ids=positions_1T, position_embeddings=turned)
        return self.norm(x_1TH[0], self.layout.norm)

    @torch.inference_mode()
    def guesses(self, tokens: list[int], count: int, draw: Any) -> list[int]:
        """What the layer guesses after these tokens: `draw(logits, index of the guess)` is a token."""
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        embed = self.model.get_input_embeddings()
        embeds, guesses = embed(torch.tensor(tokens[1:])), []
        for index in range(count):
            out = self.forward(embeds, hidden)
            guesses.append(draw(self.model.lm_head(out[-1:]), index))
            embeds = torch.cat((embeds, embed(torch.tensor(guesses[-1:]))))
            hidden = torch.cat((hidden, out[-1:]))
        return guesses


def make_predicting(name: str, folder: Path, seed: int = 0, make: Make | None = None) -> Predicting:
    """A random checkpoint of one of `LAYOUTS` with its layer; `make` makes the model, in sizes of its own."""
    model, layout = (make or _make(name))(folder, seed).requires_grad_(False), LAYOUTS[name]
    file = folder / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "num_mtp_layers"}
    file.write_text(json.dumps(config | {layout.count: 1}))
    last = model.model.layers[-1]
    block = copy.deepcopy(last)
    generator = torch.Generator().manual_seed(seed + 77)

    def product(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    for key, tensor in (*block.named_parameters(), *block.named_buffers()):
        if key.endswith("norm.weight"):
            tensor.uniform_(0.5, 1.5, generator=generator).sub_(layout.offset)
        elif tensor.dim() > 1:
            tensor.copy_(1.5 * product(*tensor.shape))
        else:
            tensor.normal_(0.0, 0.3, generator=generator)
    hidden = model.config.hidden_size
    parts = {f"{part}.weight": 0.5 - layout.offset + torch.rand(hidden, generator=generator) for part in layout[2:5]}
    parts[f"{layout.fc}.weight"] = 2 * product(hidden, 2 * hidden)
    of_layer = {layout.layer + key: tensor for key, tensor in _published(block).items()}
    found = Predicting(name, model, block, {})
    found.tensors = {found.prefix + key: tensor for key, tensor in (parts | of_layer).items()}
    add_tensors(folder, found.tensors | {found.prefix + key: torch.zeros(3) for key in layout.copies})
    return found


def _published(block: Any) -> dict[str, torch.Tensor]:
    """The tensors of a layer as files have them: one for each expert."""
    tensors = {}
    for key, tensor in block.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                stem = f"{key.removesuffix('gate_up_proj')}{expert}."
                tensors[f"{stem}gate_proj.weight"], tensors[f"{stem}up_proj.weight"] = both.chunk(2)
        elif key.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{key.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            tensors[key] = tensor
    return tensors


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put these into the file of a checkpoint."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {key: tensor.detach().clone() for key, tensor in tensors.items()}, file)
