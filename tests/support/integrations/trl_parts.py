"""Whether a worker serves the weights of TRL's trainer, and attention for that trainer on a CPU."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.support.integrations.tiny_checkpoints import logprobs_of
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


def plain_copy(model: Any, folder: Path) -> Any:
    """A model with the same weights and an attention that needs nothing of TRL's."""
    copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def served_error(worker: WorkerProcess, model: Any) -> float:
    """The largest difference between log-probs of the worker and of a model, at tokens that the worker draws."""
    prompt = [8, 9, 14]
    with RolloutClient(worker.endpoint, timeout_s=30.0) as client:
        drawn = client.generate(prompt, n=8, max_tokens=24, seed=5, stop={"ignore_eos": True}).completions
    theirs = [torch.tensor(item.logprobs) - logprobs_of(model, prompt, item.token_ids.tolist()) for item in drawn]
    return float(torch.cat(theirs).abs().max())


class ServedWeights(TrainerCallback):
    """Compares what the worker serves with the trainer's model, each time that the trainer calls the method `when`."""

    def __init__(self, worker: WorkerProcess, checkpoint: Path, when: str) -> None:
        self._worker, self._checkpoint = worker, checkpoint
        self._before: Any = None
        self.versions: list[int] = []
        self.errors: list[float] = []
        self.errors_of_old: list[float] = []
        setattr(self, when, self._compare)

    def _compare(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        now = plain_copy(model, self._checkpoint)
        with RolloutClient(self._worker.endpoint, timeout_s=30.0) as client:
            self.versions.append(client.status()["weights_version"])
        self.errors.append(served_error(self._worker, now))
        if self._before is not None:
            self.errors_of_old.append(served_error(self._worker, self._before))
        self._before = now


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the segments of TRL's packed rows: a stand-in for the kernel that it has for GPUs only.

    A segment's queries are the last ones of its path, whose keys and values `tree_kv_index` lists.
    """
    groups, parts = query.shape[1] // key.shape[1], []
    for segment in range(len(tree_cu_seqlens_q) - 1):
        first, end = tree_cu_seqlens_q[segment : segment + 2].tolist()
        path = tree_kv_index[slice(*tree_cu_seqlens_k[segment : segment + 2].tolist())]
        k, v = (tensor[:, :, path].repeat_interleave(groups, 1) for tensor in (key, value))
        seen = torch.ones(end - first, len(path), dtype=torch.bool).tril(len(path) - (end - first))
        q = query[:, :, first:end]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2), None
