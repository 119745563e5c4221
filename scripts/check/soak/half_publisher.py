"""A publisher that stops half-way: `python -m scripts.check.soak.half_publisher ENDPOINT FOLDER VERSION`.

It prints `half` once half of the buckets are sent, and then waits to be killed.
"""

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload

_BUCKET_BYTES = 1 << 14


class _HalfPayload(Payload):
    """Packs only the first half of the buckets."""

    def pack_bucket(self, index: int, out: torch.Tensor) -> int:
        if index == self.manifest.bucket_count // 2:
            print("half", flush=True)
            time.sleep(3600)
        return super().pack_bucket(index, out)


class _HalfPublisher(WeightPublisher):
    payload_type = _HalfPayload


def main(endpoint: str, folder: str, version: str) -> None:
    """Publish, and never finish."""
    publisher = _HalfPublisher(endpoint, transport="zmq", bucket_bytes=_BUCKET_BYTES)
    publisher.publish(load_file(Path(folder) / "model.safetensors"), int(version)).applied()


if __name__ == "__main__":
    main(*sys.argv[1:])
