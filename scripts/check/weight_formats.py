"""What each format of weights and KV costs: log-probs of a model whose weights went through codes, against float32.

    PYTHONPATH=.:kernels python -m scripts.check.weight_formats FOLDER [--tokens 1024] [--length 8192] [--out FILE]
    PYTHONPATH=.:kernels python -m scripts.check.weight_formats --shape qwen3-8b --layers 2 --vocab 8192

The first form reads a real model, and the tokens are text of this repository. The second one has random weights of a
real model's sizes, and random tokens. The reference is the same model in float32 with 16-bit weights. For each format
it is given the values that the codes stand for:

    float32    the error of the format alone
    bfloat16   with activations in bf16, as a worker computes; the row `bf16` is a worker without codes
    codes      with activations in bf16, rounded to codes before coded products, as with `fp8_activations_from = 1`

The rows `KV ...` have 16-bit weights, and keys and values in a `kv_dtype`.

Log-probs are those of the next token of the text. The ratio is exp(log-prob - reference): the importance weight of a
token that a worker drew and a trainer in float32 scores.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.linear.coded import rounded_rows
from rollout_kernels.moe.formats import Format

from rollout.config import ModelSettings
from rollout.models import AttentionBatch, Decoder, KVCache, PromptChunk, load_model
from rollout.models.coded import CodedView
from rollout.models.layers import Linear
from scripts.bench.output import write_results
from scripts.bench.shapes import model_config

_FORMATS: tuple[Format, ...] = ("fp8_block", "fp8_row", "mxfp8")
#: Of a worker without codes, and with keys and values as codes.
_KV = {"bf16": None, "KV fp8_e4m3": torch.float8_e4m3fn, "KV fp8_int8": torch.int8}
#: Ratios outside of these count as far; truncated importance sampling often cuts at 2.
_NEAR, _CUT = (0.8, 1.25), 2.0
#: Tokens that are computed at once.
_CHUNK = 1024
_PAGE = 16


def load(folder: Path, dtype: str, format: Format, random: bool, device: torch.device) -> Decoder:
    """A model; with codes, if the format has any. Raises ValueError if the format does not fit it."""
    how: Any = "random" if random else "auto"
    settings = ModelSettings(path=str(folder), dtype=dtype, load_format=how)  # type: ignore[arg-type]
    model = load_model(settings, device, weights=format).model
    assert isinstance(model, Decoder), "a native family"
    return model


@torch.no_grad()
def decode_into(plain: Decoder, coded: Decoder) -> Decoder:
    """Give a plain model the weights that the codes of another one stand for; returns it."""
    views, of_codes = plain.hf_views(), coded.hf_views()
    for region in coded.hf_regions():
        for name in region.alternatives[0]:
            view = of_codes[name]
            if isinstance(view, CodedView):
                views[name].copy_(view.decoded_values())
    return plain


def round_inputs(plain: Decoder, coded: Decoder) -> Decoder:
    """Make a plain model round the activations of the products that are codes in another one; returns it."""
    for name, module in coded.named_modules():
        if isinstance(module, Linear) and module.format != "plain":
            _round_inputs_of(plain.get_submodule(name))  # type: ignore[arg-type]
    return plain


def _round_inputs_of(linear: Linear) -> None:
    product, add_to = linear.product, linear.add_to
    linear.product = lambda x_TK: product(rounded_rows(x_TK))  # type: ignore[method-assign]
    linear.add_to = lambda residual_TN, x_TK: add_to(residual_TN, rounded_rows(x_TK))  # type: ignore[method-assign]


@torch.inference_mode()
def hidden_states(
    model: Decoder, tokens: Sequence[int], length: int, kv_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The last hidden states [T, H] of sequences of `length` tokens, which begin without the tokens before them."""
    parts, device = [], model.embed.device
    for first in range(0, len(tokens), length):
        sequence = tokens[first : first + length]
        pages = -(-len(sequence) // _PAGE)
        kv = KVCache.allocate(model.spec, pages + 1, _PAGE, kv_dtype or model.embed.dtype, device)
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]
        for begin in range(0, len(sequence), _CHUNK):
            end = min(begin + _CHUNK, len(sequence))
            at, lengths = torch.arange(begin, end, device=device), torch.tensor([end], dtype=torch.int32, device=device)
            batch = AttentionBatch(at, at + _PAGE, table, lengths, end, (PromptChunk(0, end - begin, end),))
            parts.append(model(torch.tensor(sequence[begin:end], device=device), batch, kv))
    return torch.cat(parts)


@torch.inference_mode()
def compare(
    model: Decoder, hidden_TH: torch.Tensor, exact: Decoder, exact_TH: torch.Tensor, tokens: Sequence[int], length: int
) -> dict[str, float]:
    """The figures of a row: at all positions, and at the later half of each sequence."""
    next_T = torch.tensor(tokens[1:], device=hidden_TH.device)
    scored = torch.tensor([at for at in range(len(next_T)) if (at + 1) % length], device=hidden_TH.device)
    kl, change, same = [], [], []
    for at in scored.split(_CHUNK):
        got_TV, exact_TV = (
            of.compute_logits(states[at]).float().log_softmax(-1)
            for of, states in ((model, hidden_TH), (exact, exact_TH))
        )
        kl.append((exact_TV.exp() * (exact_TV - got_TV)).sum(-1))
        change.append((got_TV - exact_TV).gather(1, next_T[at, None])[:, 0])
        same.append(got_TV.argmax(-1) == exact_TV.argmax(-1))
    kl_T, change_T, late_T = torch.cat(kl), torch.cat(change), scored % length >= length // 2
    ratio_T = change_T.exp()
    return {
        "mean_abs": change_T.abs().mean().item(),
        "p99_abs": change_T.abs().quantile(0.99).item(),
        "kl": kl_T.mean().item(),
        "kl_late": kl_T[late_T].mean().item(),
        "ratio_least": ratio_T.min().item(),
        "ratio_most": ratio_T.max().item(),
        "far": ((ratio_T < _NEAR[0]) | (ratio_T > _NEAR[1])).float().mean().item(),
        "cut": (ratio_T > _CUT).float().mean().item(),
        "same_best": torch.cat(same).float().mean().item(),
    }


def measure(
    folder: Path, tokens: Sequence[int], length: int, random: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for each format and dtype."""
    exact = load(folder, "float32", "plain", random, device)
    exact_TH = hidden_states(exact, tokens, length)
    plain = load(folder, "bfloat16", "plain", random, device)
    for name, kv_dtype in _KV.items():
        figures = compare(plain, hidden_states(plain, tokens, length, kv_dtype), exact, exact_TH, tokens, length)
        yield {"format": name, "computed_in": "bfloat16", **figures}
    del plain
    cases: list[tuple[Format, str]] = [("fp8_block", "codes")]
    cases += [(format, dtype) for dtype in ("float32", "bfloat16") for format in _FORMATS]
    for format, dtype in cases:
        try:
            coded = load(folder, "float32", format, random, device)
        except ValueError as error:
            print(f"{format}: {error}", flush=True)
            continue
        model = decode_into(load(folder, "bfloat16" if dtype == "codes" else dtype, "plain", random, device), coded)
        if dtype == "codes":
            round_inputs(model, coded)
        del coded
        figures = compare(model, hidden_states(model, tokens, length), exact, exact_TH, tokens, length)
        yield {"format": format, "computed_in": dtype, **figures}


def text_tokens(folder: Path, count: int) -> list[int]:
    """The first tokens of this repository's pages, in the order of their names."""
    from transformers import AutoTokenizer

    text = "\n\n".join(path.read_text() for path in sorted(Path("docs").rglob("*.md")))
    return AutoTokenizer.from_pretrained(folder)(text[: 8 * count])["input_ids"][:count]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint in 16 bits, with its tokenizer")
    parser.add_argument("--shape", help="random weights of these sizes")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192, help="with --shape: a smaller vocabulary")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence, at most")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if (args.folder is None) == (args.shape is None):
        parser.error("name a folder, or --shape")
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder
        if folder is None:
            folder = Path(made)
            config = model_config(args.shape, args.layers) | {"vocab_size": args.vocab}
            (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 1}))
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(args.vocab, (args.tokens,), generator=generator).tolist()
        else:
            tokens = text_tokens(folder, args.tokens)
        rows = []
        for row in measure(folder, tokens, min(args.length, len(tokens)), args.shape is not None, args.device):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                write_results(args.out, rows, model=args.shape or args.folder.name, tokens=len(tokens))


if __name__ == "__main__":
    main()
