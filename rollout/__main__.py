"""`python -m rollout` is the `rollout` command."""

from rollout.cli.main import run

if __name__ == "__main__":
    run()
