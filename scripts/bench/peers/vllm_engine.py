"""The engine of vLLM, in any importable version: offline, in this process, with random weights.

It uses the fast settings: CUDA graphs for full decode batches, asynchronous scheduling and prefix caching. It returns
the log-probs of tokens. Detokenization and output before the end of a completion are off.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench.peers.arrivals import ArrivalLog
from scripts.bench.peers.experiments import Finished, Row, Served
from scripts.bench.peers.job import Job
from scripts.bench.peers.repeating import is_output, quiet, sharpen
from scripts.bench.peers.workloads import Work
from scripts.bench.shapes import model_config, write_checkpoint

if TYPE_CHECKING:
    import torch

_MEMORY_SHARE = 0.92
_STD = 0.02
_DRAFT_METRICS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
_LEAST_CONTEXT = 4096  # a usual setting; a shorter one is not faster

#: Language models that vLLM serves as a part of a model of text and images: its architecture and its model type.
_INSIDE = {
    "qwen3.5-27b": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
}

#: Needed without a network, and with the engine in this process. Variables that are already set are kept.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `apply_model` takes a function
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}


class VllmEngine:
    """vLLM's `LLM`, stepped by hand so that the end of each completion is seen.

    As `vllm-ngram` and `vllm-ngram-gpu` it speculates by n-grams of 1 to 3 tokens; the first of them works without
    asynchronous scheduling only. It then counts its drafts, which needs its statistics.
    """

    keeps_prefixes = True
    sees_tokens = True
    can_repeat = True

    def __init__(self, job: Job) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        began_s = time.perf_counter()
        self._experts = count_experts() if job.count_experts else []
        max_context = max(job.most_context, _LEAST_CONTEXT)
        speculation = speculative_config(job)
        self._speculates, self._drafts_before, self._quiet = speculation is not None, (0, 0), False
        self._folder = tempfile.TemporaryDirectory()
        self._llm = vllm.LLM(
            model=str(write_config(job, Path(self._folder.name))),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max_context,
            max_num_seqs=job.most_rows,
            gpu_memory_utilization=_MEMORY_SHARE,
            tensor_parallel_size=job.gpus,
            async_scheduling=job.engine != "vllm-ngram",
            enable_prefix_caching=True,
            disable_log_stats=not self._speculates,
            speculative_config=speculation,
            generation_config="vllm",
            seed=0,
            attention_backend=os.environ.get("BENCH_VLLM_ATTENTION", "FLASH_ATTN"),
            compilation_config={
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": capture_sizes(job.most_rows, 0 if speculation is None else job.drafts),
            },
            **({"language_model_only": True} if job.shape in _INSIDE else {}),
            additional_config={"gdn_prefill_backend": "triton"},  # the other one needs flashinfer
        )
        self._llm.apply_model(fill_like_a_model)
        self._numbers = itertools.count()
        self._sampling = partial(
            vllm.SamplingParams,
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        shape = model_config(job.shape)
        self.vocab, self.hidden = shape["vocab_size"], shape["hidden_size"]
        self._layers = job.layers or shape["num_hidden_layers"]
        config = self._llm.llm_engine.vllm_config
        self.capacity_tokens = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
        self._facts = {
            "version": vllm.__version__,
            "start_s": time.perf_counter() - began_s,
            "kv_tokens": self.capacity_tokens,
            "max_context": max_context,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def generate(self, work: Work) -> Finished:
        """Make all completions of `work`, to their full lengths, all asked for at once."""
        engine, tokens = self._llm.llm_engine, 0
        ends: list[float] = []
        self._rows = len(work.prompts) * work.n
        self._drafts_before = self._drafts()
        began_s = time.perf_counter()
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            sampling = self._sampling(max_tokens=length, n=work.n)
            engine.add_request(str(next(self._numbers)), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    for completion in output.outputs:
                        ends.append(time.perf_counter() - began_s)
                        tokens += len(completion.token_ids)
                        assert len(completion.logprobs or ()) == len(completion.token_ids)
        assert tokens == work.tokens, f"{tokens} tokens instead of {work.tokens}"
        return Finished(ends)

    def serve(self, work: Work, arrivals_s: list[float]) -> Served:
        """Make all completions of `work`, each asked for at its time."""
        from vllm.sampling_params import RequestOutputKind

        engine, numbers, log = self._llm.llm_engine, {}, ArrivalLog(arrivals_s)
        while not log.complete:
            for i in log.due():
                numbers[name := str(next(self._numbers))] = i
                sampling = self._sampling(max_tokens=work.lengths[i], output_kind=RequestOutputKind.DELTA)
                engine.add_request(name, {"prompt_token_ids": work.prompts[i]}, sampling)
            if not engine.has_unfinished_requests():
                log.wait()
                continue
            for output in engine.step():
                log.tokens(numbers[output.request_id], len(output.outputs[0].token_ids), output.finished)
        return log.served()

    def facts(self) -> Row:
        """Version, settings, and seconds until it was ready."""
        return self._facts

    def last_steps(self) -> Row:
        """The drafts of the last run if it speculates, and the mean number of distinct experts per layer in the last
        step if the job counts them.
        """
        figures: Row = {}
        if self._speculates:
            drafted, accepted = (now - before for now, before in zip(self._drafts(), self._drafts_before, strict=True))
            figures |= {"drafted": drafted, "accepted": accepted}
        if self._experts:
            counts = [kept.experts_TK[: self._rows].unique().numel() for kept in self._experts]  # type: ignore[index]
            figures |= {"distinct_experts": statistics.mean(counts)}
        return figures

    def _drafts(self) -> tuple[int, int]:
        """The tokens that were drafted and accepted so far."""
        if not self._speculates:
            return 0, 0
        told = {metric.name: metric.value for metric in self._llm.get_metrics() if metric.name in _DRAFT_METRICS}
        return tuple(told.get(name, 0) for name in _DRAFT_METRICS)  # type: ignore[return-value]

    def repeat(self, chance: float) -> None:
        """Get the weights whose text repeats."""
        layers = 0 if self._quiet else self._layers
        self._llm.apply_model(partial(repeat_like_a_text, vocab=self.vocab, chance=chance, quiet_layers=layers))
        self._quiet = True

    def close(self) -> None:
        """Leave the rest to the end of the process, which is quicker."""
        self._folder.cleanup()


def write_config(job: Job, folder: Path) -> Path:
    """The checkpoint of a job; language models that vLLM serves inside of others are put there."""
    path, outer = write_checkpoint(job.shape, folder, job.layers), _INSIDE.get(job.shape)
    if outer is not None:
        architecture, model_type = outer
        inner = model_config(job.shape, job.layers)
        config = {"architectures": [architecture], "model_type": model_type, "text_config": inner}
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False, "vision_config": {}}))
    return path


class _KeptExperts:
    """The experts of a layer in the newest step; a captured step writes them, too."""

    def __init__(self) -> None:
        self.experts_TK: torch.Tensor | None = None

    def keep(self, experts_TK: torch.Tensor) -> None:
        """Copy the experts into a buffer that the first call, which is the largest step, makes."""
        if self.experts_TK is None:
            self.experts_TK = experts_TK.clone()
        self.experts_TK[: len(experts_TK)].copy_(experts_TK)


def count_experts() -> list[_KeptExperts]:
    """From now on every router that vLLM makes keeps its experts; the list grows with the routers."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    kept: list[_KeptExperts] = []
    usual = BaseRouter.__init__

    def make(router: Any, *args: Any, **kwargs: Any) -> None:
        usual(router, *args, **kwargs)
        kept.append(_KeptExperts())
        router.set_capture_fn(kept[-1].keep)

    BaseRouter.__init__ = make
    return kept


def speculative_config(job: Job) -> dict[str, Any] | None:
    """How vLLM speculates; None: it does not."""
    methods = {"vllm-ngram": "ngram", "vllm-ngram-gpu": "ngram_gpu"}
    if job.engine not in methods:
        return None
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {"method": methods[job.engine], "num_speculative_tokens": job.drafts, **lookup}


def capture_sizes(most_rows: int, drafts: int = 0) -> list[int]:
    """Tokens of steps to capture: all measured numbers of rows, and some between them to limit padding.

    Every row has `drafts` more tokens: vLLM captures only multiples of that many and one.
    """
    rows = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, *range(72, most_rows + 1, 8), most_rows}
    return sorted(size * (drafts + 1) for size in rows if size <= most_rows)


def repeat_like_a_text(model: Any, vocab: int, chance: float, quiet_layers: int) -> int:
    """Give a filled model the weights of `peers.repeating`. Returns the number of its layers' outputs.

    `quiet_layers` is its number of layers at the first call, then 0. Raises ValueError if parameters are missing.
    """
    import torch

    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    outputs = [data for name, data in parameters.items() if is_output(name)]
    names = ("embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    ends = [next((data for name, data in parameters.items() if name.endswith(end)), None) for end in names]
    embed, lm_head, norm = ends
    if embed is None or lm_head is None or norm is None:
        raise ValueError(f"the model has not all of {', '.join(names)}: {list(parameters)[:9]}")
    with torch.inference_mode():
        if quiet_layers:
            quiet(outputs, quiet_layers, embed, norm)
        sharpen(lm_head, vocab, chance)
    return len(outputs)


def fill_like_a_model(model: Any) -> int:
    """Replace vLLM's dummy weights, which are almost zero and equal in all layers, by those of a new model.

    This makes activations, routing and power draw realistic. Returns the number of filled parameters.
    """
    import torch

    filled = 0
    with torch.inference_mode():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if not parameter.is_floating_point():
                continue
            if parameter.dim() == 1:
                parameter.data.fill_(1.0 if "norm" in name else 0.0)
            else:
                generator = torch.Generator(device=parameter.device).manual_seed(seed)
                parameter.data.normal_(0.0, _STD, generator=generator)
            filled += parameter.numel()
    return filled
