"""Writes the pages of docs/reference from the declarations in the code.

    python -m scripts.reference_docs            checks that the pages are current (exit status 1 if one is not)
    python -m scripts.reference_docs --write    writes them

A page is one function in `PAGES`. Of `protocol.md` the lists of messages and fields are made from the code; the
list of files of `request_path.md` comes from `scripts.check.request_path`.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, cast, is_typeddict

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import trainer_bridge
from rollout.config.gateway_settings import GatewayFile
from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, VERSION_METRICS, Kind, Metric
from rollout.models.config_spec import spec_from_config
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.families import FAMILIES, MULTIMODAL
from rollout.models.families.declare import Family
from rollout.models.fused import obstacle, takes
from rollout.settings_sources import POSITIONAL, SettingKey, setting_keys
from rollout_gateway.http.http_errors import from_worker
from scripts.check.architectures import of_architectures, read_results
from scripts.gateway_reference import endpoints_page
from scripts.hooks_reference import hooks_page
from scripts.protocol_reference import with_generated_parts
from scripts.request_page import listed_files, request_page
from scripts.tables import table
from scripts.together_reference import together_page
from trainer_bridge.wire.errors import SENT_BY_WORKERS, RolloutError

_SETTINGS_INTRODUCTION = """\
# Settings

For operators: every setting of a worker. The later source wins:

1. the TOML file of `--config`: `max_rows = 64` below `[engine]`;
2. the environment: `ROLLOUT_ENGINE__MAX_ROWS=64`; without a section `ROLLOUT_LOG_LEVEL=debug`;
3. flags: `--max-rows 64`, `--prefix-cache`, `--no-prefix-cache`, `--weights-bind` (`bind` of `[weights]`),
   `rollout serve MODEL` (`path`).

`none` unsets a setting; an unknown name is an error. The tables show defaults and other choices."""

_MODELS_INTRODUCTION = """\
# Models

For users who choose a model: {count} native families, by `architectures` of config.json. With [transformers'
code](fallback.md) a worker serves {served} of the {all} decoder-only causal LMs of transformers. Checkpoints are
safetensors in 16 or 32 bits; experts of gpt-oss in MXFP4 stay codes. [Features](together.md)

- **images**: with `model.images` also images and videos; updates may omit the vision tower's tensors.
- **MTP**: layers for multi-token prediction; the first drafts with `speculation = heads`.
- **MLA**: latent attention.

Tests compare each family with transformers' class in float32, with tiny random weights: logits within 1e-4, the same
greedy tokens. The tables show how a GPU runs transformers' default config."""

#: How a GPU runs a family, and what that means.
_WAYS = {
    "fused": "fused kernels, in CUDA graphs",
    "fused in part": "the same, but torch runs some blocks",
    "torch in graphs": "torch and the attention kernels, in CUDA graphs",
    "torch": "torch without graphs; slow",
}

_CONFIG = """\
## What config.json means

A config is in the **known form**, as transformers saves it, if each of its keys

- is read by the family, or is transformers' other name for such a key;
- does not affect the forward (names, token ids, dropout, caches); or
- switches something off by null, such as `final_logit_softcapping`.

For other configs the worker **compares logits** with transformers' class at the start, on the CPU, with one layer of
each kind: about 15 s and 6 GiB of host memory for Qwen3-8B.

If logits or an attention window differ, or the family lacks a value of a key, `model_impl = auto` runs transformers'
own code, and the log gives the reason; with `native` the worker does not start."""

_LONGROPE = """\
## LongRoPE

Phi-3 (128K) and Phi-4-mini have two sets of rotary frequencies. transformers changes to the long set beyond the
original context; the worker uses one:

- `longrope = short`: sequences end at the original context.
- `longrope = long`: the long set from the first token on, as in vLLM. For the same in transformers, copy `long_factor`
  over `short_factor` in config.json."""

_ERRORS_INTRODUCTION = """\
# Errors

For authors of clients: an error has `code`, `message` (what to change), `field` and, with `overloaded`,
`retry_after_s`. Exceptions have these and `request_id`; of a client that resumes also `partials`. The gateway's body is
OpenAI's; `param` names the field."""

_ERRORS_OF_HTTP = """
## Errors of the gateway itself

- 401, 403: token missing or wrong; a web page without a token; a folder outside of `--weights-root`
- 404: unknown path or model
- 408, 413: body slower than `--body-s`, larger than `--max-body-bytes`
- 408, 410: a result of Tinker's API that is not there yet, or not any more
- 429: `--max-in-flight` is reached; try again after `Retry-After`
- 501: an update that needs the extra `publish`
- 503: no worker can take the request, or `--max-connections` is reached"""

_API_INTRODUCTION = """\
# Python API

For users of `trainer_bridge`, after [client](client.md): its exports; exceptions are in [errors](errors.md), fields in
[protocol](protocol.md#generate). `to_dict()` of chunks, completions and results gives plain values, None for NaN.
Methods that control workers take `endpoint` (absent: all, or the one that has the request), some `timeout_s`.

Classes with `Async` have the same methods as coroutines: `async for chunk in await client.generate(prompt,
stream="tokens")`."""

_METRICS_INTRODUCTION = """\
# Metrics

For operators: what a worker reports every `metrics.interval_s` seconds, and of the whole run at its end. How to read
it: [symptoms](../symptoms.md#reading-the-dashboard). Prometheus has `kv/preemptions` as `rollout_kv_preemptions_total`
(`_total` for counters), also `rollout_worker_info` (label `model`), `rollout_report_time_s` and `rollout_report_step`.

- **Gauges** are of now, or of the interval. A mean or percentile without a sample keeps its last value.
- **Counters**, marked +, count since the start.
- **Histograms**, marked #, count by size: over the interval in W&B and JSON lines, since the start in Prometheus.
- `gpu/run/...` is `gpu/...` since the start, also on a CPU."""

_BY_VERSION = """
## By weights version

Once the next version serves: in W&B over `weights/version`, in JSON lines in `versions`; not in Prometheus.
"""

_AT_THE_END = """
## Totals

In W&B's summary, each JSON line, and the last line that the worker prints.
"""

_MEASURING = """
## How they are measured

By `rollout/metrics`. A [recipe](../recipes.md#a-metric) adds a metric.

```
 loop --StepTiming--> Meter --every interval_s--> report --> bounded queue --> thread --> JSON lines | W&B | Prometheus
        set, add, observe                                        /metrics and /health: threads of their own
```

- A step counts when it is committed. Device times come from events.
- If the queue is full, a report is dropped. A sink that raises gets no more reports. Counters survive a fault."""

_FALLBACK_INTRODUCTION = """\
# Models without a native family

For users of other models: a worker runs them by transformers' own code, over the same paged KV cache. Code of a
checkpoint is never run.

Updates may use the names of `save_pretrained` or `named_parameters()`, omit buffers, and contain tensors that
transformers does not load.

Every start takes the first of these ways whose logits equal the code's own eager forward, also beyond its windows; the
log names it:

- **packed**: all tokens of a step side by side, our attention over the pages;
- **rows together**: for layers with a state (Mamba, linear attention, convolutions); prompts run one after the other;
- **gathered**: layers that compute attention themselves (ALiBi, chunks, chosen positions) get copies of the pages;
- **rows alone**, and **by token** for later pieces of prompts: slow.

**Costs**: packed steps take about twice as long. Gathered attention, and values of another dimension than keys, need
memory for `max_rows` times `max_context_tokens`. Decode steps are CUDA graphs if attention has kernels and no operation
waits for the device; otherwise the log gives the reason.

**Refused at the start**: [some features](together.md); encoders, attention to later tokens, quantized checkpoints;
states outside of transformers' cache classes; models with other logits in all of these ways.

## Architectures

{served} of the {all} decoder-only causal LMs of transformers {version} are served ({share:.0%}), as below or as [native
families](models.md). `python -m scripts.check.architectures` compares a tiny checkpoint of each with transformers'
class in float32. Names lack `ForCausalLM`.
"""

_GATEWAY_INTRODUCTION = """\
# Flags of the gateway

For operators of a [gateway](../gateway.md). The flags are also [settings](settings.md) of `[gateway]`."""

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"


#: Beginnings of names of metrics that share a line: what their meanings have in common stands once.
_TOGETHER = (
    "gpu/bubble_pct/",
    "prefix/hits_",
    "speculation/accepted_pct/by_",
    "speculation/accepted_pct/age_",
    "completion/finish_reason/",
    "completion/length_",
    "step/decode_ms",
)


def metrics_page() -> str:
    """Every metric, by the section of the dashboard that shows its group."""
    groups: dict[str, list[Metric]] = {}
    for metric in (*METRICS, *HISTOGRAMS):
        if not metric.name.startswith("gpu/run/"):  # the introduction says what these are
            groups.setdefault(_section(metric), []).append(metric)
    lines = [_METRICS_INTRODUCTION]
    for section, metrics in groups.items():
        lines += ["", f"## {section}", "", *_metric_table(metrics)]
    lines += [_BY_VERSION, *_metric_table(VERSION_METRICS)]
    lines += [_AT_THE_END, *_metric_table(TOTALS), _MEASURING]
    return "\n".join(lines) + "\n"


def _metric_table(metrics: Iterable[Metric]) -> list[str]:
    """A row for each metric, or for several that share one."""
    together: dict[str, list[Metric]] = {}
    for metric in metrics:
        begin = next((begin for begin in _TOGETHER if metric.name.startswith(begin)), metric.name)
        together.setdefault(begin, []).append(metric)
    rows = []
    for begin, members in together.items():
        first = members[0]
        shared = commonprefix([metric.meaning for metric in members]).rpartition(" ")[0] if len(members) > 1 else ""
        name = f"`{begin}...`" if shared else f"`{first.name}`"  # a member may have the beginning as its whole name
        ends = [(metric.name.removeprefix(begin), metric.meaning[len(shared) + 1 :]) for metric in members]
        parts = [f"`{end}`" if end == rest else f"`{end}` {rest}" if end else rest for end, rest in ends]
        meaning = f"{shared.rstrip(':,')}: {'; '.join(parts)}" if shared else first.meaning
        unit = "" if _tells_unit(first) else f" ({first.unit})"
        rows.append((f"{name}{_MARKS[first.kind]}{unit}", meaning))
    return table(("metric", "meaning"), rows)


#: What the page writes after the name of a metric of a kind.
_MARKS: Mapping[Kind, str] = {"gauge": "", "counter": "+", "histogram": "#"}


def _tells_unit(metric: Metric) -> bool:
    """Whether name or meaning of a metric has its unit."""
    ends = {"%": "_pct", "ms": "_ms", "s": "_s", "bytes": "bytes"}
    named = ends.get(metric.unit, "") in metric.name if metric.unit in ends else metric.unit in metric.name
    counted = metric.unit in ("count", "tokens", "versions")  # the meaning says of what
    return counted or named or metric.meaning.startswith(metric.unit)


def settings_page() -> str:
    """Every setting of a worker, by section and group."""
    lines = [_SETTINGS_INTRODUCTION]
    groups: dict[tuple[str | None, str], list[SettingKey]] = {}
    for key in setting_keys():
        groups.setdefault((key.section, key.group), []).append(key)
    before: str | None = ""
    for (section, group), keys in groups.items():
        if section != before:
            lines += ["", f"## {f'`[{section}]`' if section else 'Without a section'}"]
        before = section
        alone = sum(other == section for other, _ in groups) == 1
        rows = table(("setting", "meaning"), (_setting(key, key.name) for key in keys))
        lines += [*([] if alone else ["", f"### {group}"]), "", *rows]
    return "\n".join(lines) + "\n"


def _setting(key: SettingKey, name: str) -> tuple[str, str]:
    """A row: name, default and other choices of a fixed list; the meaning."""
    others = "".join(f", `{choice}`" for choice in key.choices if choice != key.field.default)
    return f"`{name}{f'={key.default}' if key.default else ''}`{others}", key.field.description or ""


def models_page() -> str:
    """Every family of the registry."""
    families = [
        (_on_gpu(name, family), _marked(family.models, _marks(name, family)), name) for name, family in FAMILIES.items()
    ]
    for name, whole in MULTIMODAL.items():
        entries = [
            (entry, FAMILIES[entry]) if isinstance(entry, str) else (name, entry) for entry in whole.language_models
        ]
        images = [] if whole.tower is None else ["images"]
        marks: dict[str, dict[str, None]] = {}
        for entry in entries:
            marks.setdefault(_on_gpu(*entry), {}).update(dict.fromkeys(_marks(name, entry[1])))
        families += [(way, _marked(whole.models, [*images, *of_way]), name) for way, of_way in marks.items()]
    best = of_architectures(read_results()[1])
    served = sum(result.served in ("native", "fallback") for result in best)
    count = len(FAMILIES.keys() | MULTIMODAL.keys())
    lines = [_MODELS_INTRODUCTION.format(count=count, served=served, all=len(best))]
    for way, meaning in _WAYS.items():
        if found := sorted(family for family in families if family[0] == way):
            rows = table(("models", "class"), ((models, f"`{name}`") for _, models, name in found))
            lines += ["", f"**{way}**: {meaning}", "", *rows]
    return "\n".join([*lines, "", _CONFIG, "", _LONGROPE]) + "\n"


def _marked(models: str, marks: list[str]) -> str:
    return f"{models} ({', '.join(marks)})" if marks else models


def _marks(architecture: str, family: Family) -> list[str]:
    """What the introduction of the page calls marks."""
    marks = ["MLA"] if family.latent else []
    drafts = family.mtp is not None and not (family.latent and family.latent.indexer)
    marks += ["MTP"] if drafts else []
    compared = architecture if family.read_as is None else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.read_as]
    return marks if compared == architecture or architecture in MULTIMODAL else [*marks, f"compared with `{compared}`"]


#: Values of all checkpoints of an architecture that are not the defaults of transformers.
_REAL: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention"] * 31 + ["full_attention"]},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    **dict.fromkeys(
        ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    ),
}


def _on_gpu(architecture: str, family: Family) -> str:
    heads: dict[str, Any] = {} if family.latent else {"head_dim": 128}
    config = CONFIG_MAPPING[family.read_as or family.model_type](**heads, **_REAL.get(architecture, {}))
    if getattr(config, "rope_parameters", None) is None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    spec = spec_from_config(config, architecture)
    model = Decoder(spec, torch.bfloat16, torch.device("meta"))
    every = [block for layer in model.layers for block in cast(DecoderLayer, layer).blocks]
    blocks = [(block, takes(block.spec, torch.bfloat16)) for block in every]
    fused = obstacle(model) is None
    if any(block.reads_host and not (fused and taken) for block, taken in blocks):
        return "torch"
    if not fused:
        return "torch in graphs"
    return "fused" if all(taken for _, taken in blocks) else "fused in part"


def errors_page() -> str:
    """Every error code with its exception."""
    exported = [getattr(trainer_bridge, name) for name in trainer_bridge.__all__]
    classes = [kind for kind in _subclasses(RolloutError) if kind in exported]
    of_protocol = [kind for kind in classes if kind in SENT_BY_WORKERS]
    others = [kind for kind in classes if kind not in SENT_BY_WORKERS]
    lines = [_ERRORS_INTRODUCTION]
    for title, kinds in (("Codes of the protocol", of_protocol), ("Errors of the client itself", others)):
        rows = [(f"`{kind.code}`", f"`{kind.__name__}`", f"{_status(kind)}", _line(kind.__doc__)) for kind in kinds]
        lines += ["", f"## {title}", "", *table(("code", "exception", "HTTP", "meaning"), rows)]
    return "\n".join([*lines, _ERRORS_OF_HTTP]) + "\n"


def _status(kind: type[RolloutError]) -> int:
    return from_worker(kind("")).status


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _subclasses(kind: type[RolloutError]) -> list[type[RolloutError]]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


#: Classes whose objects a user gets from calls and does not make.
_MADE = {
    *("AsyncSession", "AsyncStream", "Chunk", "Completion", "GenerateResult", "Mismatch", "PublishHandle", "Session"),
    *("Settled", "Stream", "WorkerProcess", "WorkerReport"),
}
#: Classes that the introduction describes.
_AS_OTHERS = {"AsyncSession"}
#: Classes whose fields are the protocol's.
_OF_PROTOCOL = {"Chunk", "Completion", "GenerateResult", "Mismatch", "Settled"}
#: Methods that only this package calls.
_OWN_METHODS = {
    "Completion": {"to_dict"},  # the introduction says what it does
    **dict.fromkeys(("Chunk", "GenerateResult"), {"to_dict", "scores", "score_fields"}),
    "ClientCurve": {"apply"},
    "MediaItem": {"fields"},
    "PublishHandle": {"end", "learn", "report", "use_every_name"},
}


#: Methods of `RolloutClient` that send a message and return, or raise, the reply.
_ORDERS = (
    *("ack", "cancel", "end_session", "load_adapter", "unload_adapter", "pause", "resume", "ping", "sleep", "wake"),
    *("shutdown", "status"),
)


def api_page() -> str:
    """Signatures and docstrings of what `trainer_bridge` exports; errors have a page of their own."""
    lines = [_API_INTRODUCTION, "", _orders()]
    functions = []
    for name in sorted(trainer_bridge.__all__):
        thing: Any = getattr(trainer_bridge, name)
        if not callable(thing) or name in _AS_OTHERS or (inspect.isclass(thing) and issubclass(thing, RolloutError)):
            continue
        if not inspect.isclass(thing):
            functions.append((f"`{name}{_signature(thing)}`", _line(inspect.getdoc(thing))))
            continue
        lines += ["", f"## {name}", "", *_called(name, thing), _markdown(thing)]
        methods = [] if is_typeddict(thing) else inspect.getmembers(thing, inspect.isroutine)
        shown = [
            (method, function)
            for method, function in methods
            if not method.startswith("_")
            and method not in _OWN_METHODS.get(name, ())
            and _own(thing, method)
            and not (thing is trainer_bridge.RolloutClient and method in _ORDERS)
        ]
        for method, function in shown:
            lines += ["", f"**`{method}{_signature(function)}`** {_markdown(function)}"]
    lines += ["", "## Functions", "", *table(("function", "meaning"), functions)]
    return "\n".join(lines) + "\n"


def _orders() -> str:
    """The methods of a client that the protocol describes."""
    calls = ", ".join(f"`{name}`" for name in _ORDERS)
    return f"Methods that are [messages](protocol.md#ops), with the same arguments: {calls}."


def _called(name: str, thing: Any) -> list[str]:
    """How a thing is called; of an object that a user does not make, the attributes."""
    if name not in _MADE:
        listed = name == "AsyncRolloutClient" or "\nArgs:\n" in (inspect.getdoc(thing) or "")
        signature = "" if listed else _signature(thing)  # a list has the parameters
        return [f"`{name}{signature}`", ""] if signature else []
    if name in _OF_PROTOCOL:
        return []
    attributes = [field.name for field in fields(thing)] if is_dataclass(thing) else []
    attributes += [name for name, _ in inspect.getmembers(thing, lambda value: isinstance(value, property))]
    return [f"Attributes: {', '.join(f'`{name}`' for name in attributes)}.", ""] if attributes else []


def _own(thing: Any, method: str) -> bool:
    """Whether a method is not listed elsewhere: `RolloutClient`, `Session` and `Stream` have the common ones."""
    text = inspect.getdoc(getattr(thing, method)) or ""
    inherited = thing.__name__.startswith("Async") and method not in vars(thing)
    return bool(text) and not inherited and not text.startswith("Like `")


def _markdown(thing: Any) -> str:
    """A docstring with its `Args:` section, if any, as a table with the defaults."""
    text, _, arguments = (inspect.getdoc(thing) or "").partition("\nArgs:\n")
    if not arguments:
        return text
    parameters = inspect.signature(thing).parameters

    def named(name: str) -> str:
        default = parameters[name].default
        return f"`{name}{'' if default is inspect.Parameter.empty else f'={default!r}'}`"

    rows = (_line(each).partition(": ") for each in re.split(r"^ {4}(?=\w)", arguments, flags=re.MULTILINE)[1:])
    lines = table(("argument", "meaning"), ((named(name), meaning) for name, _, meaning in rows))
    return "\n".join([text, *lines])


def protocol_page() -> str:
    """The page as it is, with its lists of messages and fields made anew."""
    return with_generated_parts((FOLDER / "protocol.md").read_text(encoding="utf-8"))


def gateway_page() -> str:
    """The flags of `rollout gateway`."""
    keys = [key for key in setting_keys(GatewayFile) if key.path not in POSITIONAL]
    lines = [_GATEWAY_INTRODUCTION, "", *table(("flag", "meaning"), (_setting(key, key.flag) for key in keys))]
    return "\n".join(lines) + "\n"


def _signature(thing: Any) -> str:
    """The parameters without their annotations, which are long; of a typed map its keys."""
    if is_typeddict(thing):
        return ""  # its docstring has the keys
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # not a Python function
        return ""
    empty = inspect.Parameter.empty
    hidden = {"self", "command", *(name for name in ("endpoint", "timeout_s") if _is_option(signature, name))}
    parameters = [each.replace(annotation=empty) for name, each in signature.parameters.items() if name not in hidden]
    if not any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters):
        parameters = [each for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _is_option(signature: inspect.Signature, name: str) -> bool:
    """Whether a parameter is one that the introduction describes for all methods."""
    parameter = signature.parameters.get(name)
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is None


def _section(metric: Metric) -> str:
    """The metric's section of the dashboard. Without a panel: the section of a metric with the same first word."""
    if metric.panel is not None:
        return metric.panel.section
    word = metric.name.partition("/")[0]
    return next(other.panel.section for other in METRICS if other.panel and other.name.startswith(f"{word}/"))


#: The models that are missing most.
_FALLBACK_NEXT = """
## Next

- DeepSeek-V4: quantized checkpoints, layers for multi-token prediction, less memory for tokens outside the window.
- MiniMax-M3 with images; today its language model alone, saved as `MiniMaxM3VLForCausalLM`.
- Qwen4-exp: its indexer keeps positions as well as keys.
"""


def fallback_page() -> str:
    """How transformers' code is run, and what a worker does with each of its causal LMs."""
    version, results = read_results()
    best = of_architectures(results)
    by_way: dict[str, list[str]] = {}
    not_served: dict[str, list[str]] = {}
    for result in best:
        name = result.architecture.removesuffix("ForCausalLM")
        if result.served == "fallback":
            by_way.setdefault(result.detail, []).append(name)
        elif result.served == "refused":
            not_served.setdefault(_general(result.detail), []).append(name)
        elif result.served == "not tried":
            not_served.setdefault("not tried: no tiny model could be made", []).append(name)
    native = sum(result.served == "native" for result in best)
    served = native + sum(map(len, by_way.values()))
    counts = {"served": served, "all": len(best), "share": served / len(best)}
    lines = [_FALLBACK_INTRODUCTION.format(version=version, **counts)]
    for title, groups in (("", by_way), ("\n## Not served\n", not_served)):
        lines += [title] if title else []
        for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
            lines.append(f"- {reason}: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join([*lines, _FALLBACK_NEXT])


def _general(reason: str) -> str:
    """A reason to refuse an architecture, without what only its tiny checkpoint or an exception has."""
    text = (
        re.sub(r"its tensor \S+ is", "a tensor is", reason)
        .partition("; ")[0]
        .replace("checkpoint FOLDER", "its weights")
    )
    if " uses cache of its own" in text:
        return "it has a cache of its own"
    return re.sub(r" by [\d.]+ of their .*|(?<=code fails): .*|\.$", "", text)


#: File names and the functions that write their text.
PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api_page,
    "errors.md": errors_page,
    "fallback.md": fallback_page,
    "gateway.md": gateway_page,
    "metrics.md": metrics_page,
    "models.md": models_page,
    "protocol.md": protocol_page,
    "settings.md": settings_page,
    "endpoints.md": endpoints_page,
    "hooks.md": hooks_page,
    "request_path.md": lambda: request_page(listed_files()),
    "together.md": together_page,
}


def main(arguments: list[str]) -> int:
    """Check the pages, or write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference_docs", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the pages")
    what.add_argument("--check", action="store_true", help="check that the pages are current (the default)")
    given = parser.parse_args(arguments)
    stale = []
    for name, page in PAGES.items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == page():
            continue
        if given.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(), encoding="utf-8")
        else:
            stale.append(name)
    if stale:
        names = ", ".join(f"docs/reference/{name}" for name in stale)
        print(f"out of date: {names}; run: python -m scripts.reference_docs --write", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
