"""The parts of a worker before it runs: device and sinks, facts of its model, sources of adapters."""

import logging
import os
import time
from pathlib import Path

from rollout.config import EngineSettings, Settings
from rollout.engine.device.streams import Device, make_device
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.engine.features.routing.record import kept_routing
from rollout.metrics.prometheus import Health, PrometheusSink
from rollout.metrics.sinks import JsonlSink, Sink
from rollout.metrics.wandb_mode import wandb_mode
from rollout.metrics.wandb_sink import ContinuedRun, WandbSink
from rollout.model_name import readable_name
from rollout.models import LoadedModel
from rollout.models.language_model import LanguageModel, native
from rollout.models.lora_slots import AdapterWeights
from rollout.models.peft_tensors import AdapterPacker, load_peft_folder
from rollout.network.access import Access
from rollout.process.compiling import use_kernels
from rollout.ranks.devices import check_devices, rank_device
from rollout.service.adapter_loading import AdapterFolders
from rollout.service.capabilities import ServedModel
from rollout.settings_sources import SettingsError
from rollout.text.codec import TextCodec
from rollout.weights.adapter_updates import AdapterTarget

log = logging.getLogger(__name__)


def check_settings(settings: Settings) -> Device:
    """Check settings before the model is loaded, which may take minutes; returns the device. Raises `SettingsError`."""
    try:
        if settings.metrics.wandb:
            wandb_mode(os.environ)
        Access.from_settings(settings.security).check_binds(settings)
        ranks = settings.engine.tensor_parallel
        check_devices(settings.model.device, ranks)
        use_kernels(settings.engine.kernel_cache)
        return make_device(settings.model.device if ranks == 1 else rank_device(settings.model.device, 0))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def make_sinks(settings: Settings, health: Health, run: ContinuedRun | None = None) -> list[Sink]:
    """The sinks that the settings ask for. Raises ValueError when the port for Prometheus is taken."""
    sinks: list[Sink] = []
    if settings.metrics.jsonl is not None:
        sinks.append(JsonlSink(settings.metrics.jsonl))
    if settings.metrics.wandb:
        sinks.append(WandbSink(settings.metrics, settings.model_dump(), readable_name(settings.model.path), run))
    if (port := settings.metrics.metrics_port) is not None:
        sinks.append(PrometheusSink(settings.metrics.metrics_host, port, settings.model.path, health))
    return sinks


def metrics_url(sinks: list[Sink]) -> str | None:
    """The address of the page for Prometheus; None without one."""
    return next((sink.url for sink in sinks if isinstance(sink, PrometheusSink)), None)


def served_model(settings: Settings, loaded: LoadedModel, longest: int, eos: tuple[int, ...]) -> ServedModel:
    """The service's facts of the model; `longest`: the most tokens of a sequence."""
    return ServedModel(
        settings.model.path,
        loaded.spec.vocab,
        longest,
        eos,
        sparse=loaded.spec.moe is not None,
        routing=kept_routing(settings.engine, loaded.model),
        sleep=settings.engine.sleep,
        min_version=settings.weights.min_version,
        images=native(loaded.model).spec.tower if settings.model.images else None,
        image_patches=settings.engine.constants.image_patches,
        dtype=str(loaded.dtype).removeprefix("torch."),
    )


def eos_ids(declared: tuple[int, ...], text: TextCodec | None, vocab: int) -> tuple[int, ...]:
    """The tokens that end a completion, ascending: the checkpoint's, and its tokenizer's."""
    own = None if text is None else text.eos_id
    if own is not None and own not in declared:
        if own < vocab:
            log.info("the tokenizer's eos token ends completions, too", extra={"token": own, "declared": declared})
            declared = tuple(sorted((*declared, own)))
        else:
            log.warning("the tokenizer's eos token is not in the model's vocabulary", extra={"token": own})
    if not declared:
        log.warning(
            "the checkpoint names no eos token, so completions go on to max_tokens: add eos_token_id to its "
            "generation_config.json, or send stop.token_ids with requests"
        )
    return declared


# --- the sources of adapters: folders, at start or by message, and the weight bridge ----------------------------------


def adapter_folders(engine: EngineSettings, model: LanguageModel, packer: AdapterPacker) -> AdapterFolders | None:
    """The folders from which `load_adapter` may read; None without adapter slots."""
    if not engine.adapter_slots:
        return None
    spec, rank, dtype = native(model).spec, engine.adapter_rank, model.embed.dtype
    root = None if engine.adapter_root is None else Path(engine.adapter_root).expanduser()
    return AdapterFolders(root, lambda folder, asked_s: load_peft_folder(folder, spec, rank, dtype, packer, asked_s))


def read_adapters(engine: EngineSettings, model: LanguageModel, packer: AdapterPacker) -> dict[str, AdapterWeights]:
    """The adapters to load at start, by name. Raises ValueError for a folder without an adapter."""
    folders = adapter_folders(engine, model, packer)
    if folders is None:
        return {}
    adapters = {}
    for name, folder in engine.adapter_folders.items():
        try:
            adapters[name] = folders.read(Path(folder).expanduser(), time.monotonic())
        except ValueError as error:
            raise ValueError(f"engine.adapters, {name}={folder}: {error}") from error
    return adapters


def adapter_target(
    engine: EngineSettings, model: LanguageModel, registry: AdapterRegistry, packer: AdapterPacker
) -> AdapterTarget | None:
    """The target of adapters that arrive over the weight bridge; None without adapter slots."""
    if not engine.adapter_slots:
        return None
    return AdapterTarget(native(model).spec, engine.adapter_rank, model.embed.dtype, registry, packer)
