"""Which process of pytest-xdist gets which tests: whole files, and those that start workers first."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: Folders whose files take long, as they start workers. One that came last would keep a core while others have ended.
SLOW = ("tests/worker/", "tests/gateway/", "tests/robustness/", "tests/integrations/", "tests/unit/parallel/")
#: A folder whose files share a worker of their own: one process gets them all, and starts one.
TOGETHER = "tests/gateway/test_"


class SlowFilesFirst(LoadFileScheduling):
    """Files in the order of collection, except that those of `SLOW` come first."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = min(self.workqueue, key=lambda scope: (scope != TOGETHER, not scope.startswith(SLOW)))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
