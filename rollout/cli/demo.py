"""`rollout demo`: runs a worker and a trainer on the CPU and checks every token."""

import argparse

DESCRIPTION = "Count to thousands with a tiny model, change its weights on the way, and check every token."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--out", default="runs/demo", help="folder for the log, metrics, report and picture")
    parser.add_argument("--prompts", nargs="+", default=["17:", "980:", "2024:"], help="prompts to count from")
    parser.add_argument("--n", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=16_400, help="tokens of each completion")
    parser.add_argument(
        "--pipeline-depth", type=int, choices=(1, 2), default=2, help="steps in flight; 1 waits for each step"
    )
    parser.add_argument("--wandb", action=argparse.BooleanOptionalAction, default=True, help="log to W&B")
    parser.add_argument("--worker", nargs="+", metavar="WORD", help="command that runs the worker")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every token of every completion is right."""
    from rollout.process.interpreter import loading_libraries
    from rollout.process.progress import stage

    with stage("loading libraries", quiet=True), loading_libraries():
        from rollout.demo.run import run_demo
    return run_demo(args)
