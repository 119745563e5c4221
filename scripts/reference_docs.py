"""Writes the pages of docs/reference from the declarations in the code.

    python -m scripts.reference_docs            checks that the pages are current (exit status 1 if one is not)
    python -m scripts.reference_docs --write    writes them

A page is one function in `PAGES`. Of `protocol.md` only the table of the sampling rules is made from the code, of
`gateway.md` the table of the flags.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, is_typeddict

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import trainer_bridge
from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, VERSION_METRICS, Metric
from rollout.metrics.prometheus import prometheus_name
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.fallback.held import HELD
from rollout.models.fused import experts_alone, obstacle, takes_feed_forward, takes_mixer
from rollout.models.layers import Block
from rollout.models.registry import FAMILIES, MULTIMODAL, Family, spec_from_config
from rollout.service.errors import ErrorCode
from rollout.settings_sources import SettingKey, setting_keys
from scripts.gateway_reference import endpoints_page
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.sampling_rules import RULES, SamplingRule

_SETTINGS_INTRODUCTION = """\
# Settings

A setting comes from one of three sources. A later one overrides the earlier ones:

1. The TOML file of `--config`: `max_rows = 64` below `[engine]`.
2. The environment: `ROLLOUT_<SECTION>__<KEY>`, such as `ROLLOUT_ENGINE__MAX_ROWS=64`; without a section
   `ROLLOUT_<KEY>`.
3. A flag: `--max-rows 64`. `--no-...` sets a setting that is true or false to false.

In the environment and in flags, `none` unsets an optional setting. An unknown name is an error in all three. Words
such as row, page and step are in the [glossary](../glossary.md)."""

_MODELS_INTRODUCTION = """\
# Models

The families that a worker runs natively, by the name in `architectures` of config.json. Other architectures run
through transformers' own code, or are refused: [fallback](fallback.md). Checkpoints are safetensors in 16 or 32 bits.
Experts of gpt-oss may be in MXFP4, and are decoded to 16 bits.

Of a model of text and images the worker serves the language model: it does not load the other tensors, and accepts them
in updates. With `model.images` it serves images and videos, too, for the models with "yes" below: it loads the vision
tower, and updates may have its tensors or leave them out, as trainers with a frozen tower do. The tower is a module of
transformers, and runs by torch. Greedy tokens and log-probs of prompts with images are held against the whole model.

DeepSeek, Moonlight and GLM-4.7-Flash have latent attention (MLA): one latent a token in the KV cache. With them
`kv_dtype = fp8_e4m3`, `deterministic` and adapters of `kv_b_proj` are errors, and `group_attention` changes nothing.

How it runs on a GPU, for the default config of transformers (biases and other options of a config may change it):

- **fused**: the fused kernels, in CUDA graphs.
- **fused in part**: some blocks by the fused kernels and the others by torch, in CUDA graphs.
- **torch in graphs**: torch and the attention kernels, in CUDA graphs.
- **torch**: torch and the attention kernels, without CUDA graphs: slow.

Models with "MTP" have layers for multi-token prediction in their checkpoints, the first of which drafts with
`speculation = heads`; its forward is held against a decoder layer of transformers. For the others name an EAGLE-3 head.

"Held against" is transformers' own model: tiny random weights in float32, logits of prompts in chunks and of decode
steps within 1e-4, and through the engine the same greedy tokens, with several rows and with preemptions or an update of
the weights in the middle."""

_CONFIG = """\
## What config.json means

transformers decides what the keys of a config mean: which of two wins, what an absent one is, what older ones stand
for. So the worker makes transformers' own config of the checkpoint, standardises it as a model of transformers does,
and takes every value from it. Frequencies of scaled rotary embeddings are those that transformers computes.

Whether the output layer is the embedding follows from `tie_word_embeddings` and from the files. If these have another
output layer, it is not tied, and the log warns. If they have one of the two tensors, it stands for both.

A config is in the **known form** if each of its keys is one of these (`known_keys` in `rollout/models/registry.py`):

- a key that the declaration of the family reads, also under another name that transformers has for it;
- a key of which transformers makes one of those, such as `rope_scaling` or `sliding_window_pattern`;
- a key on which no forward depends: names, token ids, dropout and the rest of training, caches;
- a key that is off while it is null, such as `final_logit_softcapping`, and is null.

Keys in the maps of rotary embeddings count like the others. What transformers saves for these families is in the known
form, and so are most files of the hub. `per_layer_config`, and `is_causal` other than true, are errors.

For any other config the worker **compares logits** with transformers' own class before it loads the weights. Both run
in float32 on the CPU, with one layer of each kind and the checkpoint's tensors, on a prompt whose positions are far
apart; windows are read off the masks of transformers. If the logits of a token differ by more than 0.001 of their
standard deviation, or if a window differs, the worker does not start, and the error names the keys. The comparison
takes the import of transformers' modelling code, and host memory for these layers and both ends of the model: about
15 s on one slow core and 6 GiB for Qwen3-8B. With `tensor_parallel` rank 0 compares for all. The log says when nothing
can be compared: host memory has no room, or transformers has no such model. In the known form nothing is compared."""

_LONGROPE = """\
## LongRoPE

Phi-3 (128K) and Phi-4-mini have two sets of rotary frequencies. transformers takes the long set for a forward in which
a row is longer than the original context, and else the short set. So the same token gets another log-prob when its
sequence grows past this border. The worker takes one set for all sequences, by the setting `longrope`:

- `short`, the default: sequences end at the original context. Log-probs are those of a trainer that uses transformers.
- `long`: sequences may have the whole context, and the long set holds from their first token on. vLLM does the same if
  its `max_model_len` is past the original context.

So no running sequence changes its frequencies, and its KV and its log-probs stay valid. With `long`, a trainer that
uses transformers computes the same log-probs for sequences that end past the border. For shorter ones it must use the
long set, too: put `long_factor` in the place of `short_factor` in its config.json. A worker that serves such a
checkpoint uses the whole context without the setting."""

_ERRORS_INTRODUCTION = """\
# Errors

A worker answers a wrong message with `code`, `message` (says what to change), `field` and, with `overloaded`,
`retry_after_s`. The Python client raises the exception in the second column. All are subclasses of `RolloutError`
and have the same fields as attributes."""

_API_INTRODUCTION = """\
# Python API

Everything that `trainer_bridge` exports, made from the docstrings. How to use it: [client.md](client.md). Fields of
requests: [protocol.md](protocol.md)."""

_METRICS_INTRODUCTION = """\
# Metrics

A worker reports its metrics every `metrics.interval_s` seconds, and once for the whole run when it ends. The summary of
a run in W&B is always over the whole time. The first
column is the name in W&B and JSON lines, the second one the name in Prometheus. Words such as row, step and bubble are
in the [glossary](../glossary.md); how to read the metrics:
[operations](../operations.md#reading-the-dashboard).

- `gpu/...` is about the device that computes, also if that is a CPU.
- A **gauge** is the present value, or the value for the interval. A mean, median or percentile without a sample in the
  interval keeps its last value. In the report of the whole run it covers the whole run.
- A **counter** only grows while the worker runs.
- A **histogram** counts values by size. W&B and JSON lines get the counts of the interval, JSON lines as a list of
  `[begin, bound, count]` without the empty buckets. Prometheus gets the counts since the start.
- `mismatch/...` appears after a trainer's first `report`, each share of accepted drafts after the first draft of its
  kind.

Prometheus also gets `rollout_worker_info` (its label `model` names the model), `rollout_report_time_s`
(Unix time of the report) and `rollout_report_step` (steps committed by then). In JSON lines the last two are `time` and
`step`."""

_BY_VERSION = """
## By weights version

One row for each weights version, written once the next version serves: in W&B a row with `weights/version` as its
x-axis, in JSON lines an entry of `versions` in the next report. A value without a sample is left out. Prometheus
does not get these metrics.
"""

_AT_THE_END = """
## Totals

Over the run so far: in the summary of the run in W&B, where they include the processes before a restart, in each JSON
line, and in `totals` of the last line that the worker prints.
"""

_FALLBACK_INTRODUCTION = """\
# Models without a native family

A worker runs the native families with its own decoder. It runs any other causal LM of transformers by transformers'
own code, over the same paged KV cache. `model_impl = auto` chooses by the architecture in config.json, and the worker
logs a warning if the model is not native. `model_impl = transformers` runs a native family this way, too. The worker
never runs code of a checkpoint.

**What works as with a native family**: chunked prompts, prefix cache, sessions, groups, preemption, offload, sleep,
swaps, log-probs, constraints, `kv_dtype`. An update may have the names of the checkpoint, as `save_pretrained` writes
them, or those of the module, as `named_parameters()` has them. Buffers, such as the correction biases of routers, may
be left out. Tensors that transformers' class leaves out of a checkpoint, such as `mtp.*`, may be sent and are dropped.

**What it costs**: expect steps to take about twice as long, because the operations between the products are separate
kernels. Attention with values of another dimension than keys has no kernels: on a GPU torch computes it from gathered
pages, whose memory grows with `max_rows` times `max_context_tokens`. Latent attention (MLA) keeps the keys and values
of all heads; native families keep one latent a token. Decode steps are captured as CUDA graphs if attention has kernels
and no operation waits for the device; the worker runs one step to find out, and logs the reason if not.

**What the worker refuses when it starts**, with the reason:

- the settings `adapter_slots`, `routing`, `deterministic` and `expert_dtype`;
- layers that keep a state instead of KV (Mamba, linear attention, convolutions), and layers that share KV;
- attention to later tokens, to chunks of the text, or to chosen positions;
- attention that does not use transformers' attention interface, such as ALiBi in Bloom and MPT;
- models with an encoder, and quantized checkpoints;
- parameters that transformers stores in another order than the checkpoint.

The worker finds the windows of a model by calling the mask functions of transformers. At every start it compares the
logits over the paged cache with those of the model's own eager attention. It refuses a model whose logits differ.
For LongRoPE see [models](models.md#longrope).

Tests hold the architectures below against transformers in float32 on a CPU, with tiny random weights: logits within
1e-4 of eager attention after chunked prompts and 200 decode steps; greedy tokens and log-probs through the engine
with several rows, preemptions, and a swap in the middle. Other architectures may work, too: the check at the start is
made for every model."""

_GATEWAY_PAGE = "../gateway.md"
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"


def metrics_page() -> str:
    """Every metric, by the section of the dashboard that shows its group."""
    groups: dict[str, list[Metric]] = {}
    for metric in (*METRICS, *HISTOGRAMS):
        groups.setdefault(_section(metric), []).append(metric)
    lines = [_METRICS_INTRODUCTION]
    for section, metrics in groups.items():
        rows = [(f"`{m.name}`", f"`{prometheus_name(m)}`", m.kind, m.unit, m.meaning) for m in metrics]
        lines += ["", f"## {section}", "", *_table(("name", "Prometheus", "kind", "unit", "meaning"), rows)]
    heads = ("name", "unit", "meaning")
    lines += [_BY_VERSION, *_table(heads, [(f"`{m.name}`", m.unit, m.meaning) for m in VERSION_METRICS])]
    lines += [_AT_THE_END, *_table(heads, [(f"`{m.name}`", m.unit, m.meaning) for m in TOTALS])]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Every setting, by section."""
    lines = [_SETTINGS_INTRODUCTION]
    sections = dict.fromkeys(key.section for key in setting_keys())
    for section in sorted(sections, key=lambda name: name is None):  # stable; settings without a section come last
        rows = [_setting(key) for key in setting_keys() if key.section == section]
        heads = ("setting", "flag", "values", "default", "meaning")
        lines += ["", f"## {section}" if section else "## Without a section", "", *_table(heads, rows)]
    return "\n".join(lines) + "\n"


def _setting(key: SettingKey) -> tuple[str, ...]:
    default = "none" if key.field.default is None else str(key.field.default).lower()
    shown = f"`{default}`" if default else ""
    return f"`{key.name}`", f"`{key.flag}`", _values(key), shown, key.field.description or ""


def _values(key: SettingKey) -> str:
    annotation = key.field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    name = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}[kinds[0]]
    bounds = [
        f"{sign} {getattr(rule, attribute)}"
        for rule in key.field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, attribute, None) is not None
    ]
    return " ".join([name, ", ".join(bounds)]).strip() + (", or none" if key.optional else "")


def models_page() -> str:
    """Every family of the registry."""
    rows = [
        (family.models, f"`{name}`", _on_gpu(name, family), f"`{_oracle(name, family)}`", "", _drafts(family))
        for name, family in FAMILIES.items()
    ]
    for name, whole in MULTIMODAL.items():
        entries = [
            (entry, FAMILIES[entry]) if isinstance(entry, str) else (name, entry) for entry in whole.language_models
        ]
        ways = dict.fromkeys(_on_gpu(*entry) for entry in entries)
        drafts = max(_drafts(family) for _, family in entries)
        images = "" if whole.tower is None else "yes"
        rows.append((whole.models, f"`{name}`", " or ".join(ways), f"`{name}`", images, drafts))
    heads = ("models", "architecture", "on a GPU", "held against", "images", "drafts")
    return "\n".join([_MODELS_INTRODUCTION, "", *_table(heads, sorted(rows)), "", _CONFIG, "", _LONGROPE]) + "\n"


def _drafts(family: Family) -> str:
    return "" if family.mtp is None else "MTP"


def _oracle(architecture: str, family: Family) -> str:
    return architecture if family.read_as is None else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.read_as]


#: Values of all checkpoints of an architecture that are not the defaults of transformers.
_REAL: dict[str, dict[str, Any]] = {
    "GraniteForCausalLM": {"residual_multiplier": 0.22},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
}


def _on_gpu(architecture: str, family: Family) -> str:
    heads = {} if family.latent else {"head_dim": 128}
    config = CONFIG_MAPPING[family.read_as or family.model_type](**heads, **_REAL.get(architecture, {}))
    if getattr(config, "rope_parameters", None) is None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    spec = spec_from_config(config, architecture)
    model = Decoder(spec, torch.bfloat16, torch.device("meta"))
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    blocks: list[tuple[Block, bool]] = [(layer.mixer, takes_mixer(layer.mixer.spec)) for layer in layers]
    for block in (layer.feed_forward for layer in layers):
        blocks.append((block, takes_feed_forward(block.spec, torch.bfloat16)))
    fused, alone = obstacle(model, experts=True) is None, experts_alone(model, experts=True)
    if any(block.reads_host and not ((fused or alone) and taken) for block, taken in blocks):
        return "torch"
    if alone:
        return "fused in part"
    if not fused:
        return "torch in graphs"
    return "fused" if all(taken for _, taken in blocks) else "fused in part"


def errors_page() -> str:
    """Every error code with its exception."""
    classes = [kind for kind in _subclasses(RolloutError) if kind.__doc__]
    of_protocol = [kind for kind in classes if kind.code in get_args(ErrorCode)]
    others = [kind for kind in classes if kind.code not in get_args(ErrorCode)]
    lines = [_ERRORS_INTRODUCTION]
    for title, kinds in (("Codes of the protocol", of_protocol), ("Errors of the client itself", others)):
        rows = [(f"`{kind.code}`", f"`{kind.__name__}`", " ".join((kind.__doc__ or "").split())) for kind in kinds]
        lines += ["", f"## {title}", "", *_table(("code", "exception", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _subclasses(kind: type[RolloutError]) -> list[type[RolloutError]]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


def api_page() -> str:
    """Signatures and docstrings of everything that `trainer_bridge` exports."""
    lines = [_API_INTRODUCTION]
    for name in sorted(trainer_bridge.__all__):
        thing: Any = getattr(trainer_bridge, name)
        text = _markdown(thing) if callable(thing) else "The version of this package, text."
        lines += ["", f"## {name}", "", f"`{name}{_signature(thing)}`", "", text]
        methods = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
        for method, function in methods:
            if not method.startswith("_") and function.__doc__:
                lines += ["", f"**`{method}{_signature(function)}`**", "", _markdown(function)]
    return "\n".join(lines) + "\n"


def _markdown(thing: Any) -> str:
    """A docstring with its `Args:` section, if any, as a list."""
    text, _, arguments = (inspect.getdoc(thing) or "").partition("\nArgs:\n")
    if not arguments:
        return text
    items = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", arguments, flags=re.MULTILINE)
    return f"{text}\n{re.sub(r'^ {8}', '  ', items, flags=re.MULTILINE)}"


def protocol_page() -> str:
    """The page as it is, with the table of the sampling rules made anew."""
    text = (FOLDER / "protocol.md").read_text(encoding="utf-8")
    return _with_table(text, "sampling rules", ("rule", "default", "range", "meaning"), [_rule(rule) for rule in RULES])


def gateway_page() -> str:
    """The page as it is, with the table of the flags made anew."""
    from rollout.gateway.settings import declared

    text = (FOLDER / _GATEWAY_PAGE).read_text(encoding="utf-8")
    flags = [
        (f"`--{name.replace('_', '-')}`", "" if default in (None, ()) else f"`{str(default).lower()}`", meaning)
        for name, _, meaning, default in declared()
    ]
    return _with_table(text, "flags", ("flag", "default", "meaning"), flags)


def _with_table(text: str, name: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A page with the table between its two comments made anew."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of the {name} -->"
    before, _, rest = text.partition(begin)
    return before + begin + "\n".join(_table(heads, list(rows))) + "\n" + end + rest.partition(end)[2]


def _rule(rule: SamplingRule) -> tuple[str, ...]:
    kind = "integer" if rule.kind is int else "number"
    bounds = f"{kind}, {'>' if rule.above_least else '>='} {rule.least}, <= {rule.most}"
    return f"`{rule.name}`", str(rule.default), bounds, rule.meaning


def _signature(thing: Any) -> str:
    """The parameters without their annotations, which are long; of a typed map its keys."""
    if is_typeddict(thing):
        return f": {', '.join(thing.__annotations__)}"
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # not a Python function
        return ""
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for name, each in signature.parameters.items() if name != "self"]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return shown.replace(repr(sys.executable), "sys.executable")  # the page is the same on every machine


def _section(metric: Metric) -> str:
    """The metric's section of the dashboard. Without a panel: the section of a metric with the same first word."""
    if metric.panel is not None:
        return metric.panel.section
    word = metric.name.partition("/")[0]
    return next(other.panel.section for other in METRICS if other.panel and other.name.startswith(f"{word}/"))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]


#: File names and the functions that write their text.
def fallback_page() -> str:
    """Every architecture that tests hold against transformers through its own code."""
    rows = [
        (f"`{name}`", "yes" if name in FAMILIES else "", held.attention, held.experts) for name, held in HELD.items()
    ]
    table = _table(("architecture", "also native", "attention", "experts run by"), rows)
    return "\n".join([_FALLBACK_INTRODUCTION, "", *table]) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "fallback.md": fallback_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "models.md": models_page,
    "api.md": api_page,
    "protocol.md": protocol_page,
    _GATEWAY_PAGE: gateway_page,
    "endpoints.md": endpoints_page,
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
