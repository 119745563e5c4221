"""What a `begin` asks for, read and checked: whatever can be refused before a byte comes is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.weights.adapter_updates import IncomingAdapter
from rollout.weights.parameter_map import Fit, ParameterMap
from trainer_bridge.transports import TransportReceiver
from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import Manifest, from_wire


@dataclass(frozen=True, slots=True)
class Begin:
    """An update that fits what it is for, and the way its bytes are to come."""

    manifest: Manifest
    fit: Fit  # without content for an adapter
    receiver: TransportReceiver
    options: Mapping[str, Any]  # of the transport
    adapter: IncomingAdapter | None  # that the update is of; None: it is of the model


def read_begin(
    header: Mapping[str, Any],
    adapter: IncomingAdapter | None,
    parameters: ParameterMap,
    receivers: Mapping[str, TransportReceiver],
    served: int | None,
    again: bool,
) -> Begin:
    """The update that `header` begins. `served` is the version that is in use; with `again` it may come once more.

    Raises `BadRequest` and `WeightsRejected`, naming the field.
    """
    # A few too many are read all the same, so that the refusal can name them.
    most = 2 * len(parameters.views) + 64 if adapter is None else adapter.max_tensors
    manifest = from_wire(header["manifest"], max_tensors=most)
    if type(header["version"]) is not int or header["version"] != manifest.version:
        raise WeightsRejected(f"version must be the manifest's, {manifest.version}", field="version")
    if served is not None and manifest.version <= served - again:
        raise WeightsRejected(
            f"version {manifest.version} is not newer than version {served}, which is served; "
            "publish with a version that grows",
            field="version",
        )
    transport = header["transport"]
    if type(transport) is not str or transport not in receivers:
        raise BadRequest(f"transport must be one of {', '.join(receivers)}", field="transport")
    fit = Fit((), ())
    if adapter is None:
        fit = parameters.check(manifest)
    else:
        adapter.check(manifest)
    return Begin(manifest, fit, receivers[transport], header["options"], adapter)
