"""Two steps of verl's PPO trainer on a CPU: `python -m tests.support.integrations.verl_ppo FOLDER [OVERRIDE...]`.

The trainer is verl's own with all its Ray actors; GRPO, FSDP2 with gloo, float32. FOLDER gets a tiny model and data.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "tests.support.integrations.verl_on_cpu",
}

import pandas
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.main_ppo_v0 import TaskRunner
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from tests.support.integrations.integration_worker import worker_environment
from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint
from tests.support.integrations.verl_parts import TEMPLATE, compose_config

REWARD = "def compute_score(data_source, solution_str, ground_truth, **more):\n    return len(solution_str) % 7 / 7\n"


def overrides(folder: Path) -> list[str]:
    """Settings of a run that takes seconds once its actors have started."""
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"add {n}"}],
            "ability": "add",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        *(f"data.{name}_files={folder}/rows.parquet" for name in ("train", "val")),
        "data.train_batch_size=4",
        "data.dataloader_num_workers=0",
        f"{rollout}.prompt_length=64",
        f"{rollout}.response_length=24",
        f"{rollout}.n=2",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"++{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{actor}.use_torch_compile=False",
        f"{actor}.optim.lr=1e-2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}/out",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def main() -> None:
    """Run it; the metrics of each step go to stdout."""
    folder = Path(sys.argv[1]).absolute()
    if not (folder / "model").exists():
        make_chat_checkpoint(folder / "model", 3, TEMPLATE.read_text())
    os.environ |= {name: value for name, value in worker_environment().items() if value is not None}
    config = compose_config(folder / "model", *overrides(folder), *sys.argv[2:])
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, task_runner_class=TaskRunnerV1 if config.trainer.use_v1 else TaskRunner)


if __name__ == "__main__":
    main()
