"""Carries out the commands of the service and the weight receiver, between two steps.

    inbox --> pause, resume, shutdown   the gate
              sleep, wake               the sleeper
              submit                    the scheduler
              NextTick                  no receiver: it only ends the wait for a command
              prefetch, end of session  the pages
              of a feature              the feature
              everything else           the roster

Each command is carried out at once, except that a sleep takes several ticks.
"""

import logging
from collections.abc import Callable
from queue import Empty

from rollout.engine.kv.prefetch import prefetch
from rollout.engine.messages.to_engine import (
    Cancel,
    Command,
    EndSession,
    FeatureCommand,
    Flush,
    NextTick,
    Pause,
    Prefetch,
    Resume,
    Shutdown,
    Sleep,
    StopAt,
    Submit,
    WakeUp,
)
from rollout.engine.messages.to_service import Done, Event, Failed, Flushed, Rejected
from rollout.engine.parts import EngineLinks, EngineParts
from rollout.engine.schedule.admission import untaken
from rollout.engine.schedule.command_feature import carry_out
from rollout.engine.schedule.step_feature import RefusalError
from rollout.engine.sleep import Sleeper

log = logging.getLogger(__name__)

#: The error of completions that are cancelled because the worker ends.
WORKER_ENDS = "the worker ended before the completion did; use continue_from to finish it on another worker"


class Commands:
    """Takes commands out of the inbox, in order. Answers go to the roster's events."""

    def __init__(self, links: EngineLinks, sleeper: Sleeper, recompute_on_swap: bool) -> None:
        self._inbox, self._gate = links.inbox, links.gate
        self._sleeper = sleeper
        self._recompute = recompute_on_swap
        self._current: Command | None = None

    def take(self, parts: EngineParts) -> None:
        """Carry out all commands that have arrived."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            self._carry_out(command, parts)

    def wait(self, parts: EngineParts, timeout_s: float) -> bool:
        """Wait for one command and carry it out, for a loop that has nothing else to do; false if none came."""
        try:
            command = self._inbox.get(timeout=timeout_s)
        except Empty:
            return False
        self._carry_out(command, parts)
        return True

    def fail(self, parts: EngineParts, message: str) -> list[Event]:
        """After a fault: answer the command that was being carried out. Call it before `rescue`."""
        command, self._current = self._current, None
        match command:
            case Submit(request) if request.key not in parts.roster.groups:
                return [Rejected(request.key, "internal", message)]
            case Flush(asker=asker):
                return [Flushed(asker)]
            case FeatureCommand(token=int(token)) | EndSession(token=int(token)) | Prefetch(token=int(token)):
                return [Failed(token, message, code="internal")]
        return []

    def _carry_out(self, command: Command, parts: EngineParts) -> None:
        self._current = command
        self._match(command, parts)
        self._current = None

    def _match(self, command: Command, parts: EngineParts) -> None:
        roster, gate = parts.roster, self._gate
        match command:
            case Submit(request) if (rejected := gate.refusal(request, roster.version)) is not None:
                roster.events.append(rejected)
            case Submit(request):
                parts.scheduler.submit(request)
            case Cancel(key):
                roster.end(key, "cancelled")
            case Flush(key, asker):
                roster.flush(key)
                roster.events.append(Flushed(asker))
            case StopAt(key, index, _, string):
                roster.stop_at(key, index, string)
            case Pause(mode, token):
                gate.pause(token)
                if mode == "abort":
                    roster.end_all("cancelled")
            case Resume(token):
                roster.events += gate.resume(token)
            case Shutdown(mode, token):
                self._shut_down(mode, token, parts)
            case Sleep() | WakeUp():
                self._sleeper.take(command, parts)
            case FeatureCommand():
                self._give_to_feature(command, parts)
            case EndSession(client, name, token):
                roster.allocator.sessions.end(client, name)
                roster.events += _answers(token, Done)
            case Prefetch():
                roster.events.append(self._prefetch(command, parts))
            case NextTick():
                pass

    def _shut_down(self, mode: str, token: int | None, parts: EngineParts) -> None:
        self._gate.drain(token)
        self._sleeper.end(parts)
        if mode == "now" or self._gate.asleep:  # asleep: no request could finish
            parts.roster.end_all("cancelled", WORKER_ENDS)
        parts.roster.end_early("cancelled", WORKER_ENDS)  # no trainer publishes to a worker that ends

    def _prefetch(self, command: Prefetch, parts: EngineParts) -> Done | Failed:
        roster = parts.roster
        if self._gate.sleep.ordered:
            return Failed(command.token, "this worker is asleep: wake it first", code="unavailable")
        for name, reason in untaken(command, roster.of_requests):
            return Failed(command.token, reason, name)
        try:
            edition = sum(feature.edition(command) for feature in roster.variants)
        except RefusalError as error:
            return Failed(command.token, str(error), error.field)
        tokens = prefetch(roster.allocator, command.prompt, roster.version, edition, roster.running)
        return Done(command.token, {"tokens": tokens})

    def _give_to_feature(self, command: FeatureCommand, parts: EngineParts) -> None:
        events = parts.roster.events
        try:
            carry_out(command, parts.roster, self._recompute)
        except RefusalError as error:
            log.warning("a command of a feature was refused", extra={"reason": str(error)})
            message, field = str(error), error.field
            events += _answers(command.token, lambda token: Failed(token, message, field))
        else:
            events += _answers(command.token, Done)


def _answers(token: int | None, make: Callable[[int], Event]) -> list[Event]:
    """Answer a command that has a token; a command without a token needs no answer."""
    return [] if token is None else [make(token)]
