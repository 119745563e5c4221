"""`rollout top`: shows workers live in a terminal, or once as text or JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rollout.cli.connect import add_connection, connect
from rollout.cli.parser import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.top.poller import Poller
    from rollout.top.screen import Screen, WorkerView

_REDRAW_S = 0.25
_END_S = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch workers in a terminal: rows, queue, KV pages, use of the GPU, speed, swaps of the weights. Press l or a "
        "to sort the rows by length or age, up and down to select one, c to cancel its request, ? for the legend, q to "
        "quit."
    )
    parser.add_argument(
        "endpoints", metavar="ENDPOINT", nargs="+", help="address of a worker, such as tcp://127.0.0.1:5757"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame and exit, with status 1 if a worker does not answer"
    )
    parser.add_argument("--json", action="store_true", help="with --once: print one line of JSON for each worker")
    parser.add_argument("--sort", choices=("length", "age"), default="length", help="order of the rows [length]")
    parser.add_argument("--interval-s", type=float, default=1.0, help="seconds between two polls [1]")
    add_connection(parser, timeout_s=5.0)


def run(args: argparse.Namespace) -> int:
    """Show the workers until the user leaves, or once."""
    if args.json and not args.once:
        raise UsageError("--json needs --once")
    if not args.interval_s > 0:
        raise UsageError("--interval-s must be more than 0 seconds")
    if len(set(args.endpoints)) != len(args.endpoints):
        raise UsageError("an endpoint is given twice; give each once")
    if not args.once and not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal; add --once to print one frame")
    from rollout.top.poller import Poller
    from rollout.top.screen import Screen

    pollers: list[Poller] = []
    try:
        for endpoint in args.endpoints:
            pollers.append(Poller(connect(endpoint, args), args.interval_s))
        if args.once:
            return _once(pollers, Screen(sort=args.sort), args.json)
    except BaseException:
        for poller in pollers:
            poller.close()
        raise
    return _live(pollers, Screen(sort=args.sort))


def _once(pollers: list[Poller], screen: Screen, as_json: bool) -> int:
    from rich.console import Console

    views = [poller.poll() for poller in pollers]
    for poller in pollers:
        poller.close()
    if as_json:
        for view in views:
            print(json.dumps(_fields(view)))
    else:
        _draw_once(Console(highlight=False, markup=False), views, screen)
    return int(any(view.error is not None for view in views))


def _fields(view: WorkerView) -> dict[str, Any]:
    fields: dict[str, Any] = {"endpoint": view.endpoint, "time": time.time()}
    return fields | ({"error": view.error} if view.status is None else {"status": dict(view.status)})


def _draw_once(console: Console, views: list[WorkerView], screen: Screen) -> None:
    from rollout.top.frame import frame

    for line in frame(views, screen, console.width, None, console.options.ascii_only)[:-1]:  # without the line of keys
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def _live(pollers: list[Poller], screen: Screen) -> int:
    from rich.console import Console, Group
    from rich.live import Live

    from rollout.top.frame import frame
    from rollout.top.screen import keyboard

    console = Console()
    places = {poller.view.endpoint: poller for poller in pollers}
    for poller in pollers:
        poller.start()
    try:
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                for poller in pollers:
                    if poller.outcome is not None:
                        screen.message, poller.outcome = poller.outcome, None
                width, height = console.size
                views = [poller.shown() for poller in pollers]
                lines = frame(views, screen, width, height, console.options.ascii_only)
                live.update(Group(*lines), refresh=True)
                for key in keys.wait(_REDRAW_S):
                    action = screen.press(key)
                    if action == "quit":
                        return 0
                    if action is not None:
                        places[action.endpoint].cancel(action)
    finally:
        for poller in pollers:
            poller.stop()
        until_s = time.monotonic() + _END_S  # together: a silent worker must not delay the exit
        for poller in pollers:
            poller.join(max(0.0, until_s - time.monotonic()))
