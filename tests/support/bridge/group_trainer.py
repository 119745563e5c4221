"""A trainer with a process group of its own, in a process of its own: it does what a test orders, line by line.

The group is made as SGLang's, slime's and AReaL's trainers make theirs: the store of `rendezvous` under the group's
name, and torch.distributed's own helper. `custom_group` may be replaced by one of their functions (`HELPER`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.support.worker.harness import subprocess_environment


def custom_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str, timeout: Any) -> Any:
    """A group beside the default group, with torch's private helper."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    named = c10d.PrefixStore(group_name, store)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), named, group_name=group_name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def helper() -> Any:
    """`custom_group`, or the function of that job in the source file that HELPER names."""
    if not (source := os.environ.get("HELPER")):
        return custom_group
    import ast

    wanted = "init_custom_process_group"
    tree = ast.parse(Path(source).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == wanted]
    names: dict[str, Any] = {"torch_release": (2, 11), "torch": torch}
    exec(compile(tree, source, "exec"), names)  # noqa: S102 -- a file that the test chose
    return names[wanted]


def main() -> None:
    """Obey."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    groups: dict[str, Any] = {}
    device = os.environ.get("DEVICE", "cpu")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            match order["do"]:
                case "join":
                    groups[order["name"]] = helper()(
                        backend=order["backend"],
                        init_method=f"tcp://127.0.0.1:{order['port']}",
                        world_size=order["size"],
                        rank=0,
                        group_name=order["name"],
                        timeout=timedelta(seconds=order["timeout_s"]),
                    )
                case "broadcast":
                    tensors = load_file(order["file"])
                    sent = [tensors[name].to(device) for name in order["names"]]
                    if order["flat"]:
                        sent = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent])]
                    group = groups[order["name"]]
                    for work in [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in sent]:
                        work.wait()
                    if device != "cpu":
                        torch.cuda.synchronize()
                case "leave":
                    dist.destroy_process_group(groups.pop(order["name"]))
            answer = {"ok": True}
        except Exception as error:
            answer = {"ok": False, "error": repr(error)[:500]}
        print(json.dumps(answer), flush=True)


class Trainer:
    """The test's end of the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self, do: str, **order: Any) -> None:
        """Order without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def done(self) -> dict[str, Any]:
        """The answer to the oldest order."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def join(self, port: int, size: int, name: str, backend: str = "gloo", timeout_s: float = 60.0) -> None:
        """Begin to make a group."""
        self.start("join", port=port, size=size, name=name, backend=backend, timeout_s=timeout_s)

    def broadcast(self, name: str, file: Path, names: Sequence[str], flat: bool = False) -> None:
        """Begin to broadcast tensors of a file, one by one or as one."""
        self.start("broadcast", name=name, file=str(file), names=list(names), flat=flat)


@contextmanager
def trainer(**environment: str) -> Iterator[Trainer]:
    """A trainer's process for the time of the block."""
    command = [sys.executable, "-m", "tests.support.bridge.group_trainer"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=subprocess_environment(**environment),
        cwd=Path(__file__).parents[3],
    ) as process:
        try:
            yield Trainer(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main()
