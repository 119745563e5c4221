"""A client of the wire protocol that needs only ZeroMQ and msgpack: one request, then one stream.

    rollout serve MODEL &
    python scripts/minimal_client.py tcp://127.0.0.1:5757 --prompt "17:"

A message is a header (one msgpack map) and blobs (raw bytes). If a field of the header is {"blob": 2, "dtype": "<i4",
"shape": [100]}, its value is blob 2: 100 little-endian 32-bit integers. This file imports nothing of the project.
"""

import argparse
import array
import sys
from typing import Any

import msgpack
import zmq

TYPE_CODES = {"<i4": "i", "<f4": "f"}  # of the array module


def pack(op: str, request_id: str, **fields: Any) -> bytes:
    """A request as its header; it needs no blobs."""
    return msgpack.packb({"v": 1, "op": op, "id": request_id, **fields})


def unpack(frames: list[bytes]) -> dict[str, Any]:
    """A reply's header, with arrays in place of references to blobs."""
    header, blobs = msgpack.unpackb(frames[0]), frames[1:]

    def restore(value: Any) -> Any:
        if isinstance(value, dict) and "blob" in value:
            numbers = array.array(TYPE_CODES[value["dtype"]], blobs[value["blob"]])
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tolist()
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        if isinstance(value, list):
            return [restore(item) for item in value]
        return value

    reply = restore(header)
    if reply["op"] == "error":
        raise SystemExit(f"{reply['code']}: {reply['message']}")
    return reply


def ask_once(context: zmq.Context, endpoint: str, prompt: str, max_tokens: int) -> None:
    """A REQ socket: one request, one reply. The socket adds an empty frame, and removes it from the reply."""
    with context.socket(zmq.REQ) as socket:
        socket.connect(endpoint)
        socket.send(pack("generate", "once", prompt=prompt, max_tokens=max_tokens, return_text=True))
        reply = unpack(socket.recv_multipart())
    for completion in reply["completions"]:
        print(f"{len(completion['token_ids'])} tokens, finish_reason {completion['finish_reason']}:")
        print(f"  text      {completion['text']!r}")
        print(f"  token_ids {completion['token_ids']}")
        print(f"  logprobs  {[round(value, 4) for value in completion['logprobs']]}")
        print(f"  versions  {completion['versions']}")


def ask_for_a_stream(context: zmq.Context, endpoint: str, prompt: str, max_tokens: int) -> None:
    """A DEALER socket: several replies, here the chunks of one request and its result."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        sampling = {"temperature": 0.0}
        socket.send(
            pack(
                "generate",
                "s",
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=sampling,
                stream="tokens",
                stream_every=8,
            )
        )
        while True:
            reply = unpack(socket.recv_multipart())
            if reply["op"] == "result":
                break
            print(f"completion {reply['index']} from token {reply['offset']}: {reply['token_ids']}")
    print(f"prompt {reply['prompt_tokens']} tokens, {reply['timing']['total_s']:.3f} s in all")


def main() -> None:
    """Send two requests to a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", nargs="?", default="tcp://127.0.0.1:5757")
    parser.add_argument("--prompt", default="17:")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    with zmq.Context() as context:
        ask_once(context, options.endpoint, options.prompt, options.max_tokens)
        ask_for_a_stream(context, options.endpoint, options.prompt, options.max_tokens)


if __name__ == "__main__":
    main()
