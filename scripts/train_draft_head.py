"""Trains a draft model (an EAGLE-3 head) for a counting model of the demo, on a CPU in a minute, from a fixed seed.

    PYTHONPATH=. python scripts/train_draft_head.py --out head            for rollout/demo/checkpoints/ones
    rollout serve rollout/demo/checkpoints/ones --speculation heads --speculation-model head

The head is a checkpoint in the layout of published ones: fc, midlayer, norm, lm_head and config.json. It is written
here in plain torch; only the texts come from the demo. The counting model is certain of every token, so the texts that
it counts are the labels.

A head guesses several tokens, each from its own last hidden state. So it is trained in rounds, as its paper says
(arXiv 2503.01840, section 3.1): in round j the hidden state of a position is what round j - 1 made of the position
before it, and attention sees

    the target's hidden states     up to j positions before
    what rounds 1 to j made        on the j positions since

Legend: N rows, T positions, H hidden, D head dimension, V vocabulary.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.demo.run import CHECKPOINTS
from scripts.train_tiny import HIGHEST, IGNORE, Course, walk

ROUNDS = 4  # tokens that it learns to guess in a row
HEADS, DIM, INNER, WINDOW, THETA, EPS = 4, 16, 128, 32, 1000.0, 1e-6
TAPS = (0, 1, 2)  # the target has two layers: its embedding, and what each layer leaves
ROWS, LENGTH = 16, 56
RATE = 6e-3


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class Head(nn.Module):
    """The head; its parameters have the names of a checkpoint."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()

        def product(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = product(len(TAPS) * hidden, hidden)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": Norm(hidden),
                "hidden_norm": Norm(hidden),
                "post_attention_layernorm": Norm(hidden),
                "self_attn": nn.ModuleDict(
                    {f"{name}_proj": product(2 * hidden, HEADS * DIM) for name in "qkv"}
                    | {"o_proj": product(HEADS * DIM, hidden)}
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": product(hidden, INNER),
                        "up_proj": product(hidden, INNER),
                        "down_proj": product(INNER, hidden),
                    }
                ),
            }
        )
        self.norm = Norm(hidden)
        self.lm_head = product(hidden, vocab)

    def forward(self, fused_NTH: torch.Tensor, embeds_NTH: torch.Tensor, rounds: int) -> list[torch.Tensor]:
        """Logits [N, T, V] of each round; `embeds_NTH` belong to the tokens after the positions."""
        hidden_NTH, logits = fused_NTH, []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(rounds):
            hidden_NTH = self._round(hidden_NTH, embeds_NTH, keys, values)
            logits.append(self.lm_head(self.norm(hidden_NTH)))
            hidden_NTH = F.pad(hidden_NTH[:, :-1], (0, 0, 1, 0))  # of the position before
        return logits

    def _round(
        self, hidden_NTH: torch.Tensor, embeds_NTH: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        layer: Any = self.midlayer  # modules by name, and groups of them
        attention = layer["self_attn"]
        inputs = torch.cat((layer["input_layernorm"](embeds_NTH), layer["hidden_norm"](hidden_NTH)), dim=-1)
        q, k, v = (
            attention[f"{name}_proj"](inputs).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for name in "qkv"
        )  # [N, heads, T, D]
        q = _rotate(q)
        keys.append(_rotate(k))
        values.append(v)
        mixed = _attend(q, keys, values).transpose(1, 2).flatten(2)
        x = hidden_NTH + attention["o_proj"](mixed)
        y, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[2]
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention of the last round: over the first one up to its start, and over one position of each later round."""
    last, length = len(keys) - 1, q.shape[2]
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= last) & (behind < WINDOW)
    scores = [(q @ keys[0].mT / math.sqrt(DIM)).masked_fill(~seen, -1e9)]
    own = []  # keys and values of round i at the position that is `last - i` before
    for i in range(1, last + 1):
        shift = last - i
        k, v = (F.pad(x[:, :, : length - shift], (0, 0, shift, 0)) for x in (keys[i], values[i]))
        scores.append((q * k).sum(-1, keepdim=True) / math.sqrt(DIM))
        own.append(v)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    mixed = weights[..., :length] @ values[0]
    for i, v in enumerate(own):
        mixed = mixed + weights[..., length + i, None] * v
    return mixed


def texts(rng: np.random.Generator, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N, T], and whether each is a token that the model with this step writes."""
    spread_N = np.exp(rng.uniform(0, np.log(HIGHEST - 100), ROWS)).astype(int)
    carry_N = np.clip(np.round(spread_N, -1) - rng.integers(0, 8, ROWS), 0, None)
    start_N = np.where(rng.random(ROWS) < 0.5, spread_N, carry_N)
    none_N = np.full(ROWS, -1)
    course = Course(start_N, np.full(ROWS, step), none_N, np.zeros(ROWS), rng.integers(0, 3, ROWS))
    counted = walk(course, LENGTH, rng)
    written_NT = F.pad(counted.targets[step][:, :-1] != IGNORE, (1, 0))
    return counted.ids, written_NT


def read_target(target: PreTrainedModel, ids_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states that the head reads [N, T, taps x H], and embeddings [N, T, H]."""
    streams: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    with torch.no_grad():
        states = [*target(ids_NT, output_hidden_states=True, use_cache=False).hidden_states[:-1], streams[0]]
    hook.remove()
    return torch.cat([states[tap] for tap in TAPS], dim=-1), states[0]


def train(target: PreTrainedModel, step: int, updates: int, seed: int = 0, quiet: bool = False) -> Head:
    """A head for a counting model with this step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = target.config
    head = Head(config.hidden_size, config.vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(updates, 1), pct_start=0.1)
    began_s = time.perf_counter()
    for update in range(updates):
        ids_NT, written_NT = texts(rng, step)
        read_NTF, embeds_NTH = read_target(target, ids_NT)
        # Position p has the target's states of p, the token at p + 1, and guesses that at p + 2.
        logits = head(head.fc(read_NTF[:, :-2]), embeds_NTH[:, 1:-1], ROUNDS)
        losses, right = [], []
        for j, logits_NTV in enumerate(logits):
            known_NT = written_NT[:, 2:].clone()
            known_NT[:, :j] = False  # no round has begun before the first position
            labels = ids_NT[:, 2:][known_NT]
            losses.append(F.cross_entropy(logits_NTV[known_NT], labels))
            right.append((logits_NTV[known_NT].argmax(-1) == labels).float().mean().item())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if not quiet and (update % 100 == 0 or update == updates - 1):
            shares = " ".join(f"{100 * share:.1f}" for share in right)
            print(f"update {update}: right by round {shares}%, {time.perf_counter() - began_s:.0f} s", flush=True)
    return head


def head_config(target: PreTrainedModel) -> dict:
    """config.json of such a head."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.config.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "layer_types": ["sliding_attention"],
        "sliding_window": WINDOW,
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": target.config.vocab_size,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": target.config.max_position_embeddings,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }


def save(head: Head, target: PreTrainedModel, folder: Path) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(target), indent=1))
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write the head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(CHECKPOINTS / "ones"), help="checkpoint that the head drafts for")
    parser.add_argument("--step", type=int, choices=(1, 2), default=1, help="the steps in which the target counts")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="folder of the head")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(args.target).eval()
    save(train(target, args.step, args.updates, args.seed), target, Path(args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
