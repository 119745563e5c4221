"""Log lines of a worker, its supervisor and its prompt process: one fact a line, as text or as JSON.

    text    2026-11-21T12:46:01.123Z WARNING box:711 rollout.service.delivery.waiters: the stream is dropped: ... [request=a7 client=client:trainer]
    json    {"time": "2026-11-21T12:46:01.123Z", "level": "warning", "logger": "rollout.service.delivery.waiters",
             "worker": "box:711", "message": "the stream is dropped: ...", "request": "a7", "client": "client:trainer"}

The subject of a line is data: `log.warning("the stream is dropped", extra={"request": ..., "client": ...})`. A field
whose value is a list of maps is printed as a table in text, and as an array of objects in JSON.

Invariants:

- In text, a line that begins with two spaces belongs to the line before it. Text from a client cannot begin a line.
- In JSON, every line that Python writes to stderr is one object. This includes prints of libraries, warnings, and the
  traceback that ends the process. Only native code (an abort in a driver) can write other lines.
"""  # noqa: E501

import io
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_OURS = ("rollout", "rollout_gateway", "trainer_bridge")
#: Attributes of every record; any other attribute was passed as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:,;/_+-#@%")


def worker_name() -> str:
    """The name of this process in log lines and in `status`: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def set_up(level: str, form: LogFormat, worker: str) -> None:
    """Make this process log to stderr. A second call replaces the first.

    `level` applies to the project's own packages; libraries log warnings and errors. With `json`, `sys.stderr` is
    replaced by a stream that turns each written line into a log line.
    """
    behind = sys.stderr.behind if isinstance(sys.stderr, LineStream) else sys.stderr
    formatter = JsonFormatter(worker) if form == "json" else TextFormatter(worker)
    handler = _StderrHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, TextFormatter | JsonFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())
    _adopt_libraries()
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.stderr = LineStream(behind, logging.getLogger("stderr")) if form == "json" else behind


def report_failure(text: str) -> None:
    """Print the one line that explains why a command failed: on stderr, or in the log's format."""
    if isinstance(sys.stderr, LineStream):
        logging.getLogger("rollout").critical("%s", text)
    else:
        print(text, file=sys.stderr)


def request_fields(client: str, request: str) -> dict[str, Any]:
    """The fields of a line about a request: its id and its client (the `owner` in `status`)."""
    return {"request": request, "client": client}


class TextFormatter(logging.Formatter):
    """A line for people: fields in brackets after the message, tables and tracebacks indented below it."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields = fields_of(record)
        tables = {name: value for name, value in fields.items() if _is_table(value)}
        words = [f"{name}={_word(value)}" for name, value in fields.items() if name not in tables]
        head = f"{_moment(record)} {record.levelname} {self._worker} {record.name}: "
        first, *rest = record.getMessage().splitlines() or [""]
        lines = [head + _printable(first) + (f" [{' '.join(words)}]" if words else ""), *rest]
        for name, rows in tables.items():
            lines += [f"{name}:", *(f"  {line}" for line in _table(rows))]
        lines += _trace(record).splitlines()
        return "\n".join([lines[0], *(f"  {_printable(line)}" for line in lines[1:])])


class JsonFormatter(logging.Formatter):
    """A line for programs: one JSON object, ASCII only. `trace` is the traceback, if any."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if trace := _trace(record):
            line["trace"] = trace
        return json.dumps(_jsonable(line))


class _StderrHandler(logging.StreamHandler):
    """Writes to the present `sys.stderr`, so that lines appear above a progress bar, which replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr.behind if isinstance(sys.stderr, LineStream) else sys.stderr


class LineStream(io.TextIOBase):
    """Replaces `sys.stderr`: every written line becomes a log line, also the lines of a progress bar.

    Lines that are written while a line is being logged (an error of the handler, say) are dropped, because each of
    them would cause another one.
    """

    def __init__(self, behind: TextIO, logger: logging.Logger) -> None:
        self.behind = behind
        self._logger = logger
        self._local = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the inner stream."""
        return self.behind.encoding

    def fileno(self) -> int:
        """The descriptor of the inner stream, for child processes."""
        return self.behind.fileno()

    def isatty(self) -> bool:
        """False: progress bars must not draw on it."""
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Log the lines that `text` completes; an incomplete line is kept for the next call."""
        local = self._local
        if getattr(local, "busy", False):
            return len(text)
        *lines, local.rest = (getattr(local, "rest", "") + text).replace("\r", "\n").split("\n")
        local.busy = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.warning("%s", line.rstrip())
        finally:
            local.busy = False
        return len(text)

    def flush(self) -> None:
        """Flush the inner stream."""
        self.behind.flush()


# --- fields of a record ----------------------------------------------------------------------------------------------


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that were passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _moment(record: logging.LogRecord) -> str:
    seconds, fraction = divmod(record.created, 1)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(fraction * 1000):03d}Z"


def _trace(record: logging.LogRecord) -> str:
    parts = [logging.Formatter().formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])


def _jsonable(value: Any) -> Any:
    """The value in JSON's types. A value of another type becomes text, so that no line is lost."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value)


def _word(value: Any) -> str:
    """A value as one word; in quotes if it has spaces or special characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(_jsonable(value))
    return text if text and (not isinstance(value, str) or _PLAIN.issuperset(text)) else json.dumps(text)


def _printable(line: str) -> str:
    """The line with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_word(row[name]) if row.get(name) is not None else "-" for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


# --- libraries and uncaught errors -----------------------------------------------------------------------------------


def _adopt_libraries() -> None:
    """Print the lines of libraries with handlers of their own (transformers, huggingface_hub) in our format."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        printing = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
        for handler in printing:
            logger.removeHandler(handler)
        if printing:
            logger.propagate = True


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("rollout").critical("an unexpected error ends this process", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread is not None else "?"
    logging.getLogger("rollout").critical(
        "an unexpected error ended a thread",
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        extra={"of_thread": name},
    )
