"""Log lines of a worker, its supervisor and its prompt process: one fact a line, as text or as JSON.

    text    2026-11-21T12:46:01.123Z WARNING box:711 rollout.service.delivery.waiters: the stream is dropped: ... [request=a7 client=client:trainer]
    json    {"time": "2026-11-21T12:46:01.123Z", "level": "warning", "logger": "rollout.service.delivery.waiters",
             "worker": "box:711", "message": "the stream is dropped: ...", "request": "a7", "client": "client:trainer"}

What a line is about travels as data: `log.warning("the stream is dropped", extra={"request": ..., "client": ...})`.
A field whose value is a list of maps is a table in text, an array of objects in JSON.

Invariants:

- In text, a line that begins with two spaces belongs to the one before it; nothing that a client chose can begin a line.
- In JSON, every line that Python writes to stderr is one object, also what libraries print, warnings, and what ends the
  process. Only native code can write other lines (an abort in a driver, say).
"""  # noqa: E501

from __future__ import annotations

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

_OURS = ("rollout", "trainer_bridge")
#: What every record has; anything else was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:,;/_+-#@%")


def worker_name() -> str:
    """What this process is called in log lines and in `status`: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def set_up(level: str, form: LogFormat, worker: str) -> None:
    """Have this process log to stderr; a second call replaces the first.

    `level` holds for the project's own packages, libraries log from `warning` on. With `json`, `sys.stderr` is replaced
    by a stream that makes log lines of what is written to it.
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


def complain(text: str) -> None:
    """The one line with which a command ends that failed: as it is on stderr, or in the form of the log."""
    if isinstance(sys.stderr, LineStream):
        logging.getLogger("rollout").critical("%s", text)
    else:
        print(text, file=sys.stderr)


def about(client: str, request: str) -> dict[str, Any]:
    """The fields of a line that concerns a request: its id, and whose it is, as `owner` in `status`."""
    return {"request": request, "client": client}


class TextFormatter(logging.Formatter):
    """A line for people; fields stand in brackets behind the message, tables and tracebacks are indented below."""

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
    """A line for programs: one JSON object, ASCII only. `trace` has the traceback, where there is one."""

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
    """Writes to what `sys.stderr` is at the time: a bar that is drawn there has lines stand above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where lines go."""
        return sys.stderr.behind if isinstance(sys.stderr, LineStream) else sys.stderr


class LineStream(io.TextIOBase):
    """Takes the place of `sys.stderr`: every line that is written becomes a log line, also one of a progress bar.

    What is logged while a line is being logged (the handler's own complaint, say) is dropped: it would never end.
    """

    def __init__(self, behind: TextIO, logger: logging.Logger) -> None:
        self.behind = behind
        self._logger = logger
        self._local = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream behind."""
        return self.behind.encoding

    def fileno(self) -> int:
        """That of the stream behind, for child processes."""
        return self.behind.fileno()

    def isatty(self) -> bool:
        """False: nobody draws on it."""
        return False

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that `text` ends; the rest waits for its end."""
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
        """Flush the stream behind."""
        self.behind.flush()


# --- what a record holds ---------------------------------------------------------------------------------------------


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _moment(record: logging.LogRecord) -> str:
    seconds, fraction = divmod(record.created, 1)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(fraction * 1000):03d}Z"


def _trace(record: logging.LogRecord) -> str:
    parts = [logging.Formatter().formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])


def _jsonable(value: Any) -> Any:
    """The same in JSON's types; what has none there is text, so that a line is never lost to what it holds."""
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
    """A value without spaces, or in quotes."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(_jsonable(value))
    return text if text and (not isinstance(value, str) or _PLAIN.issuperset(text)) else json.dumps(text)


def _printable(line: str) -> str:
    """A line that moves no cursor and ends nowhere but at its end."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of the same keys as aligned columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_word(row[name]) if row.get(name) is not None else "-" for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


# --- libraries, and what nobody caught -------------------------------------------------------------------------------


def _adopt_libraries() -> None:
    """Libraries that print their own log lines (transformers, huggingface_hub) have them printed as ours are."""
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
        logging.getLogger("rollout").critical("an error that nobody expected", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread is not None else "?"
    logging.getLogger("rollout").critical(
        "a thread ended with an error that nobody expected",
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        extra={"of_thread": name},
    )
