"""The plans by which updates are cut for the ranks of workers: see `transports.sections`.

A worker of several ranks names its cuts once, when a `begin` asks for them. A worker refuses an outdated plan; a worker
of another release may refuse the question.
"""

import logging
from collections.abc import Sequence
from typing import Any

from trainer_bridge.transports.sections import Sections, cuts_digest, cuts_from_wire, plan_sections
from trainer_bridge.wire.errors import ProtocolError
from trainer_bridge.wire.manifest import Manifest

_log = logging.getLogger(__name__)


class CutPlans:
    """The plans of a publisher's workers, by endpoint. Belongs to the publisher's thread."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[str, Sections]] = {}  # digest of a layout, and its plan
        self._whole_only: set[str] = set()  # workers that take no sections, until they are lost

    def common(self, manifest: Manifest, endpoints: Sequence[str]) -> Sections | None:
        """The plan of an update for these workers; None unless all keep the same parts of its tensors."""
        known = [self._plans.get(endpoint) for endpoint in endpoints]
        plans = [None if each is None or each[0] != manifest.layout_digest else each[1] for each in known]
        same = plans[0] is not None and all(each is not None and each.digest == plans[0].digest for each in plans)
        return plans[0] if same else None

    def may_ask(self, endpoint: str) -> bool:
        """Whether a `begin` may ask a worker for its cuts."""
        return endpoint not in self._whole_only

    def note(self, endpoint: str, cuts: Any, manifest: Manifest) -> None:
        """Plan the next updates of a worker, from what its ranks keep of each tensor."""
        try:
            ranks = cuts_from_wire(cuts, manifest)
        except ProtocolError as error:
            _log.warning("%s gets whole tensors: %s", endpoint, error)
            self._whole_only.add(endpoint)
            return
        known = next(iter(self._plans.values()), None)
        if known is None or known[1].cuts != cuts_digest(manifest, ranks):
            known = manifest.layout_digest, plan_sections(manifest, ranks)
        self._plans[endpoint] = known

    def refused(self, endpoint: str, why: Exception, asked: bool) -> None:
        """A worker takes no sections, or not by this plan; `asked`: it was asked for its cuts."""
        _log.info("%s gets whole tensors: %s", endpoint, why)
        self._plans.pop(endpoint, None)
        if asked:
            self._whole_only.add(endpoint)

    def lost(self, endpoint: str) -> None:
        """A worker does not answer: one of another release may come back."""
        self._whole_only.discard(endpoint)

    def forget(self, endpoint: str) -> None:
        """A worker has left."""
        self._plans.pop(endpoint, None)
        self._whole_only.discard(endpoint)
