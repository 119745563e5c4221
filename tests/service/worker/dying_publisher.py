"""A publisher that stops half-way: `python dying_publisher.py ENDPOINT FOLDER VERSION`.

Says `half` on stdout once the buckets so far are with the worker, and then does nothing more until it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload


class HalfPayload(Payload):
    """Packs the first half of the buckets only."""

    def pack_bucket(self, index: int, out: torch.Tensor) -> int:
        if index == self.manifest.bucket_count // 2:
            print("half", flush=True)
            time.sleep(3600)
        return super().pack_bucket(index, out)


def main(endpoint: str, folder: str, version: str) -> None:
    import trainer_bridge.publish.publisher

    trainer_bridge.publish.publisher.Payload = HalfPayload  # type: ignore[misc]
    publisher = WeightPublisher(endpoint, transport="zmq", bucket_bytes=4096)
    publisher.publish(load_file(Path(folder) / "model.safetensors"), int(version)).applied()


if __name__ == "__main__":
    main(*sys.argv[1:])
