"""The trainer: GRPO's loss with a clipped ratio and truncated importance weights, and the model with its optimizer.

Master weights are float32. On a GPU the forward pass computes with the bfloat16 copies that are published, as the
worker does. Logits are float32: bfloat16 would round those of likely tokens by up to 0.06. On a CPU all is float32.

Shape suffixes: N samples, T tokens, S = T - 1 positions, each of which predicts the next token.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from scripts.learn.checkpoint import read_optimizer, read_progress
from scripts.learn.recipe import Recipe
from scripts.learn.rollouts import Group, Sample


def advantages(groups: Sequence[Sequence[float]], scale_rewards: str) -> list[list[float]]:
    """Rewards of groups without each group's mean, and divided as `scale_rewards` says.

    A division by the group's standard deviation makes rare differences as large as common ones, also those of the small
    part of a reward that is for an answer's form (arXiv 2503.20783). One for the batch keeps their proportions.
    """
    arrays = [np.asarray(rewards, float) for rewards in groups]
    centred = [array - array.mean() for array in arrays]
    batch = float(np.sqrt(np.mean(np.concatenate(centred) ** 2))) if centred else 1.0
    scales = {"batch": [batch] * len(centred), "group": [each.std() for each in centred], "none": [1.0] * len(centred)}
    return [list(each / (scale + 1e-4)) for each, scale in zip(centred, scales[scale_rewards], strict=True)]


def token_loss(
    new: torch.Tensor, old: torch.Tensor, worker: torch.Tensor, advantage: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """The loss of each token, all of one shape.

    `new` are log-probs with a gradient, `old` the trainer's at the start of the batch, `worker` those of the draw. The
    ratio new/old is clipped; old/worker corrects for older weights and for rounding, and is truncated at a cap.
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
    weight = (old - worker).exp().clamp(max=recipe.importance_cap)
    return -weight * torch.minimum(ratio * advantage, clipped * advantage)


@dataclass(frozen=True)
class Rows:
    """Some samples, padded on the right. Each position describes the token that it predicts."""

    ids_NT: torch.Tensor  # int64
    drawn_NS: torch.Tensor  # bool: the model drew that token
    logprobs_NS: torch.Tensor  # float32, the worker's
    versions_NS: torch.Tensor  # int64
    advantage_N1: torch.Tensor
    first: int  # no token of a position before it was drawn


def pad(samples: Sequence[Sample], advantage: Sequence[float], device: str) -> Rows:
    """Samples as tensors."""
    length = max(len(one.prompt_ids) + len(one.token_ids) for one in samples)
    shape = (len(samples), length - 1)
    ids_NT = np.zeros((len(samples), length), np.int64)
    drawn_NS, logprobs_NS, versions_NS = np.zeros(shape, bool), np.zeros(shape, np.float32), np.full(shape, -1)
    for row, one in enumerate(samples):
        begin = len(one.prompt_ids)
        ids_NT[row, : begin + len(one.token_ids)] = [*one.prompt_ids, *one.token_ids]
        where = slice(begin - 1, begin - 1 + len(one.token_ids))
        drawn_NS[row, where], logprobs_NS[row, where], versions_NS[row, where] = one.drawn, one.logprobs, one.versions
    arrays = ids_NT, drawn_NS, logprobs_NS, versions_NS
    ids, drawn, logprobs, versions = (torch.from_numpy(array).to(device) for array in arrays)
    column = torch.tensor(advantage, dtype=torch.float32, device=device)[:, None]
    return Rows(ids, drawn, logprobs, versions, column, min(len(one.prompt_ids) for one in samples) - 1)


def micro_tokens(recipe: Recipe, device: str) -> int:
    """The most tokens of one forward pass."""
    return recipe.micro_tokens or (16384 if device.startswith("cuda") else 1024)


def micro_batches(groups: Sequence[Group], recipe: Recipe, device: str) -> list[list[Rows]]:
    """The samples of a batch by minibatch, each in parts of at most `micro_tokens`; equal lengths stand together.

    Groups whose rewards are all equal teach nothing and are left out. A minibatch without samples is left out, too.
    """
    most = micro_tokens(recipe, device)
    teaching = [group for group in groups if group.teaches]
    found = advantages([[one.verdict.reward for one in group.samples] for group in teaching], recipe.scale_rewards)
    pairs = [
        pair for group, mine in zip(teaching, found, strict=True) for pair in zip(group.samples, mine, strict=True)
    ]
    parts = []
    for i in range(recipe.minibatches):
        mine = sorted(pairs[i :: recipe.minibatches], key=lambda pair: _length(pair[0]))
        cut: list[list[tuple[Sample, float]]] = [[]] if mine else []
        for pair in mine:
            if cut[-1] and (len(cut[-1]) + 1) * _length(pair[0]) > most:
                cut.append([])
            cut[-1].append(pair)
        parts.append([pad([one for one, _ in part], [each for _, each in part], device) for part in cut])
    return [part for part in parts if part]


def _use_float32_logits(head: Any) -> None:
    """Have an output layer compute in float32, whatever the type of its weights."""
    bias = getattr(head, "bias", None)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), head.weight.float(), None if bias is None else head.bias.float())

    head.forward = forward


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.token_ids)


class EntropyWeight:
    """The weight of the entropy: a step raises it while the entropy is below the target, and lowers it otherwise.

    It acts below the target only (Skywork-OR1, arXiv 2505.22312). Without a target it is constant.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.value = recipe.entropy
        self.acts = recipe.entropy_target == 0

    @property
    def now(self) -> float:
        """What the next batch is trained with."""
        return self.value if self.acts else 0.0

    def observe(self, entropy: float) -> None:
        """Take in the mean of a batch, nats a token."""
        if self.recipe.entropy_target > 0:
            self.acts = entropy < self.recipe.entropy_target
            change = self.recipe.entropy_step if self.acts else -self.recipe.entropy_step
            self.value = min(1.0, max(0.0, self.value + change))


def divergence(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """K3, an estimate of the KL divergence from the reference for each drawn token, nats; all of one shape."""
    difference = reference - new
    return difference.exp() - 1 - difference


@dataclass(frozen=True)
class Compared:
    """Log-probs of drawn tokens: the worker's and the trainer's, the tokens' age in versions, and their entropy."""

    worker: np.ndarray
    trainer: np.ndarray
    age: np.ndarray
    entropy: np.ndarray

    def facts(self) -> dict[str, Any]:
        """Ratios of probabilities, trainer over worker: of all tokens and by age, mean and 1st and 99th percentile."""
        ratio = np.exp(self.trainer - self.worker)
        by_age = {str(age): _ratios(ratio[self.age == age]) for age in np.unique(self.age).tolist()}
        facts = {f"ratio/{name}": value for name, value in _ratios(ratio).items()}
        return {**facts, "ratio/by_age": by_age, "entropy": float(self.entropy.mean())}


def _ratios(ratio: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(ratio, (1, 99)).tolist()
    return {"tokens": len(ratio), "mean": float(ratio.mean()), "p1": low, "p99": high}


def _load(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Trainer:
    """The model, its optimizer, and the last weights, for comparison with the worker's log-probs."""

    def __init__(self, recipe: Recipe, model: str, device: str, resumed: Path | None = None) -> None:
        self.recipe, self.device = recipe, device
        progress = None if resumed is None else read_progress(resumed)
        torch.manual_seed(recipe.seed)
        self.model: nn.Module = _load(resumed or model).to(device)
        self.model.eval()  # no dropout: log-probs must be the worker's
        self._dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        if self._dtype != torch.float32:
            torch.backends.cuda.matmul.allow_tf32 = True  # TF32 holds each bfloat16 number
            _use_float32_logits(self.model.get_output_embeddings())  # type: ignore[operator]
        betas = (0.9, 0.95)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.lr, betas, eps=1e-8, weight_decay=recipe.weight_decay
        )
        self.version = 0 if progress is None else progress.step
        begun = self.version + 1
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (begun + step) / max(1, recipe.warmup))
        )
        self.entropy = EntropyWeight(recipe)
        if resumed is not None and progress is not None:
            self.entropy.value, self.entropy.acts = progress.entropy_weight, progress.entropy_below
            self._restore(read_optimizer(resumed))
        first = {name: tensor.to(device) for name, tensor in _load(model).named_parameters()} if recipe.kl else None
        self._reference = first
        self._past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=recipe.ahead + 1)
        self._remember()

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors to publish: the parameters themselves on a CPU, bfloat16 copies on a GPU."""
        return {name: tensor.detach().to(self._dtype) for name, tensor in self.model.named_parameters()}

    def logprobs(self, rows: Rows, weights: dict[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the drawn tokens and their entropies, both flat; `weights` replace the model's own."""
        drawn_NK = rows.drawn_NS[:, rows.first :]
        given = {"use_cache": False, "logits_to_keep": drawn_NK.shape[1]}
        weights = weights or dict(self.model.named_parameters())
        computing = {name: tensor.to(self._dtype) for name, tensor in weights.items()}
        called = torch.func.functional_call(self.model, computing, (rows.ids_NT[:, :-1],), given)
        logits_AV = called.logits[drawn_NK].float() / self.recipe.temperature
        targets_A = rows.ids_NT[:, 1:][rows.drawn_NS]
        total_A = logits_AV.logsumexp(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy.now > 0):
            probs_AV = (logits_AV - total_A[:, None]).exp()
            entropy_A = total_A - torch.linalg.vecdot(probs_AV, logits_AV)
        return logits_AV.gather(-1, targets_A[:, None])[:, 0] - total_A, entropy_A

    def train(self, groups: Sequence[Group], ready: Any) -> dict[str, Any]:
        """Take the optimizer steps of a batch; returns its facts, none if no group has different rewards.

        `ready()` is called before the first one changes the weights.
        """
        parts = micro_batches(groups, self.recipe, self.device)
        several = self.recipe.minibatches > 1
        with torch.no_grad():
            starts = [[self.logprobs(rows)[0] for rows in part] for part in parts] if several else []
        worker, trainer, age, entropy, clipped, norms, kl = [], [], [], [], 0, [], 0.0
        for i, part in enumerate(parts):
            tokens = sum(int(rows.drawn_NS.sum()) for rows in part)
            for j, rows in enumerate(part):
                new, entropies = self.logprobs(rows)
                old = starts[i][j] if several else new.detach()
                drawn_worker = rows.logprobs_NS[rows.drawn_NS]
                advantage = rows.advantage_N1.expand_as(rows.drawn_NS)[rows.drawn_NS]
                loss = token_loss(new, old, drawn_worker, advantage, self.recipe) - self.entropy.now * entropies
                if self._reference is not None:
                    with torch.no_grad():
                        reference, _ = self.logprobs(rows, self._reference)
                    loss = loss + self.recipe.kl * divergence(new, reference)
                    kl += float(divergence(new.detach(), reference).sum())
                (loss.sum() / tokens).backward()
                worker.append(drawn_worker)
                trainer.append(old.detach())
                entropy.append(entropies.detach())
                age.append(self.version - rows.versions_NS[rows.drawn_NS])
                clipped += int(((old - drawn_worker).exp() > self.recipe.importance_cap).sum())
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_norm, error_if_nonfinite=True)
            if i == 0:
                ready()
            self.optimizer.step()
            self.optimizer.zero_grad()
            norms.append(float(norm))
        self.schedule.step()
        self.version += 1
        self._remember()
        if not parts:
            return {}
        found = Compared(*(torch.cat(each).cpu().numpy() for each in (worker, trainer, age, entropy)))
        facts = {**found.facts(), "ratio/capped_pct": 100 * clipped / len(found.worker), "gradient": max(norms)}
        facts["entropy/weight"] = self.entropy.now
        self.entropy.observe(facts["entropy"])
        return facts if self._reference is None else {**facts, "kl": kl / len(found.worker)}

    def mismatch(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Compare log-probs under equal weights: the samples of a single version whose weights are kept.

        The largest and the mean difference, and k3, an estimate of the KL divergence, nats.
        """
        difference: list[np.ndarray] = []
        for version, weights in self._past:
            samples = [one for group in groups for one in group.samples if (one.versions[one.drawn] == version).all()]
            most = max((_length(one) for one in samples), default=1)
            size = max(1, micro_tokens(self.recipe, self.device) // most)
            for begin in range(0, len(samples), size):
                some = samples[begin : begin + size]
                rows = pad(some, [0.0] * len(some), self.device)
                with torch.no_grad():
                    mine, _ = self.logprobs(rows, weights)
                difference.append((mine - rows.logprobs_NS[rows.drawn_NS]).double().cpu().numpy())
        found = np.concatenate(difference) if difference else np.zeros(0)
        if not len(found):
            return {"mismatch/tokens": 0}
        absolute = np.abs(found)
        return {
            "mismatch/tokens": len(found),
            "mismatch/max_abs": float(absolute.max()),
            "mismatch/mean_abs": float(absolute.mean()),
            "mismatch/p99_abs": float(np.percentile(absolute, 99)),
            "mismatch/k3_kl": float((np.exp(found) - 1 - found).mean()),
        }

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, by their own name and the parameter's."""
        return {
            f"{part}/{name}": tensor
            for name, parameter in self.model.named_parameters()
            for part, tensor in self.optimizer.state[parameter].items()
        }

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parts = (part for part in ("step", "exp_avg", "exp_avg_sq") if f"{part}/{name}" in state)
            self.optimizer.state[parameter] = {
                # AdamW keeps its count of steps on the host.
                part: state[f"{part}/{name}"].to("cpu" if part == "step" else self.device)
                for part in parts
            }

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def _remember(self) -> None:
        if self.recipe.check_every:
            self._past.append((self.version, self._copy()))
