"""`python -m rollout` is the `rollout` command."""

import sys

from rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
