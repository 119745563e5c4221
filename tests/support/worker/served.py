"""A worker that gets new weights, and the book of what each version counts in."""

from tests.support.worker.harness import check, tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion
from trainer_bridge.publish.publisher import WeightPublisher, WorkerReport


class Served:
    """A worker, a client, a publisher, and the book of what each version counts in."""

    def __init__(self, worker: WorkerProcess, steps: dict[int, int]) -> None:
        self.endpoint = worker.endpoint
        self.client = RolloutClient(worker.endpoint, timeout_s=60.0)
        self.publisher = WeightPublisher(worker.endpoint, bucket_bytes=1 << 16)
        self.steps = steps

    @property
    def version(self) -> int:
        return self.client.status()["weights_version"]

    def publish(self, step: int, publisher: WeightPublisher | None = None) -> WorkerReport:
        version = max(self.steps) + 1
        handle = (publisher or self.publisher).publish(tensors(step), version)
        (report,) = handle.applied(60)
        self.steps[version] = step
        assert self.version == report.version == version
        return report

    def check(self, prompt: str, completions: list[Completion]) -> None:
        for completion in completions:
            check(prompt, completion, self.steps)

    def counts_in(self) -> int:
        """What a new completion counts in."""
        (completion,) = self.client.generate("17:", max_tokens=12).completions
        self.check("17:", [completion])
        return self.steps[completion.versions[-1][0]]

    def close(self) -> None:
        self.publisher.close()
        self.client.close()
