"""The limit of open files of this process. Each connection of a client takes one.

Where no more can be opened, libzmq ends its process, and other libraries fail with a bare error number. So a worker
raises its limit to the most allowed, and does not start if the limit stays too low.
"""

import contextlib
import resource

#: Open files that a worker asks for; the usual limit is 1024.
WANTED = 65_536
_LEAST, _LEAST_A_RANK = 128, 64  # libraries, sockets, devices, a few clients; connections of a rank


class TooFewFilesError(OSError):
    """The limit of open files is too low; the message says how to raise it."""


def raise_limit(ranks: int = 1, what: str = "a worker") -> int:
    """Raise the limit of this process and its children; returns the limit. `ranks` as in `tensor_parallel`.

    `what`: this process, for the message of the error.

    Raises `TooFewFilesError` if it stays too low.
    """
    soft, hard = _limits()
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = _limits()
    least = _LEAST + _LEAST_A_RANK * ranks
    if soft != resource.RLIM_INFINITY and soft < least:
        group = f" of {ranks} ranks" if ranks > 1 else ""
        raise TooFewFilesError(
            f"this process may open {soft} files, and {what}{group} needs {least} plus one for each client: raise "
            f"the hard limit: `ulimit -n {WANTED}`, `docker run --ulimit nofile={WANTED}` or systemd's LimitNOFILE="
        )
    return soft


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
