"""`python -m rollout` is the `rollout` command."""

from rollout.cli import run

if __name__ == "__main__":
    run()
