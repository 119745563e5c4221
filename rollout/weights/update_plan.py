"""Checks a `begin`: the update fits its target, and comes by a transport of this worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.weights.adapter_updates import IncomingAdapter
from rollout.weights.delta_staging import WHOLE, UpdateContent, read_update_content
from rollout.weights.parameter_map import ManifestFit, ParameterMap
from rollout.weights.update_memory import UpdateMemories
from trainer_bridge.transports.base import TransportReceiver
from trainer_bridge.transports.sections import Sections, plan_sections
from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import Manifest, from_wire
from trainer_bridge.wire.weight_messages import read_tied


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """An accepted `begin`."""

    manifest: Manifest
    fit: ManifestFit  # empty for an adapter
    receiver: TransportReceiver
    options: Mapping[str, Any]  # options of the transport
    adapter: IncomingAdapter | None  # None: an update of the model
    content: UpdateContent = WHOLE
    sections: Sections | None = None  # not None: these arrive

    @property
    def arrives(self) -> Manifest:
        """The manifest of the bytes that come."""
        if self.sections is not None:
            return self.sections.of_version(self.manifest.version)
        return self.manifest if self.content.delta is None else self.content.delta.codes


class UpdatePlanner:
    """Reads `begin`. Belongs to the receiver's thread."""

    def __init__(
        self, parameters: ParameterMap, memories: UpdateMemories, receivers: Mapping[str, TransportReceiver]
    ) -> None:
        self._parameters, self._memories, self._receivers = parameters, memories, receivers
        self._layout: tuple[str, Sections | None] | None = None  # sections of the last layout, by its digest

    def plan(
        self, header: Mapping[str, Any], adapter: IncomingAdapter | None, served: int | None, again: bool
    ) -> UpdatePlan:
        """The update that `header` begins. `served` is the version in use.

        With `again` the served weights cannot be used: the same version is accepted, and no tensor may be left out.

        Raises `BadRequest` and `WeightsRejected`, naming the field.
        """
        # Twice the model's tensors, since some may be of no use, and a refusal names those that do not fit.
        most = 2 * len(self._parameters.views) + 1024 if adapter is None else adapter.max_tensors
        manifest = from_wire(header["manifest"], max_tensors=most)
        if type(header["version"]) is not int or header["version"] != manifest.version:
            raise WeightsRejected(f"version must be the manifest's, {manifest.version}", field="version")
        if served is not None and (manifest.version < served if again else manifest.version <= served):
            raise WeightsRejected(
                f"version {manifest.version} is not newer than version {served}, which is served; "
                "publish with a version that grows",
                field="version",
            )
        transport = header["transport"]
        if type(transport) is not str or transport not in self._receivers:
            raise BadRequest(f"transport must be one of {', '.join(self._receivers)}", field="transport")
        receiver, options = self._receivers[transport], header["options"]
        fit, tied = ManifestFit((), ()), read_tied(header.get("tied", {}))
        content = read_update_content(header, manifest)
        if content != WHOLE and adapter is not None:
            raise BadRequest("an adapter has no content and no delta: send it whole", field="delta")
        if content.delta is not None and again:
            raise WeightsRejected("this worker's weights are lost: send the update whole", field="delta")
        if adapter is None:
            self._parameters.check_tied(tied, manifest)
            fit = self._parameters.check(manifest, whole=again)
        else:
            adapter.check(manifest)
        asked = header.get("sections")
        if asked and (adapter is not None or content.delta is not None):
            raise BadRequest("only a whole update of the model comes in sections, by their digest", field="sections")
        sections = self._sections(manifest, asked) if asked else None
        return UpdatePlan(manifest, fit, receiver, options, adapter, content, sections)

    def _sections(self, manifest: Manifest, digest: Any) -> Sections:
        """The sections of this worker, which the publisher knows by their digest."""
        if self._layout is None or self._layout[0] != manifest.layout_digest:
            cuts = self._memories.cuts()
            self._layout = manifest.layout_digest, None if cuts is None else plan_sections(manifest, cuts)
        sections = self._layout[1]
        if sections is None or sections.digest != digest:
            raise WeightsRejected("these are not the sections of this worker: send whole tensors", field="sections")
        return sections
