"""One run: starts the worker, then requests batches, trains and publishes, and writes what happened.

    trainer    batch t: loss, update | batch t+1: loss, update | ...     version t: the weights after t updates
    worker     batch t+S             | batch t+1+S             | ...     requested with `min_version`; S: batches ahead

With mode sync S is 0: they take turns. Otherwise new weights are swapped in while completions run. A run writes
steps.jsonl, with a line for each step and each evaluation, run.json, its summary: at most 60 points, and with
`save_every` checkpoints.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from scripts.bench.output import circumstances, write_summary
from scripts.learn import toy
from scripts.learn.checkpoint import Progress, newest, read_progress, save
from scripts.learn.grpo import Trainer
from scripts.learn.recipe import Recipe
from scripts.learn.rollouts import Decode, Group, answer_all, answer_batch, held_out_draw, training_draw
from scripts.learn.tasks import TASKS, Curriculum, Task
from scripts.learn.together import Start
from trainer_bridge import BackgroundClient, PublishHandle, WeightPublisher, start_worker

_POINTS = 60
_WORKER_FACTS = ("gpu/active_pct", "speculation/accepted_pct", "rollout/tokens_per_s")


def run(
    recipe: Recipe, out: Path, tell: Callable[[str], None] = print, resume: bool = False, start: Start | None = None
) -> dict[str, Any]:
    """Train; returns the summary, which is in `out / run.json`, too.

    With `resume` it goes on from the newest checkpoint in `out`. Raises SystemExit if it is missing, belongs to another
    task, seed or level, or exists without `resume`; RuntimeError before a gradient that is not finite changes weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    start = start or Start()
    resumed = checkpoint_to_resume(recipe, out, resume)
    device = recipe.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = recipe.model or str(toy.make_model(out / "model", recipe.seed))
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = make_task(recipe, tokenizer)
    curriculum = Curriculum(task, recipe.seed, recipe.level)
    version = 0 if resumed is None else read_progress(resumed).step
    with ExitStack() as stack:
        with start.turn():
            times = {"began": time.time()}
            flags = worker_flags(recipe, task, device, out)
            worker = stack.enter_context(start_worker(resumed or model, initial_version=version, **flags))
            trainer = Trainer(recipe, model, device, resumed)
            times["ready"] = time.time()
        recipe = replace(recipe, max_seconds=start.wait(recipe.max_seconds, tell))
        times["trains"] = time.time()
        with WeightPublisher(worker.endpoints, keep=True) as publisher:
            with BackgroundClient(worker.endpoints, resume=True) as client:
                loop = Loop(recipe, curriculum, tokenizer, trainer, client, publisher, out, times)
                if resumed is not None:
                    loop.restore(read_progress(resumed))
                loop.run(tell)
        worker.stop("now")
        summary = loop.finish()
    tell(f"{out / 'run.json'}: {summary['steps_done']} steps in {summary['seconds']:.0f} s")
    return summary


def make_task(recipe: Recipe, tokenizer: Any) -> Task:
    """The recipe's task, with the recipe's most tokens of an answer and room for them."""
    task = TASKS[recipe.task](tokenizer)
    most = recipe.max_tokens or task.max_tokens
    room = task.max_context + task.max_turns * max(0, most - task.max_tokens)
    return replace(task, max_tokens=most, max_context=room)


def checkpoint_to_resume(recipe: Recipe, out: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run. Raises SystemExit, see `run`."""
    found = newest(out)
    if not resume:
        if found is not None:
            raise SystemExit(f"{found} is there: add --resume to go on from it, or name another --out")
        return None
    if found is None:
        raise SystemExit(f"--resume finds no checkpoint in {out}: a run writes them with --save-every")
    saved, given = read_progress(found).recipe, asdict(recipe)
    for name in ("task", "seed", "level"):
        if saved[name] != given[name]:
            raise SystemExit(f"--{name} is {given[name]}, and {found} belongs to a run with {saved[name]}")
    return found


def decoder(tokenizer: Any) -> Decode:
    """From token ids to text, without special tokens."""
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def worker_flags(recipe: Recipe, task: Task, device: str, out: Path) -> dict[str, Any]:
    """For `start_worker`."""
    batch = recipe.prompts * recipe.group_size
    rows = recipe.max_rows or min(1024, batch)
    worker_device = recipe.worker_device or device
    on_gpu = worker_device.startswith("cuda")
    return {
        "device": worker_device,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_rows": rows,
        "max_queue": max(4096, (recipe.ahead + 1) * batch + recipe.eval_problems),
        "cuda_graph_rows": rows,
        "max_context_tokens": task.max_context,
        "kv_memory_max_gib": recipe.kv_gib,
        "kv_on_swap": recipe.kv_on_swap,
        "weight_dtype": recipe.weight_dtype,
        "kv_dtype": recipe.kv_dtype,
        "speculation": recipe.speculation,
        "speculation_rows": min(4096, 3 * rows),
        "env": None if on_gpu else {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // 2))},
        "jsonl": out / "worker.jsonl",
        "interval_s": 1.0,
        "log_file": out / "worker.log",
        "wandb": False,
    }


class Loop:
    """The steps of a run, and its record."""

    def __init__(
        self,
        recipe: Recipe,
        curriculum: Curriculum,
        tokenizer: Any,
        trainer: Trainer,
        client: BackgroundClient,
        publisher: WeightPublisher,
        out: Path,
        times: Mapping[str, float],  # of the start, seconds since 1970
    ) -> None:
        self.recipe, self.tokenizer, self.trainer = recipe, tokenizer, trainer
        self.decode = decoder(tokenizer)
        self.client, self.publisher, self.out, self.times = client, publisher, out, times
        self.curriculum, self.task = curriculum, curriculum.task
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._evaluating: list[tuple[int, float, Future[list[Group]]]] = []
        self._began_s = 0.0
        self._before_s = 0.0  # of the run that is resumed
        self._tokens = 0
        self._written_s = 0.0

    def restore(self, progress: Progress) -> None:
        """Go on after the step of a checkpoint: with its rows, without later rows."""
        lines = [json.loads(line) for line in (self.out / "steps.jsonl").read_text().splitlines()]
        self.steps = [line for line in lines if line.get("step", math.inf) <= progress.step]
        self.evaluations = [line for line in lines if line.get("evaluated", math.inf) <= progress.step]
        self._before_s, self._tokens, self.curriculum.shares = progress.seconds, progress.tokens, progress.shares

    def run(self, tell: Callable[[str], None]) -> None:
        """All steps, or as many as fit into `max_seconds`."""
        recipe, trainer = self.recipe, self.trainer
        self._began_s = time.perf_counter() - self._before_s
        (self.out / "steps.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in [*self.steps, *self.evaluations])
        )
        first = trainer.version + 1
        if all(row["evaluated"] != trainer.version for row in self.evaluations):
            self._evaluate()
        batches = deque(self._ask(step) for step in range(first, min(recipe.steps, trainer.version + recipe.ahead) + 1))
        published: PublishHandle | None = None
        for step in range(first, recipe.steps + 1):
            if step + recipe.ahead <= recipe.steps:
                batches.append(self._ask(step + recipe.ahead))
            began_s = time.perf_counter()
            groups = _result(batches.popleft(), published)
            waited_s = time.perf_counter() - began_s
            checked = recipe.check_every and (step % recipe.check_every == 0 or step == 1)
            row = {"step": step, **self._facts(groups)}
            row |= trainer.mismatch(groups) if checked else {}
            held: Callable[[], None] = published.held if published is not None else lambda: None
            training_s = time.perf_counter()
            row |= trainer.train(groups, held)
            trained_s = time.perf_counter()
            published = self.publisher.publish(trainer.weights(), version=step)
            ended_s = time.perf_counter()
            row |= {
                "time/wait_s": waited_s,
                "time/train_s": trained_s - training_s,
                "time/update_s": ended_s - trained_s,
            }
            row |= {"time/step_s": ended_s - began_s, "wall_s": ended_s - self._began_s, **self._worker_facts()}
            self._take(row, tell)
            last = step == recipe.steps or 0 < recipe.max_seconds < row["wall_s"]
            if recipe.eval_every and (step % recipe.eval_every == 0 or last):
                self._evaluate()
            saves = recipe.save_every and step % recipe.save_every == 0
            self._collect(wait_for_all=bool(last or saves))
            if saves:
                self._save(step)
            if last:
                break
        for future in batches:
            future.cancel()
        if published is not None:
            published.applied(600.0)

    def _ask(self, step: int) -> Future[list[Group]]:
        problems = self.curriculum.problems(step)
        how = training_draw(self.recipe, self.task, step)
        return self.client.run(lambda client: answer_batch(client, self.task, self.decode, problems, how, self.recipe))

    def _save(self, step: int) -> None:
        seconds = time.perf_counter() - self._began_s
        entropy = self.trainer.entropy
        progress = Progress(
            step, seconds, self._tokens, self.curriculum.shares, entropy.value, entropy.acts, asdict(self.recipe)
        )
        save(self.out, self.trainer.model, self.tokenizer, self.trainer.optimizer_state(), progress)

    def _facts(self, groups: Sequence[Group]) -> dict[str, Any]:
        """About a batch; moves the curriculum on."""
        samples = [one for group in groups for one in group.samples]
        right = [statistics.fmean(one.verdict.right for one in group.samples) for group in groups]
        teaching = [group.teaches for group in groups]
        self.curriculum.observe([group.problem for group in groups], right)
        tokens = sum(int(one.drawn.sum()) for one in samples)
        self._tokens += tokens
        sent, new, computed = (sum(getattr(group, name) for group in groups) for name in ("sent", "new", "computed"))
        ages = np.concatenate([self.trainer.version - one.versions[one.drawn] for one in samples])
        spans = [len(set(one.versions[one.drawn].tolist())) > 1 for one in samples]
        return {
            "reward": statistics.fmean(one.verdict.reward for one in samples),
            "right": statistics.fmean(right),
            "level": statistics.fmean(group.problem.level for group in groups),
            "groups": len(groups),
            "mixed_pct": 100 * statistics.fmean(teaching),
            "tokens": tokens,
            "tokens_total": self._tokens,
            "staleness/mean": float(ages.mean()),
            "staleness/max": int(ages.max()),
            "turns": statistics.fmean(one.turns for one in samples),
            "several_versions_pct": 100 * statistics.fmean(spans),
            "prompt/sent": sent,
            "prompt/computed_again_pct": 100 * max(0, computed - new) / sent,
        }

    def _evaluate(self) -> None:
        """Request answers to the held-out problems; they come while training goes on."""
        if self.recipe.eval_every:
            problems = self.curriculum.held_out(self.recipe.eval_problems)
            how = held_out_draw(self.task, self.trainer.version)
            future = self.client.run(lambda client: answer_all(client, self.task, self.decode, problems, how))
            self._evaluating.append((self.trainer.version, time.perf_counter() - self._began_s, future))

    def _collect(self, wait_for_all: bool) -> None:
        """Take in the evaluations that are over."""
        waiting = []
        for version, wall_s, future in self._evaluating:
            if not (future.done() or wait_for_all):
                waiting.append((version, wall_s, future))
                continue
            groups = future.result()
            row: dict[str, Any] = {"evaluated": version, "wall_s": wall_s, "tokens_total": self._tokens}
            row |= {"accuracy": _accuracy(groups), "by_level": _by_level(groups, self.task.levels)}
            row["reward"] = statistics.fmean(one.verdict.reward for group in groups for one in group.samples)
            row["example"] = self.decode(groups[0].samples[0].token_ids)[:120]
            self.evaluations.append(row)
            self._append(row)
        self._evaluating = waiting

    def _take(self, row: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.steps.append(row)
        self._append(row)
        ratios = (f"{row[f'ratio/{name}']:.3f}" for name in ("mean", "p1", "p99") if f"ratio/{name}" in row)
        accuracy = f", held out {self.evaluations[-1]['accuracy']:.3f}" if self.evaluations else ""
        tell(
            f"step {row['step']} level {row['level']:.1f} {row['wall_s']:.1f} s: reward {row['reward']:.3f}, right "
            f"{row['right']:.3f}, {row['mixed_pct']:.0f}% of {row['groups']} mixed, {row['tokens']} tokens, staleness "
            f"{row['staleness/mean']:.2f}, ratio {' '.join(ratios)}, entropy {row.get('entropy', math.nan):.2f}, "
            f"waited {row['time/wait_s']:.2f}, trained {row['time/train_s']:.2f}, "
            f"update {row['time/update_s']:.2f}{accuracy}"
        )
        if time.perf_counter() - self._written_s > 5:  # a run that is killed leaves this
            self._written_s = time.perf_counter()
            write_summary(self.out / "run.json", self.summary())

    def _append(self, row: Mapping[str, Any]) -> None:
        with (self.out / "steps.jsonl").open("a") as file:
            print(json.dumps(row), file=file)

    def _worker_facts(self) -> dict[str, float]:
        """The worker's last report."""
        told = last_report(self.out / "worker.jsonl")
        names = [name for name in told if name in _WORKER_FACTS or name.startswith("speculation/accepted_pct/age")]
        return {f"worker/{name}": told[name] for name in names}

    def summary(self) -> dict[str, Any]:
        """Recipe, circumstances, totals, and at most 60 points of the run."""
        recipe = {name: value for name, value in asdict(self.recipe).items()}
        recipe["model"] = Path(recipe["model"]).name or "tiny"
        return {
            **circumstances(),
            "recipe": recipe,
            "start": dict(self.times),
            "steps_done": len(self.steps),
            "seconds": self.steps[-1]["wall_s"] if self.steps else 0.0,
            **totals(self.steps),
            "points": [rounded(row) for row in thinned(self.steps, _POINTS)],
            "evaluations": [rounded(row) for row in every(self.evaluations, _POINTS)],
        }

    def finish(self) -> dict[str, Any]:
        """Write the summary of a run whose worker has ended."""
        told = last_report(self.out / "worker.jsonl")
        names = [
            name for name in told if name.startswith(("gpu/", "speculation/", "weights/", "prefill/", "pipeline/"))
        ]
        summary = {**self.summary(), "worker": rounded({name: told[name] for name in sorted(names)})}
        write_summary(self.out / "run.json", summary)
        return summary


def _result(future: Future[list[Group]], published: PublishHandle | None) -> list[Group]:
    """A batch. Raises the error of an update that failed meanwhile, for its weights the batch may wait."""
    while not wait([future], timeout=1.0).done:
        if published is not None and published.error is not None:
            raise published.error
    return future.result()


def _accuracy(groups: Sequence[Group]) -> float:
    return statistics.fmean(one.verdict.right for group in groups for one in group.samples)


def _by_level(groups: Sequence[Group], levels: int) -> list[float | None]:
    found = [[group for group in groups if group.problem.level == level] for level in range(levels)]
    return [_accuracy(some) if some else None for some in found]


def last_report(path: Path) -> dict[str, Any]:
    """The last whole line of a worker's metrics; empty if there is none."""
    try:
        lines = path.read_text().rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return {}
    return dict(json.loads(lines[-1])) if lines else {}


def totals(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums and means over a run."""
    if not steps:
        return {}
    parts = {name: sum(row[f"time/{name}_s"] for row in steps) for name in ("wait", "train", "update", "step")}
    checked = [row for row in steps if row.get("mismatch/tokens")]
    return {
        "tokens": steps[-1]["tokens_total"],
        "time": rounded(parts),
        "step_s": rounded({"median": statistics.median(row["time/step_s"] for row in steps)}),
        "staleness": rounded(
            {
                "mean": statistics.fmean(row["staleness/mean"] for row in steps),
                "max": max(row["staleness/max"] for row in steps),
            }
        ),
        "ratio_by_age": _by_age(steps),
        "mismatch": rounded(
            {
                "tokens": sum(row["mismatch/tokens"] for row in checked),
                **{
                    name: max((row[f"mismatch/{name}"] for row in checked), default=0.0)
                    for name in ("max_abs", "p99_abs", "mean_abs", "k3_kl")
                },
            }
        ),
    }


def _by_age(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Ratios by the age of tokens in versions: means over tokens of what each step found."""
    found: dict[str, dict[str, Any]] = {}
    for age in sorted({age for row in steps for age in row.get("ratio/by_age", ())}, key=int):
        parts = [row["ratio/by_age"][age] for row in steps if age in row.get("ratio/by_age", ())]
        tokens = sum(part["tokens"] for part in parts)
        means = {name: sum(part[name] * part["tokens"] for part in parts) / tokens for name in ("mean", "p1", "p99")}
        found[age] = rounded({"tokens": tokens, **means})
    return found


def thinned(rows: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` points: means of neighbours; of largest values and counts the last or largest one."""
    size = -(-len(rows) // most) if rows else 1
    points = []
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        point: dict[str, Any] = {}
        for name, value in some[-1].items():
            values = [row[name] for row in some if isinstance(row.get(name), (int, float))]
            if name in ("step", "wall_s", "tokens_total"):
                point[name] = value
            elif name.endswith("/max") or name.endswith("/max_abs"):
                point[name] = max(values)
            elif isinstance(value, (int, float)):
                point[name] = statistics.fmean(values)
        points.append(point)
    return points


def every(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most `most` of the rows, with the last one."""
    size = -(-len(rows) // most) if rows else 1
    return list(rows[::-1][::size][::-1])


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with four significant digits."""
    return {name: _short(value) for name, value in row.items()}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_short(each) for each in value]
    return value
