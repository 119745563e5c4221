"""The engine of transformers' continuous batching: asynchronous, with CUDA graphs and random weights.

Decoding uses its fast path over a block table, which needs the flash-attn package; without it, `paged_flash` replaces
the package. Prefixes are not shared, as its documentation advises for unique prompts and long completions.
"""

import importlib.util
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.bench.peers.experiments import Finished, Row
from scripts.bench.peers.job import Job
from scripts.bench.peers.paged_flash import PagedDecode, varlen_attention
from scripts.bench.peers.workloads import Work
from scripts.bench.shapes import model_config, step_bytes, write_checkpoint

_PAGE = 256
_MEMORY_SHARE = 0.8
_MOST_BATCH_TOKENS = 8192
_FREE_SHARE = 1.3  # no admission while less than 15% of the blocks are free


class TransformersEngine:
    """A `ContinuousBatchingManager` that is started once and used for all work."""

    keeps_prefixes = False
    sees_tokens = False
    can_repeat = False

    def __init__(self, job: Job) -> None:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        transformers.logging.set_verbosity_error()
        torch.set_grad_enabled(False)
        began_s = time.perf_counter()
        cuda = torch.cuda.is_available() and job.device != "cpu"
        with tempfile.TemporaryDirectory() as folder, torch.device("cuda" if cuda else "cpu"):
            config = AutoConfig.from_pretrained(write_checkpoint(job.shape, Path(folder), job.layers))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
        model.eval().requires_grad_(False)
        attention = choose_attention(model)
        config = model_config(job.shape)
        self.vocab, self.hidden = config["vocab_size"], config["hidden_size"]
        self._manager = start_manager(model, job, cuda)
        settings = self._manager.continuous_batching_config
        self.capacity_tokens = settings.num_blocks * _PAGE
        self._facts = {
            "version": transformers.__version__,
            "attention": attention,
            "experts": getattr(model.config, "_experts_implementation", None),
            "async": settings.use_async_batching,
            "cuda_graphs": settings.use_cuda_graph,
            "decode_fast_path": settings.max_blocks_per_request > 0,
            "kv_tokens": self.capacity_tokens,
            "max_batched_tokens": settings.max_batch_tokens,
            "start_s": time.perf_counter() - began_s,
        }

    def generate(self, work: Work) -> Finished:
        """Make all completions of `work`, to their full lengths, all asked for at once."""
        manager, tokens = self._manager, 0
        ends: list[float] = []
        began_s = time.perf_counter()
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            for _ in range(work.n):
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        while len(ends) < len(work.lengths) * work.n:
            result = manager.get_result(timeout=0.5)
            if result is None and not manager.is_running():
                raise RuntimeError(f"transformers ended: {manager.background_thread_status.fatal_error!r}")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers failed: {result.error}")
                ends.append(time.perf_counter() - began_s)
                tokens += len(result.generated_tokens)
                assert len(result.logprobs) == len(result.generated_tokens)
        assert tokens == work.tokens, f"{tokens} tokens instead of {work.tokens}"
        self._settle()
        return Finished(ends)

    def _settle(self) -> None:
        """Wait for steps that it launched ahead, so that they do not count for the next work."""
        while self._manager.batch_processor.has_pending_requests():
            time.sleep(0.01)
        time.sleep(0.15)

    def facts(self) -> Row:
        """Version, resolved settings, and seconds until it was ready."""
        return self._facts

    def last_steps(self) -> Row:
        """Empty: it keeps no times of steps."""
        return {}

    def close(self) -> None:
        """End its thread."""
        self._manager.stop(block=True, timeout=20, hard_stop=True)


def choose_attention(model: Any) -> str:
    """Set the fastest attention that continuous batching can use here; returns its name."""
    import transformers.modeling_flash_attention_utils as flash_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    paged = "paged|flash_attention_2"  # newer versions use one name for both
    name = paged if paged in ALL_ATTENTION_FUNCTIONS.valid_keys() else "flash_attention_2"
    if importlib.util.find_spec("flash_attn") is not None:
        model.set_attn_implementation(name)
        return "the flash-attn package"
    attend = PagedDecode().append_and_attend

    def functions(*_: Any, **__: Any) -> tuple[Any, ...]:
        return None, varlen_attention, attend, None, None

    # Replaces its imports from the package; there is no public way to pass these functions.
    flash_utils._lazy_imports = functions
    flash_utils._loaded_implementation = None
    model.config._attn_implementation = name
    return "torch's FlashAttention for prompts, this project's paged kernel for decoding"


def start_manager(model: Any, job: Job, cuda: bool) -> Any:
    """A running manager with captured graphs, with blocks for the job's rows as far as memory allows."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    generation = GenerationConfig(
        max_new_tokens=job.most_context - job.longest_prompt,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    page_field = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    settings: dict[str, Any] = {
        page_field: _PAGE,
        "num_blocks": blocks_for(job, cuda),
        "max_batch_tokens": batch_tokens(job),
        "allow_block_sharing": False,
        "use_async_batching": cuda,
        "use_cuda_graph": (False, cuda),  # prompts have many sizes, decode steps few
        "return_logprobs": True,
        "seed": 0,
    }
    if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__:
        settings["auto_switch_to_flash"] = False
    hints = WorkloadHints(
        max_prompt_length=job.longest_prompt,
        max_generated_length=job.most_context - job.longest_prompt,
        num_requests=job.most_rows,
    )
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        workload_hints=hints,
    )
    manager.warmup()
    manager.start()
    return manager


def batch_tokens(job: Job) -> int:
    """Tokens of a step: enough for all prompts of `decode` at once, at most 8,192."""
    wanted = -(-job.most_rows * job.longest_prompt // 64) * 64
    return max(job.most_rows, 256, min(wanted, _MOST_BATCH_TOKENS))


def blocks_for(job: Job, cuda: bool) -> int:
    """Blocks for all rows at full length plus those that its admission keeps free, or as many as fit in memory."""
    wanted = math.ceil(job.most_rows * (-(-job.most_context // _PAGE) + 1) * _FREE_SHARE) + 8
    if not cuda:
        return wanted
    fits = int(
        torch.cuda.mem_get_info()[0] * _MEMORY_SHARE // (step_bytes(job.shape, layers=job.layers).kv_per_token * _PAGE)
    )
    return min(wanted, fits)
