"""What a rank says that NCCL cannot connect with the others."""

import math

from rollout.ranks.processes import connect_error
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory

#: As NCCL 2.27 says it.
NCCL = RuntimeError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error.\nLast error:\nError while creating shared memory segment "
    "/dev/shm/nccl-qHgBDV (size 33030528), error: No space left on device (28)"
)


def test_too_little_shared_memory_is_named_where_a_follower_s_text_is_not_cut() -> None:
    error = connect_error(NCCL, 12 << 20)
    reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
    reports.set_text(0, "end", f"{type(error).__name__}: {error}")
    assert "/dev/shm has 12 MiB free" in reports.text(0, "end") and "--shm-size" in reports.text(0, "end")
    assert str(NCCL) in str(error)


def test_enough_of_it_is_not_blamed() -> None:
    for free_bytes in (2 << 30, math.inf):
        assert "--shm-size" not in str(connect_error(NCCL, free_bytes))
