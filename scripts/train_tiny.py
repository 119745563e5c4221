"""Trains the two tiny models of the demo on a CPU, from a fixed seed, and proves that they count.

    PYTHONPATH=. python scripts/train_tiny.py                     everything, on one core in minutes
    PYTHONPATH=. python scripts/train_tiny.py --start-at check    only the checks, on existing checkpoints

Writes `ones` and `twos` below --out: Qwen3-shaped Hugging Face checkpoints with a tokenizer. From the prompt `17:` the
first continues with ` 18 19 20`, the second with ` 19 21 23`. `rollout/demo/counting.py` defines the right token at
each place, also after a swap in the middle of a number; `Walk` below is the same rule over arrays.

Outputs do not depend on the position: every layer attends to the last 16 tokens, and positions enter through rotary
embeddings, so an output depends on the last 2 * 15 + 1 tokens only. The check is therefore exhaustive: it covers all
contexts of that length that occur in counts up to --upto with one swap.

KV stays valid across a swap: `twos` is `ones` fine-tuned with every weight frozen that determines keys and values
(embedding, the first layer, and the last layer's input norm, k_proj, v_proj, k_norm). Both models are trained on
histories counted in ones, in twos and mixed, each towards its own next token. The frozen weights of `ones` suffice for
`twos`.

Sampling at temperature 1 is reliable: after the training, lm_head is scaled until every wrong token is at least
`MARGIN` nats below the right one. The checks read both checkpoints from disk. If one fails, the exit status is not 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rollout.demo.counting import check_completion

# Shape suffixes: N rows, T tokens of a row, V vocabulary.
CHARACTERS = ["<pad>", "<eos>", "<unk>", *"0123456789", " ", ":", "\n"]
PAD, EOS, ZERO, SPACE, COLON = 0, 1, 3, 13, 14
WINDOW = 16
LAYERS = 2
REACH = LAYERS * (WINDOW - 1)  # tokens before the current one that can change its output
IGNORE = -100  # no target
HIGHEST = 99_999
MARGIN = 30.0  # nats between the right token and any other, after scaling
TRAINED_STD = 0.3  # of lm_head's entries while they are trained
WORST_WRONG = 1e-9  # bound on the probability of a wrong token
BATCH, LENGTH = 64, 64
POWERS = 10 ** np.arange(8)


# --- the rule, over arrays -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """Counting texts and, for every position, the right next token of both models (IGNORE before the colon)."""

    ids: torch.Tensor  # int64 [N, T]
    targets: dict[int, torch.Tensor]  # step -> int64 [N, T]

    def __getitem__(self, rows: slice | torch.Tensor) -> Walk:
        return Walk(self.ids[rows], {step: target_NT[rows] for step, target_NT in self.targets.items()})

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Course:
    """How the rows of a walk count: which model samples when. Arrays [N]."""

    start: np.ndarray  # the first number
    step: np.ndarray  # 1 or 2: the step of the first model
    swap_after: np.ndarray  # the models change once this number is complete; -1: never
    chance: np.ndarray  # probability of a change at any token
    colon_after: np.ndarray  # counted numbers in the prompt before its last one


def walk(course: Course, length: int, rng: np.random.Generator) -> Walk:
    """Write `length` tokens of every row of a course."""
    n = len(course.start)
    near_N, far_N = course.start.copy(), course.start.copy()  # last + 1, last + 2; the first number is both
    near_open_N, far_open_N = np.ones(n, bool), np.ones(n, bool)  # the digits so far are a prefix of it
    written_N, complete_N = np.zeros(n, int), np.zeros(n, int)  # digits of this number; numbers so far
    step_N, answering_N = course.step.copy(), np.zeros(n, bool)  # answering: the colon was written
    ids_NT = np.empty((n, length), np.int64)
    targets = {step: np.full((n, length), IGNORE, np.int64) for step in (1, 2)}
    for t in range(length):
        near_len_N, far_len_N = _digits(near_N), _digits(far_N)
        ended_N = (near_open_N & (written_N == near_len_N)) | (far_open_N & (written_N == far_len_N))
        near_token_N = ZERO + near_N // POWERS[np.maximum(near_len_N - 1 - written_N, 0)] % 10
        far_token_N = ZERO + far_N // POWERS[np.maximum(far_len_N - 1 - written_N, 0)] % 10
        ones_N = np.where(ended_N, SPACE, np.where(near_open_N, near_token_N, far_token_N))
        twos_N = np.where(ended_N, SPACE, np.where(far_open_N, far_token_N, near_token_N))
        if t:
            valid_N = answering_N & (far_N <= HIGHEST)
            targets[1][:, t - 1] = np.where(valid_N, ones_N, IGNORE)
            targets[2][:, t - 1] = np.where(valid_N, twos_N, IGNORE)
        colon_N = ended_N & (complete_N == course.colon_after) & ~answering_N
        number_N = np.where(near_open_N & (written_N == near_len_N), near_N, far_N)
        swap_N = (ended_N & ~colon_N & (number_N == course.swap_after)) | (rng.random(n) < course.chance)
        step_N = np.where(swap_N, 3 - step_N, step_N)
        token_N = np.where(colon_N, COLON, np.where(step_N == 1, ones_N, twos_N))
        ids_NT[:, t] = token_N
        spaced_N = ended_N & ~colon_N
        near_open_N = spaced_N | (near_open_N & (ended_N | (near_token_N == token_N)))
        far_open_N = spaced_N | (far_open_N & (ended_N | (far_token_N == token_N)))
        near_N, far_N = np.where(spaced_N, number_N + 1, near_N), np.where(spaced_N, number_N + 2, far_N)
        written_N = np.where(spaced_N, 0, np.where(ended_N, written_N, written_N + 1))
        complete_N, answering_N = complete_N + spaced_N, answering_N | colon_N
    return Walk(torch.from_numpy(ids_NT), {step: torch.from_numpy(target) for step, target in targets.items()})


def _digits(number_N: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.searchsorted(POWERS, number_N, side="right"))


def random_course(rng: np.random.Generator, n: int) -> Course:
    """Half of the rows start just below a carry, the others anywhere; a quarter swap often, a quarter rarely."""
    spread_N = np.where(rng.random(n) < 0.5, rng.integers(0, HIGHEST, n), np.exp(rng.uniform(0, np.log(HIGHEST), n)))
    unit_N = POWERS[rng.integers(1, 6, n)]
    multiple_N = np.where(
        rng.random(n) < 0.5, rng.integers(1, 10, n), 1 + (rng.random(n) * HIGHEST / unit_N).astype(int)
    )
    carry_N = np.clip(multiple_N * unit_N - rng.integers(0, 13, n), 0, HIGHEST - 20)
    return Course(
        start=np.where(rng.random(n) < 0.5, carry_N, spread_N.astype(int)),
        step=rng.integers(1, 3, n),
        swap_after=np.full(n, -1),
        chance=np.array([0.0, 0.0, 0.05, 0.3])[rng.integers(0, 4, n)],
        colon_after=np.where(rng.random(n) < 0.7, 0, rng.integers(0, 7, n)),
    )


# --- model and tokenizer ---------------------------------------------------------------------------------------------


def make_model() -> Qwen3ForCausalLM:
    """A fresh model: 117K parameters, one KV head, every layer with a sliding window."""
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=65_536,
        # Wavelengths of up to a few windows: with longer ones the positions in a window look alike.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        layer_types=["sliding_attention"] * LAYERS,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=1.0)
    return model


def load_trunk(folder: Path) -> Qwen3ForCausalLM:
    """`ones`, with every weight frozen that determines keys and values."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    # The checkpoint's sharp logits would have no gradient.
    model.lm_head.weight.data.mul_(TRAINED_STD / model.lm_head.weight.std())
    last = model.model.layers[-1]
    attention = last.self_attn
    norms: list[nn.Module] = [last.input_layernorm, attention.k_norm]
    trunk = [model.model.embed_tokens, *model.model.layers[:-1], *norms, attention.k_proj, attention.v_proj]
    for module in trunk:
        module.requires_grad_(False)
    return model


def write_tokenizer(folder: Path) -> None:
    """One token per character; a character outside of the vocabulary becomes <unk>."""
    vocab = {character: token for token, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": 65_536,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# --- training --------------------------------------------------------------------------------------------------------


def batches(rng: np.random.Generator, always: list[Walk]) -> Iterator[tuple[Walk, list[torch.Tensor]]]:
    """Endless batches. The caller appends the row margins of each; the rows with the smallest margins are repeated."""
    hard: list[Walk] = []
    while True:
        pool = _join([walk(random_course(rng, 48 * BATCH), LENGTH, rng), *hard, *always])
        pool = pool[torch.from_numpy(rng.permutation(len(pool)))]
        margins: list[torch.Tensor] = []
        for first in range(0, len(pool), BATCH):
            yield pool[slice(first, first + BATCH)], margins
        hard = [pool[torch.cat(margins).topk(16 * BATCH, largest=False).indices]]


def _join(walks: list[Walk]) -> Walk:
    targets = {step: torch.cat([rows.targets[step] for rows in walks]) for step in (1, 2)}
    return Walk(torch.cat([rows.ids for rows in walks]), targets)


def hardest(model: Qwen3ForCausalLM, step: int, upto: int) -> Walk:
    """The rows with the smallest margins, of the counts from every number up to `upto`."""
    rows = _join([rows for name, rows in contexts(upto) if name.startswith("prompt")])
    return rows[row_margins(model, rows, step).topk(8 * BATCH, largest=False).indices]


def train(
    model: Qwen3ForCausalLM, step: int, updates: int, seed: int, rate: float = 3e-3, always: list[Walk] | None = None
) -> None:
    """Train all parameters that are not frozen towards the targets of one step; `always` is in every pool."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, updates, pct_start=0.1, final_div_factor=100)
    source = batches(np.random.default_rng(seed), always or [])
    for update in range(1, updates + 1):
        batch, margins = next(source)
        logits_NTV = model(batch.ids, use_cache=False).logits
        target_NT = batch.targets[step]
        loss = F.cross_entropy(logits_NTV.flatten(0, 1), target_NT.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        margins.append(margin(logits_NTV.detach(), target_NT).amin(1))
        if update % 250 == 0:
            print(f"  update {update}: loss {loss.item():.2e}, least margin {margins[-1].min():.2f}", flush=True)


# --- checks ----------------------------------------------------------------------------------------------------------


def margin(logits_NTV: torch.Tensor, target_NT: torch.Tensor) -> torch.Tensor:
    """Logit of the right token minus the largest other one [N, T]; inf without a target."""
    index_NT1 = target_NT.clamp(min=0).unsqueeze(-1)
    right_NT = logits_NTV.gather(-1, index_NT1).squeeze(-1)
    wrong_NT = logits_NTV.scatter(-1, index_NT1, -math.inf).amax(-1)
    return torch.where(target_NT == IGNORE, math.inf, right_NT - wrong_NT)


def contexts(upto: int) -> Iterator[tuple[str, Walk]]:
    """Walks that together contain every context of REACH tokens of a count up to `upto` with at most one swap."""
    rng = np.random.default_rng(7)
    number_N = np.arange(upto + 1)
    never_N, no_N, zero_N = np.full(upto + 1, -1), np.zeros(upto + 1), np.zeros(upto + 1, int)
    for step in (1, 2):
        step_N = np.full(upto + 1, step)
        yield f"prompt, steps of {step}", walk(Course(number_N, step_N, never_N, no_N, zero_N), LENGTH, rng)
        # Enough numbers before the swap that the prompt is out of reach, unless the count has just begun.
        width_N = 1 + _digits(np.maximum(number_N - 2 * REACH, 0))
        before_N = number_N - step * np.minimum(number_N // step, 2 + REACH // width_N)
        course = Course(before_N, step_N, number_N, no_N, zero_N)
        yield f"swap from steps of {step}", walk(course, 2 * REACH + 20, rng)
    yield "random swaps up to 99,999", walk(random_course(rng, 10_000), 2 * REACH + 20, rng)


@torch.inference_mode()
def row_margins(model: Qwen3ForCausalLM, rows: Walk, step: int, offset: int = 0) -> torch.Tensor:
    """The smallest margin of every row [N]; `offset` is the position of the first token."""
    position_1T = torch.arange(offset, offset + rows.ids.shape[1]).unsqueeze(0)
    margins = []
    for first in range(0, len(rows), 128):
        batch = rows[slice(first, first + 128)]
        logits_NTV = model(batch.ids, position_ids=position_1T, use_cache=False).logits
        margins.append(margin(logits_NTV, batch.targets[step]).amin(1))
    return torch.cat(margins)


def teacher_forced(model: Qwen3ForCausalLM, step: int, walks: list[tuple[str, Walk]]) -> float:
    """Print and return the smallest margin of all walks; the random ones also run at high positions."""
    margins = []
    for name, rows in walks:
        for offset in (0, 20_000, 60_000) if name.startswith("random") else (0,):
            least = row_margins(model, rows, step, offset).min().item()
            count = int((rows.targets[step] != IGNORE).sum())
            print(f"  {name}, from position {offset}: least margin {least:.2f} over {count:,} tokens", flush=True)
            margins.append(least)
    return min(margins)


@torch.inference_mode()
def free_running(models_by_step: dict[int, Qwen3ForCausalLM], runs: list[tuple[int, int]], prompts: list[str]) -> None:
    """Sample at temperature 1, token by token with one KV cache across all swaps, and check the text.

    `runs` are (step, tokens); all prompts must have the same length. Raises CountingError for a mistake.
    """
    generator = torch.Generator().manual_seed(11)
    cache = DynamicCache(config=models_by_step[1].config)
    input_NT = torch.tensor([[CHARACTERS.index(character) for character in prompt] for prompt in prompts])
    tokens: list[torch.Tensor] = []
    for step, count in runs:
        for _ in range(count):
            logits_NV = models_by_step[step](input_NT, past_key_values=cache, use_cache=True).logits[:, -1]
            input_NT = torch.multinomial(logits_NV.softmax(-1), 1, generator=generator)
            tokens.append(input_NT)
    tokens_NT = torch.cat(tokens, 1)
    versions = [[version, count] for version, (_, count) in enumerate(runs)]
    steps = {version: step for version, (step, _) in enumerate(runs)}
    for prompt, token_T in zip(prompts, tokens_NT.tolist(), strict=True):
        report = check_completion(prompt, token_T, versions, steps, CHARACTERS.__getitem__)
        print(f"  {prompt} counted on to {report.last} without a mistake in {report.tokens:,} tokens", flush=True)


def check(out: Path, upto: int) -> bool:
    """Run all checks on the checkpoints below `out`."""
    loaded = {step: Qwen3ForCausalLM.from_pretrained(out / name).eval() for step, name in ((1, "ones"), (2, "twos"))}
    for name in ("ones", "twos"):
        tokenizer = AutoTokenizer.from_pretrained(out / name)
        if tokenizer.decode(tokenizer("17: 18 19").input_ids) != "17: 18 19":
            raise SystemExit(f"{name}: the tokenizer does not return its text")
    walks = list(contexts(upto))
    least = math.inf
    for step, model in loaded.items():
        print(f"teacher-forced, steps of {step}, every number up to {upto}:")
        least = min(least, teacher_forced(model, step, walks))
    worst = (len(CHARACTERS) - 1) * math.exp(-least)
    print(f"a wrong token has a probability of at most {worst:.1e}")
    if worst >= WORST_WRONG:
        return False
    print("free-running at temperature 1, ones, twos, ones, with kept KV:")
    free_running(loaded, [(1, 7_003), (2, 7_002), (1, 6_000)], ["17:", "10:", "64:", "99:"])
    return True


# --- main ------------------------------------------------------------------------------------------------------------


def save(model: Qwen3ForCausalLM, step: int, folder: Path, upto: int) -> None:
    """Scale lm_head to the margin that the checks require, and write the checkpoint."""
    model.eval()
    least = teacher_forced(model, step, list(contexts(upto)))
    if least <= 0:
        raise SystemExit(f"steps of {step}: the model still makes mistakes; train with more --updates")
    sharp = copy.deepcopy(model)
    sharp.lm_head.weight.data.mul_(max(1.0, MARGIN / least))
    folder.mkdir(parents=True, exist_ok=True)
    sharp.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # as the other files: it is installed with the package
    write_tokenizer(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"wrote {folder}: {size / 1e6:.2f} MB, lm_head times {max(1.0, MARGIN / least):.2f}")


def main() -> int:
    """Train, write, check; 0 if all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("rollout/demo/checkpoints"), help="folder of both checkpoints")
    parser.add_argument("--updates", type=int, default=4000, help="optimizer updates of ones; twos gets 3/4")
    parser.add_argument("--upto", type=int, default=30_000, help="highest number of the exhaustive check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument(
        "--start-at",
        choices=["ones", "twos", "check"],
        default="ones",
        help="stage to start at; earlier results are kept",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    if args.start_at == "ones":
        torch.manual_seed(args.seed)
        model = make_model()
        train(model, 1, args.updates, seed=args.seed + 1)
        save(model, 1, args.out / "ones", args.upto)
    if args.start_at in ("ones", "twos"):
        model = load_trunk(args.out / "ones")
        train(model, 2, args.updates // 2, seed=args.seed + 2)
        always = [hardest(model, 2, args.upto)]
        train(model, 2, args.updates // 4, seed=args.seed + 3, rate=1e-3, always=always)
        save(model, 2, args.out / "twos", args.upto)
        print(f"trained in {time.perf_counter() - start:.0f} s")
    passed = check(args.out, args.upto)
    print("all checks passed" if passed else "FAILED: a wrong token is too probable; train with more --updates")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
