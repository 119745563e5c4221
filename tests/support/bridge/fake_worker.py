"""A few lines of Python with the command line of a worker, for tests of what starts and ends workers."""

#: Says so in its log and reports ready, then answers `shutdown` (or, with --deaf, nothing).
FAKE_WORKER = """
import json, os, sys, msgpack, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("tcp://127.0.0.1:*")
endpoint = socket.last_endpoint.decode()
told = {"endpoint": endpoint, "weights_endpoint": endpoint, "model": sys.argv[1], "pid": os.getpid()}
path = sys.argv[sys.argv.index("--ready-file") + 1]
open(path + ".part", "w").write(json.dumps(told))
print("ready", sys.argv[1:], os.environ.get("RANK"), os.environ.get("EXTRA"), flush=True)
os.replace(path + ".part", path)
while True:
    *address, header = socket.recv_multipart()
    header = msgpack.unpackb(header)
    if "--deaf" in sys.argv:
        continue
    socket.send_multipart([*address, msgpack.packb({"v": 1, "id": header["id"], "op": "ok"})])
    sys.exit({"drain": 3, "now": 4}[header["mode"]])
"""
