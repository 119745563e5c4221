"""The engine of this project in the benchmark's process, driven as in a worker."""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rollout.config import EngineSettings, MetricsSettings, ModelSettings, Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import make_device
from rollout.engine.features.drafts.feature import DraftsFeature
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.messages.to_engine import PutAdapter, Submit
from rollout.engine.messages.to_service import Delta, Event, Rejected
from rollout.engine.schedule.step_feature import find_feature
from rollout.metrics.step_timing import StepTiming
from rollout.models import LoadedModel, load_model
from rollout.models.language_model import native
from rollout.models.loader import MTP, AskedFormat
from rollout.models.spec import MoESpec
from rollout.process.progress import stage
from rollout.settings_sources import load_settings
from scripts.bench.peers.arrivals import ArrivalLog
from scripts.bench.peers.experiments import Finished, Row, Served
from scripts.bench.peers.job import Job
from scripts.bench.peers.repeating import is_output, quiet, sharpen
from scripts.bench.peers.workloads import Work
from scripts.bench.random_adapter import random_adapter
from scripts.bench.shapes import write_checkpoint, write_draft_checkpoint

#: Share of the free memory for KV; the rest is for graphs, logits and the activations of a prefill.
KV_SHARE = 0.88
_KEPT_STEPS = 2000
ADAPTER_RANK = 16
_TOLD_EVERY = 256  # tokens between two deltas with experts, as in the service
#: The layout of a draft model: an EAGLE-3 head, or a layer for multi-token prediction.
Draft = Literal["head", "mtp"]


class OursEngine:
    """`rollout.engine` with random weights of the job's shape, at a pipeline depth.

    With `routing` every completion gets its expert records. `adapters` is the number of loaded adapters of rank 16;
    requests use the first `use_adapters` of them in turn. `changes` are other engine settings. Requests have the
    settings `sampling`, each with its own seed. With `fallback` the model is transformers' own code. With `draft` it
    has a random draft model, and `changes` say so.
    """

    keeps_prefixes = True
    sees_tokens = True
    can_repeat = True

    def __init__(
        self,
        job: Job,
        depth: int,
        routing: bool = False,
        adapters: int = 0,
        changes: Mapping[str, Any] | None = None,
        fallback: bool = False,
        draft: Draft | None = None,
    ) -> None:
        device = make_device(job.device)
        settings = Settings(
            engine=engine_settings(job, depth, routing, adapters, changes),
            metrics=MetricsSettings(wandb=False),
        )
        began_s = time.perf_counter()
        made = settings.engine.weight_format, job.layers, fallback, draft
        loaded = load_random(job.shape, device.torch_device, *made)
        loaded_s = time.perf_counter()
        self._model, self._quiet = loaded.model, False
        self.spec, self.dtype = loaded.spec, loaded.model.embed.dtype
        self.vocab, self.hidden = loaded.spec.vocab, loaded.model.embed.shape[1]
        self._depth = depth
        self._routing = routing
        self.use_adapters = adapters
        self.sampling = SamplingParams()
        self.completions: dict[str, list[Delta]] = {}  # of the last run: what requests were told, by their numbers
        self._ends: list[float] = []
        self._arrivals: ArrivalLog | None = None
        self._runs = 0
        self._steps_before = 0
        self._drafts_before: tuple[int, int] | None = (0, 0)
        self._active_pct = 0.0
        links = local_links(settings, self._take)
        with stage("preparing decode steps") as advance:
            self.engine = build_engine(settings, device, loaded.model, links, progress=advance)
        for i in range(adapters):
            weights = random_adapter(native(loaded.model).spec, ADAPTER_RANK, loaded.model.embed.dtype, i)
            links.inbox.put(PutAdapter(f"adapter{i}", weights))
        ready_s = time.perf_counter()
        self.capacity_tokens = self.engine.roster.allocator.pool.total * settings.engine.page_size
        self._facts = {
            "depth": depth,
            "load_s": loaded_s - began_s,
            "build_s": ready_s - loaded_s,
            "kv_tokens": self.capacity_tokens,
            "max_context": job.most_context,
            "graphs": self.engine.executor.captures,
        }

    def generate(self, work: Work) -> Finished:
        """Make all completions of `work`, to their full lengths, all asked for at once."""
        self._runs += 1
        prompts = [np.asarray(prompt, dtype=np.int32) for prompt in work.prompts]
        self._drafts_before = self._drafts()
        self._ends, self._steps_before, self.completions = [], self.engine.meter.steps, {}
        began_s, idle_s = time.perf_counter(), self._idle_s()
        for i, (prompt, length) in enumerate(zip(prompts, work.lengths, strict=True)):
            key = (f"run{self._runs}", str(i))
            request = Request(key, Prompt.of_tokens(prompt), length, work.n, replace(self.sampling, seed=i))
            if self.use_adapters:
                request = replace(request, adapter=f"adapter{i % self.use_adapters}")
            if self._routing:
                request = replace(request, routing_from=0, stream_every=_TOLD_EVERY)
            self.engine.inbox.put(Submit(request))
        self.engine.tick()
        while self.engine.busy:
            self.engine.tick()
        assert len(self._ends) == len(work.lengths) * work.n, "a completion is missing"
        self._active_pct = (1 - (self._idle_s() - idle_s) / (time.perf_counter() - began_s)) * 100
        return Finished([end - began_s for end in self._ends])

    def serve(self, work: Work, arrivals_s: list[float]) -> Served:
        """Make all completions of `work`, each asked for at its time."""
        self._runs += 1
        self._ends = []
        prompts = [Prompt.of_tokens(np.asarray(prompt, dtype=np.int32)) for prompt in work.prompts]
        self._arrivals = log = ArrivalLog(arrivals_s)
        while not log.complete:
            for i in log.due():
                request = Request((f"run{self._runs}", str(i)), prompts[i], work.lengths[i], stream_every=1)
                self.engine.inbox.put(Submit(replace(request, sampling=replace(self.sampling, seed=i))))
            self.engine.tick()
            if not self.engine.busy:
                log.wait()
        self._arrivals = None
        return log.served()

    def _idle_s(self) -> float:
        """Seconds since the start without a step on the device, by the meter."""
        return sum(self.engine.meter.idle_seconds().values())

    def _take(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Rejected):
                raise ValueError(f"the engine refused a request: {event.message}")
            if isinstance(event, Delta) and self._arrivals is not None:
                self._arrivals.tokens(int(event.key[1]), len(event.token_ids), event.finish is not None)
            if isinstance(event, Delta) and self._arrivals is None:
                self.completions.setdefault(event.key[1], []).append(event)
            if isinstance(event, Delta) and event.finish is not None:
                if event.finish.reason != "length":
                    raise RuntimeError(f"a completion ended as {event.finish.reason}: {event.finish.error}")
                self._ends.append(now)

    def repeat(self, chance: float) -> None:
        """Get the weights whose text repeats. Raises ValueError for a model that cannot have them."""
        model = native(self._model)
        spec = model.spec
        if spec.tied or spec.unit_offset or spec.logit_softcap is not None:
            raise ValueError("needs an output layer of its own, a plain final norm and no softcap: take another shape")
        with torch.inference_mode():
            if not self._quiet:
                outputs = [data for name, data in model.named_parameters() if is_output(name)]
                quiet(outputs, len(spec.layers), model.embed, model.norm.weight)
            sharpen(model.lm_head, self.vocab, chance)
        self._quiet = True

    def _drafts(self) -> tuple[int, int] | None:
        """The tokens that were drafted and accepted so far; None without speculation."""
        drafting = find_feature(self.engine.roster.features, DraftsFeature)
        return None if drafting is None else (drafting.counts.drafted, drafting.counts.accepted)

    def facts(self) -> Row:
        """Depth, seconds to load and to capture, size of the KV."""
        return self._facts

    def last_steps(self) -> Row:
        """Wall time, device time, idle time and host work of the second half of the decode steps with all rows.

        Milliseconds; absent if the meter kept too few steps. Also the share of the run in which the device ran a step,
        and for a mixture of experts the mean number of distinct experts per layer in the last captured step; with
        speculation the tokens that were drafted and accepted in the run.
        """
        full = self.full_steps()
        most = full[0].rows if full else 0
        steady = steady_figures(full[len(full) // 2 :])
        figures = {**steady, "active_pct": self._active_pct, **self._distinct_experts(most)}
        if self._drafts_before is not None and (now := self._drafts()) is not None:
            drafted, accepted = (late - early for late, early in zip(now, self._drafts_before, strict=True))
            figures |= {"drafted": drafted, "accepted": accepted}
        return figures

    def full_steps(self) -> list[StepTiming]:
        """The decode steps of the last run with all rows, as far as the meter kept them."""
        count = min(self.engine.meter.steps - self._steps_before, _KEPT_STEPS)
        recent = [step for step in self.engine.meter.recent_steps()[-count:] if step.kind == "decode"]
        most = max((step.rows for step in recent), default=0)
        return [step for step in recent if step.rows == most]

    def _distinct_experts(self, rows: int) -> Row:
        graphs = self.engine.executor.graphs
        chosen = graphs.chosen.get(graphs.sizes.size_for(rows), []) if rows else []
        if not chosen:
            return {}
        torch.cuda.synchronize()
        counts = [experts_TK[:rows].unique().numel() for experts_TK in chosen]
        return {"distinct_experts": statistics.mean(counts)}

    def close(self) -> None:
        """Check that nothing leaked and end the streams."""
        self.engine.check_integrity()
        self.engine.executor.close()


def load_random(
    shape: str,
    device: torch.device,
    weights: AskedFormat = "plain",
    layers: int = 0,
    fallback: bool = False,
    draft: Draft | None = None,
) -> LoadedModel:
    """A shape's model, or its first `layers` layers, with random weights.

    `draft` is the layout of its draft model, random as well: an EAGLE-3 head, or a layer for multi-token prediction.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_checkpoint(shape, Path(folder), layers, mtp=draft == "mtp"))
        impl: Literal["auto", "transformers"] = "transformers" if fallback else "auto"
        settings = ModelSettings(path=path, load_format="random", model_impl=impl)
        with stage(f"filling the shapes of {shape}") as advance:
            drafts = write_draft_checkpoint(shape, Path(folder) / "draft", layers) if draft == "head" else None
            how: MTP = "needed" if draft == "mtp" else "unused"
            return load_model(settings, device, advance, weights=weights, draft=drafts, mtp=how)


def keep_shared_apart() -> None:
    """From now on, store no shared expert with the others; shows the gain of that."""
    MoESpec.shared_like_others = 0  # type: ignore[assignment,method-assign]


def engine_settings(
    job: Job, depth: int, routing: bool = False, adapters: int = 0, changes: Mapping[str, Any] | None = None
) -> EngineSettings:
    """Our settings for a job: its rows and context, otherwise defaults.

    Raises `SettingsError` for wrong `changes`.
    """
    assert depth in (1, 2)
    settings: dict[str, Any] = {
        "max_rows": job.most_rows,
        "max_context_tokens": job.most_context,
        "kv_memory_fraction": KV_SHARE,
        "kv_memory_max_gib": None if torch.cuda.is_available() else 0.25,
        "pipeline_depth": depth,
        "routing": routing,
        "adapter_slots": adapters,
        "adapter_rank": ADAPTER_RANK,
    }
    if "contexts" in job.experiments:  # a snapshot for each prompt, or linear attention computes it again
        settings["state_snapshots"] = max(job.context_rows or job.rows) * len(job.contexts) + 1
    flags = {f"engine.{name}": value for name, value in {**settings, **(changes or {})}.items()}
    return load_settings(None, {}, flags).engine


def speculation_changes(speculation: str, rows: int, drafts: int, draft_rows: int = 0) -> dict[str, str]:
    """Settings of an engine whose steps with drafts are captured. `draft_rows` 0: every row may have all its drafts."""
    draft_rows = draft_rows or rows * drafts
    return {
        "speculation": speculation,
        "speculation_tokens": str(drafts),
        "speculation_rows": str(draft_rows),
        "cuda_graph_rows": str(rows + draft_rows),
    }


def steady_figures(steps: list[StepTiming]) -> Row:
    """Medians over consecutive decode steps, milliseconds; empty for fewer than three."""
    if len(steps) < 3:
        return {}
    commits = [step.committed_at_s or 0.0 for step in steps]
    idle = [max(0.0, b.start_s - a.end_s) for a, b in zip(steps, steps[1:], strict=False)]
    return {
        "steady_ms": (commits[-1] - commits[0]) / (len(commits) - 1) * 1e3,
        "device_ms": statistics.median(step.end_s - step.start_s for step in steps) * 1e3,
        "idle_ms": statistics.median(idle) * 1e3,
        "host_ms": statistics.median(step.plan_s + step.launch_s + step.commit_s for step in steps) * 1e3,
    }
