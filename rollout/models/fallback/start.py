"""The choice of the way in which a fallback model runs: its steps over the paged cache against its own eager forward.

Two rows get their prompts in chunks, then decode together. Their logits are compared with the same module's under
transformers' eager attention and experts, on the same device, with the same weights. If layers take into account what a
way does not pass on, such as biases by position or an earlier state, the model differs there, and the next way is
tried. A model that is right in no way is refused, and not served wrongly.

The tokens are few. If the config names limits, such as windows, a small model is compared in the same way (`limits`).
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.fallback.attention import PAGED
from rollout.models.fallback.experts import EXPERTS
from rollout.models.fallback.host_reads import HostReads
from rollout.models.fallback.limits import NoRoomError, has_limits, with_small_limits
from rollout.models.fallback.model import TransformersModel, set_attention
from rollout.models.fallback.ways import WAYS

log = logging.getLogger(__name__)

#: Lengths of the two rows: one passes all small limits, the other the limits that do not count blocks. The tokens come
#: as prompts with these later pieces, and as decode steps.
_LENGTHS, _LATER, _DECODED = (33, 12), (9, 4), 4
_PAGE_SIZE = 4
#: Largest difference of logits, relative to their standard deviation over the vocabulary.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class _Rows:
    """Rows of tokens over a small paged cache; each step appends to all of them."""

    def __init__(self, model: TransformersModel) -> None:
        self._model, self._device = model, model.embed.device
        width = -(-max(_LENGTHS) // _PAGE_SIZE)
        pages = len(_LENGTHS) * width
        dtype = model.embed.dtype
        self._states = model.spec.allocate_states(len(_LENGTHS) + 1, dtype, self._device)
        for state in self._states.tensors:
            state.fill_(float("nan"))  # a row that begins reads no state
        self._kv = KVCache.allocate(model.spec, pages + 1, _PAGE_SIZE, dtype, self._device, states=self._states)
        self._tables = torch.arange(pages, 0, -1, dtype=torch.int32, device=self._device).view(-1, width)
        self._lengths = [0] * len(_LENGTHS)

    def append(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Append tokens to each row in one step; the logits after each of them, [tokens, V] for each row."""
        decode = all(len(piece) == 1 for piece in pieces)
        starts, chunks, begin = list(self._lengths), [], 0
        for row, piece in enumerate(pieces):
            self._lengths[row] += len(piece)
            chunks.append(PromptChunk(begin, len(piece), self._lengths[row]))
            begin += len(piece)
        spans = list(zip(starts, self._lengths, strict=True))
        positions = torch.cat([torch.arange(*span) for span in spans]).to(self._device)
        rows = torch.cat([torch.full((len(piece),), row) for row, piece in enumerate(pieces)]).to(self._device)
        pages = self._tables[rows, positions // _PAGE_SIZE].long()
        query_starts = [*(chunk.query_start for chunk in chunks), begin]
        batch = AttentionBatch(
            positions_T=positions,
            kv_slots_T=pages * _PAGE_SIZE + positions % _PAGE_SIZE,
            page_table_BP=self._tables,
            context_lens_B=torch.tensor(self._lengths, dtype=torch.int32, device=self._device),
            max_context=max(self._lengths),
            chunks=None if decode else tuple(chunks),
            query_starts_C1=torch.tensor(query_starts, dtype=torch.int32, device=self._device),
            rows_B=torch.arange(1, len(pieces) + 1, device=self._device),
        )
        logits = self._model.compute_logits(self._model(torch.cat(pieces), batch, self._kv))
        return list(logits.split([len(piece) for piece in pieces]))


def serve(module: Any, max_positions: int) -> TransformersModel:
    """The module as a model that runs in the first way whose logits equal the module's own.

    Raises ValueError with what is wrong in each way if there is none.
    """
    reasons: dict[str, list[str]] = {}
    small = _small_of(module)
    for way in WAYS:
        try:
            model = TransformersModel(module, max_positions, way)
            check_start(model)
            if small is not None:
                _check_limits(TransformersModel(small, max_positions, way))
        except ValueError as error:
            reason = str(error)
        # Code of transformers that does not expect such calls fails in many ways.
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            reason = f"its own code fails: {type(error).__name__}: {error!s:.500}"
        else:
            return model
        reasons.setdefault(reason, []).append(str(way))
    raise ValueError("; ".join(f"{reason} ({' | '.join(ways)})" for reason, ways in reasons.items()))


def _small_of(module: Any) -> Any | None:
    """The small model of a module whose config names limits, or None."""
    if not has_limits(module.config):
        return None
    try:
        return with_small_limits(module)
    except NoRoomError as obstacle:
        log.warning("contexts longer than a window are not compared with transformers' own: %s", obstacle)
        return None


def _check_limits(small: TransformersModel) -> None:
    try:
        check_start(small)
    except ValueError as error:
        raise ValueError(f"with windows and other limits that the tokens pass, {error}") from error


def check_start(model: TransformersModel) -> None:
    """Compare a loaded model with its own eager attention. Raises ValueError with the figures if they differ."""
    tokens = _tokens(model)
    with torch.inference_mode():
        with _as_transformers_runs_it(model):
            expected = [model.module(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens]
        rows = _Rows(model)
        steps = [rows.append(pieces) for pieces in _steps(tokens)]
    done = [0] * len(tokens)
    errors: dict[tuple[str, int], list[torch.Tensor]] = {}
    for number, step in enumerate(steps):
        for row, logits in enumerate(step):
            wanted = expected[row][done[row] : done[row] + len(logits)]
            done[row] += len(logits)
            difference = (logits - wanted).pow(2).mean(-1).sqrt() / wanted.std(-1).clamp_min(1e-6)
            kind = ("first pieces of prompts", "later pieces of prompts")[number] if number < 2 else "decode steps"
            errors.setdefault((kind, row), []).append(difference)
    tolerance = _TOLERANCE[model.embed.dtype]
    for (kind, _), parts in errors.items():
        # The median of each row in 16 bits: there a router may choose another expert for single tokens.
        exact = model.embed.dtype == torch.float32
        error = float(torch.cat(parts).max() if exact else torch.cat(parts).median())
        if not error <= tolerance:
            raise ValueError(
                f"over the paged cache its logits after {kind} differ from its own eager attention's by "
                f"{error:.2g} of their standard deviation ({tolerance:g} is allowed)"
            )


def capture_obstacle(model: TransformersModel) -> str:
    """Why decode steps of a model cannot be captured as CUDA graphs; empty if they can. Runs a step on its device."""
    if model.spec.way.attention == "gathered":
        return "its layers compute attention themselves, from gathered pages"
    if any(layer.kv.k_dim != layer.kv.v_dim for layer in model.spec.layers):
        return "its attention has values of another dimension than keys, for which there are no kernels"
    tokens = _tokens(model)
    *prompts, decode = list(_steps(tokens))[:3]
    with torch.inference_mode():
        rows = _Rows(model)
        for pieces in prompts:
            rows.append(pieces)
        with HostReads() as reads:
            rows.append(decode)
    return f"its steps read values of the device on the host ({', '.join(sorted(reads.found))})" if reads.found else ""


def _tokens(model: TransformersModel) -> list[torch.Tensor]:
    most, generator = min(model.spec.vocab, len(model.embed)), torch.Generator().manual_seed(0)
    # No token twice while other tokens are left: equal keys may be chosen in any order.
    orders = [torch.randperm(most, generator=generator).repeat(-(-n // most))[:n] for n in _LENGTHS]
    return [order.to(model.embed.device) for order in orders]


def _steps(tokens: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The pieces of each step: two chunks of the prompts, then one token for each row at a time."""
    prompts = [row[:-_DECODED] for row in tokens]
    middles = [len(prompt) - later for prompt, later in zip(prompts, _LATER, strict=True)]
    yield [prompt[:middle] for prompt, middle in zip(prompts, middles, strict=True)]
    yield [prompt[middle:] for prompt, middle in zip(prompts, middles, strict=True)]
    for index in range(_DECODED, 0, -1):
        yield [row[len(row) - index :][:1] for row in tokens]


@contextlib.contextmanager
def _as_transformers_runs_it(model: TransformersModel) -> Iterator[None]:
    """Eager attention and experts for the time being."""
    module = model.module
    experts = type(module)._can_set_experts_implementation()
    set_attention(module, "eager")
    if experts:
        module.set_experts_implementation("eager")
    try:
        yield
    finally:
        set_attention(module, PAGED if model.spec.way.attention == "paged" else "eager")
        if experts:
            module.set_experts_implementation(EXPERTS)
