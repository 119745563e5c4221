"""Adapters on the device: the slots, and their input to a forward."""

from __future__ import annotations

import logging

import torch

from rollout.config import EngineSettings
from rollout.engine.device.streams import Device
from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.features.adapters.feature import AdaptersFeature
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.engine.messages.to_engine import AdapterCommand
from rollout.engine.schedule.step_feature import StepFeature, find_feature
from rollout.engine.step.device_feature import DeviceFeature, HostParts, Site
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import RowNeeds, StepInput
from rollout.models.batch import BatchFields
from rollout.models.language_model import LanguageModel, native
from rollout.models.lora_slots import AdapterSlots, StepAdapters

log = logging.getLogger(__name__)

_VARIANT = RowNeeds.VARIANT.value  # flags of an enum are slow to test


class AdapterMemory(DeviceFeature[None]):
    """The slots of a worker, for batches of `rows`, for adapters of `registry`."""

    name = AdapterCommand.feature
    batch_fields = frozenset({"adapters"})
    changes_forward = RowNeeds.VARIANT
    row_column = True
    own_stream = True  # copies adapters to slots that no row uses

    def __init__(self, slots: AdapterSlots, device: Device, rows: int, registry: AdapterRegistry) -> None:
        self.slots = slots
        self._device, self._rows, self._registry = device, rows, registry

    @classmethod
    def make(cls, site: Site) -> AdapterMemory | None:
        """Memory for adapters of the registry of `site`, or of an empty one, if any are served.

        Raises ValueError with the numbers if there is too little.
        """
        engine, device, memory = site.settings.engine, site.device, site.memory
        if not engine.adapter_slots:
            return None
        model = native(site.model)
        needed = AdapterSlots.bytes_for(model.spec, engine.adapter_slots, engine.adapter_rank, model.embed.dtype)
        if needed > device.free_bytes():
            raise ValueError(
                f"adapter_slots = {engine.adapter_slots} of adapter_rank = {engine.adapter_rank} take "
                f"{needed / 2**30:.2f} GiB and there are {device.free_bytes() / 2**30:.2f} GiB: lower one of them"
            )
        slots = AdapterSlots(
            model.spec, engine.adapter_slots, engine.adapter_rank, model.embed.dtype, model.embed.device
        )
        tensors = (tensor for b in slots.buffers.values() for tensor in (b.a_SAK, b.b_SNR))
        memory.take_over(tensors, kept=False)  # they are loaded again from the host
        log.info("slots for adapters", extra={"slots": slots.slots, "rank": slots.rank, "bytes": slots.nbytes})
        registry = find_feature(site.shared, AdapterRegistry) or AdapterRegistry(engine.max_adapters)
        return cls(slots, device, engine.max_rows, registry)

    @classmethod
    def host_bytes(cls, settings: EngineSettings, model: LanguageModel) -> int:
        """See `DeviceFeature`: every known adapter is kept there, also while it has a slot."""
        if not settings.adapter_slots:
            return 0
        each = AdapterSlots.bytes_for(native(model).spec, 1, settings.adapter_rank, model.embed.dtype)
        return settings.max_adapters * each * settings.tensor_parallel

    def host_part(self, engine: HostParts, before: StepFeature | None) -> AdaptersFeature:
        """See `DeviceFeature`. The registry of adapters outlives faults."""
        both = engine.streams.beside[self.name], engine.streams.compute
        counts = before.table.counts if isinstance(before, AdaptersFeature) else None
        return AdaptersFeature(
            AdapterTable(self._registry, self.slots, self._device, both, engine.orders, self._rows, counts)
        )

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: None
    ) -> BatchFields:
        if not needs & _VARIANT:
            return {}
        return {"adapters": StepAdapters(self.slots, rows.columns[self.name].index_select(0, rows_B), segmented=False)}

    def prefill_fields(self, rows: RowState, step: StepInput, output: None) -> BatchFields:
        """The slots of the tokens of spans."""
        if not step.header.needs & _VARIANT:
            return {}
        slots_C = rows.columns[self.name].index_select(0, step["rows"])
        slots_T = slots_C.index_select(0, step["token_span"])
        return {"adapters": StepAdapters(self.slots, slots_T, segmented=True)}
