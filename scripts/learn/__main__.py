"""Asynchronous GRPO with this engine, in plain PyTorch: a real model learns a task with a verifier.

    python -m scripts.learn --task counting --steps 20 --lr 1.5e-3          a tiny model, in seconds on a CPU
    python -m scripts.learn --model models/SmolLM2-135M-Instruct            sums, on one GPU

The command starts its own worker beside the trainer. It prints a line for each step and writes run.json, steps.jsonl
and the worker's log and metrics to --out; with --save-every checkpoints, too, from which --resume goes on.
"""

import argparse
from functools import partial
from pathlib import Path

from scripts.learn.recipe import add_flags, read_recipe
from scripts.learn.run import run
from scripts.learn.together import add_start_flags, read_start


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="folder for what is written (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add_start_flags(parser)
    arguments = parser.parse_args()
    tell = partial(print, flush=True)
    try:
        run(read_recipe(arguments), arguments.out, tell, arguments.resume, read_start(arguments))
    except KeyboardInterrupt:
        raise SystemExit(f"ended by Ctrl-C; {arguments.out} has its steps, and --resume needs --save-every") from None


if __name__ == "__main__":
    main()
