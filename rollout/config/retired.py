"""Names that were settings in earlier versions, with the rule that holds now. The error for such a name quotes it.

`section.name` -> a clause that says what holds now. `tests/unit/test_settings.py` compares the numbers with the code.
"""

from collections.abc import Mapping
from types import MappingProxyType

RETIRED: Mapping[str, str] = MappingProxyType(
    {
        "engine.compile_threads": "16 threads compile the kernels at the start on a GPU, at most one a core",
        "engine.cuda_graphs": "cuda_graph_rows = 0 launches all steps kernel by kernel, without CUDA graphs",
        "engine.expert_dtype": "engine.weight_dtype is the format of experts and of other weights",
        "engine.fair_queue": "clients of one priority share tokens equally; requests of one client go by arrival",
        "engine.fused_experts": "the kernels run experts wherever they can",
        "engine.host_kv_piece_mib": "a copy of KV between host and device moves at most 32 MiB",
        "engine.image_patches": "an image or video has at most 16384 patches",
        "engine.image_tokens": "the buffer for embeddings of images holds 16384 tokens",
        "engine.mask_threads": "half the cores compute masks of constrained rows",
        "engine.max_faults": "the engine is rebuilt after at most 3 faults in an hour",
        "engine.rank_start_stall_s": "a start hangs after 15 times rank_stall_s without progress, 120 s by default",
        "engine.session_share": "idle sessions hold at most 0.5 of the KV pages",
        "engine.sleep_kv_s": "KV must reach the host within 60 seconds before a sleep",
        "engine.sleep_requests": "new requests wait during a sleep, unless 'sleep' has requests = refuse",
        "engine.sleep_rows": "running completions wait during a sleep, unless 'sleep' has mode = abort",
        "engine.speculation_kept_tokens": "1000000 tokens of ended completions are kept to draft from",
        "engine.stall_s": "status says stalled after a fifth of stall_exit_s without a tick, 120 seconds by default",
        "engine.stop_check_every": "stop strings are searched every 4 tokens",
        "metrics.timeline": "'rollout trace ENDPOINT --png FILE' draws the last steps of a running worker",
        "metrics.timeline_steps": "'rollout trace ENDPOINT --steps N' has the last N steps, 200 by default",
        "metrics.wandb_dir": "W&B's variable WANDB_DIR names the folder of its files, runs by default",
        "metrics.wandb_group": "W&B's variable WANDB_RUN_GROUP names the group",
        "metrics.wandb_name": "W&B's variable WANDB_NAME names the run",
        "model.cpu_threads": "a tensor operation on a CPU has the threads that OMP_NUM_THREADS says, or one",
        "model.random_seed": "load_format = random has the seed 0",
        "service.heartbeat_s": "the worker sends ZMTP heartbeats every 10 seconds",
        "service.max_blobs": "a message has at most 256 blobs",
        "service.max_clients": "1024 clients may have requests in flight",
        "service.max_constraint_s": "a constraint must compile within 20 seconds",
        "service.max_header_bytes": "a message header has at most 16777216 bytes",
        "service.max_media": "a request has at most 1024 images and videos",
        "service.max_media_patches": "the images and videos of a request have at most 262144 patches",
        "service.max_n": "a request has at most 1024 completions",
        "service.max_pending_bytes": "messages of requests in flight take at most 1073741824 bytes",
        "service.max_prompt_chars": "a prompt has at most 8388608 characters",
        "service.max_prompt_s": "chat template and tokenizer have 60 seconds for a prompt",
        "service.max_prompt_tokens": "a prompt has at most 1048576 tokens; lower max_context_tokens bounds it too",
        "service.max_reply_bytes": "top log-probs and routing of a reply take at most 1073741824 bytes",
        "service.max_results": "at most 4096 results are kept, of 536870912 bytes in all",
        "service.max_results_age_s": "a result is kept for at most 3600 seconds",
        "service.max_results_bytes": "the kept results take at most 536870912 bytes",
        "service.max_session_lease_s": "a request may ask for a session lease of at most 3600 seconds",
        "service.session_lease_s": "a session keeps its KV for 300 seconds unless its request has a session_lease_s",
    }
)
