"""Which process of pytest-xdist gets which tests: whole files, those that start workers first.

A file that takes long and begins last keeps one core while the others are idle. Files that share a worker or ranks go
to one process, which starts them once.
"""

import re

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: Files that take long, as they start workers.
SLOW = re.compile("tests/(worker|gateway|robustness|integrations)/")
#: Groups of files that share processes. A file that is missing here is as right, and starts its own again.
TOGETHER = {
    "the worker of the gateway": re.compile("tests/gateway/test_"),
    "the server of faults": re.compile(
        "tests/bridge/(publish/test_(fsdp|lent_parts|ranks|tensor_parallel)|receiver/test_tensor_group|"
        "transports/test_faults)[.]py"
    ),
    "the ranks of a group": re.compile("tests/unit/parallel/"),
    "the first and the second worker": re.compile(
        "tests/(robustness/test_hostile_(manifests|messages_at_a_worker)|"
        "worker/test_(clients|command_line|control|eos|errors|fleet|raw_protocol|raw_weights|report|sampling|sessions|"
        "shared_memory|soak_short|views|weights))[.]py"
    ),
}


class SlowFilesFirst(LoadFileScheduling):
    """Files in the order of collection, except that groups and slow files come first."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name, files in TOGETHER.items() if files.match(nodeid)), super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = min(self.workqueue, key=lambda scope: (scope not in TOGETHER, SLOW.match(scope) is None))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
