"""Prompts with images: completions a second, time to first token and images encoded, for Qwen3-VL-8B's shape.

    PYTHONPATH=.:kernels python -m scripts.bench.images --out FILE                        this engine, in this process
    PYTHONPATH=.:kernels VLLM_PYTHON -m scripts.bench.images --engine vllm --out FILE     vLLM, with its own Python

Every prompt has one image and some text, and `n` completions of a fixed length. All requests are there at the start.
`text` is the control: prompts of the same length without images. vLLM gets pictures and processes them itself, in
advance: its time includes only what its engine does with the pixels. Rows are printed, and merged into FILE.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.output import write_results

IMAGE_TOKEN = 151655
_VISION_START, _VISION_END = 151652, 151653
_PATCH, _MERGE = 16, 2
#: Config of the shapes; `tiny` is for a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        "text": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        },
        "vision": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
        "deepstack": [8, 16, 24], "section": [24, 20, 20],
    },
    "tiny": {
        "text": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        },
        "vision": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        "deepstack": [0], "section": [4, 2, 2],
    },
}  # fmt: skip


def write_checkpoint(shape: str, folder: Path) -> Path:
    """A folder with the config.json of a shape and no weights."""
    parts = SHAPES[shape]
    hidden = parts["text"]["hidden_size"]
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": 151936, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, **parts["text"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": parts["section"], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl_vision", "in_channels": 3, "patch_size": _PATCH, "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": hidden,
        "deepstack_visual_indexes": parts["deepstack"], "hidden_act": "gelu_pytorch_tanh", **parts["vision"],
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16",
        "image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1, "vision_start_token_id": _VISION_START,
        "vision_end_token_id": _VISION_END, "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text_of(seed: int, tokens: int) -> np.ndarray:
    """Random ids of words, int32."""
    return np.random.default_rng(seed).integers(100, 150_000, tokens).astype(np.int32)


def run_ours(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure this engine: prompts with images, then prompts of text alone."""
    import torch

    from rollout.config import EngineConstants, EngineSettings, MetricsSettings, ModelSettings, Settings
    from rollout.engine.build import build_engine, local_links
    from rollout.engine.device.streams import make_device
    from rollout.engine.features.images.encoder import ImageEncoder
    from rollout.engine.features.images.feature import ImagesFeature
    from rollout.engine.messages.prompts import Prompt, TokenIds
    from rollout.engine.messages.requests import Request, SamplingParams
    from rollout.engine.messages.to_engine import Submit
    from rollout.engine.messages.to_service import Event, RequestDone
    from rollout.engine.schedule.step_feature import find_feature
    from rollout.models import load_model

    device = make_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_checkpoint(args.shape, Path(folder)))
        model_settings = ModelSettings(path=path, load_format="random", images=True)
        model = load_model(model_settings, device.torch_device).model
    side = args.side // _PATCH
    length = args.text + (side // _MERGE) ** 2
    engine_settings = EngineSettings(
        max_rows=args.rows,
        max_context_tokens=length + args.new + 16,
        kv_memory_fraction=0.88,
        kv_memory_max_gib=None if torch.cuda.is_available() else 0.25,
        constants=EngineConstants(image_tokens=max(16_384, length), image_patches=max(16_384, side**2)),
    )
    settings = Settings(engine=engine_settings, metrics=MetricsSettings(wandb=False))
    done: list[RequestDone] = []

    def take(events: list[Event]) -> None:
        done.extend(event for event in events if isinstance(event, RequestDone))

    links = local_links(settings, take)
    engine = build_engine(settings, device, model, links)
    encoder, rows = find_feature(engine.executor.step.features, ImageEncoder), []
    assert encoder is not None

    def prompt_of(seed: int, kind: str) -> Prompt:
        if kind == "text":
            return Prompt.of_tokens(text_of(seed, length))
        words = text_of(seed, args.text)
        return Prompt((TokenIds(words[:4]), picture(seed, side, encoder.spec), TokenIds(words[4:])))

    images = find_feature(engine.roster.features, ImagesFeature)
    assert images is not None
    encodings = images.encodings
    for run, (kind, count) in enumerate((("image", 2), ("image", args.prompts), ("text", args.prompts))):
        prompts = [prompt_of(1000 * run + i, kind) for i in range(count)]
        done.clear()
        steps, encoded, began_s = engine.meter.steps, encodings.counts.encoded, time.perf_counter()
        for i, prompt in enumerate(prompts):
            request = Request((f"run{run}", str(i)), prompt, args.new, args.n, SamplingParams(seed=i))
            engine.inbox.put(Submit(request))
        engine.tick()
        while engine.busy:
            engine.tick()
        seconds = time.perf_counter() - began_s
        if run:  # the first one warms up
            first_s = [each.queued_s + each.prefill_s for each in done]
            rows.append(
                row(args, kind, seconds, sorted(first_s), encodings.counts.encoded - encoded)
                | {"steps": engine.meter.steps - steps}
            )
    engine.check_integrity()
    engine.executor.close()
    return rows


def picture(seed: int, side: int, tower: Any) -> Any:
    """A prompt item: an image of `side` x `side` patches, as a processor returns it in bfloat16."""
    from hashlib import blake2b

    import torch

    from rollout.engine.messages.prompts import Media, Pixels

    grid = (1, side, side)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(side * side, tower.patch_values, generator=generator).to(torch.bfloat16)
    patches = values.view(torch.int16).numpy().view(np.uint16)
    axes_3L, advance = tower.positions(grid)
    ids = np.full(tower.tokens(grid), tower.placeholders[0], np.int32)
    return Media(ids, Pixels(blake2b(patches.tobytes(), digest_size=32).digest(), grid, patches), axes_3L, advance)


def run_vllm(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure vLLM: the same shape, the same numbers of tokens."""
    from scripts.bench.peers.vllm_engine import ENVIRONMENT, capture_sizes, fill_like_a_model

    for name, value in {**ENVIRONMENT, "VLLM_MM_HASHER_ALGORITHM": "sha256"}.items():  # its default needs a package
        os.environ.setdefault(name, value)
    import vllm
    from PIL import Image
    from vllm.sampling_params import RequestOutputKind

    length = args.text + (args.side // _PATCH // _MERGE) ** 2
    with tempfile.TemporaryDirectory() as folder:
        path = write_processor(write_checkpoint(args.shape, Path(folder)), args.side**2)
        llm = vllm.LLM(
            model=str(path),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(4096, length + args.new + 16),
            max_num_seqs=args.rows,
            gpu_memory_utilization=0.92,
            async_scheduling=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            generation_config="vllm",
            seed=0,
            attention_backend="FLASH_ATTN",
            limit_mm_per_prompt={"image": 1, "video": 0},
            compilation_config={
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": capture_sizes(args.rows),
            },
        )
        llm.apply_model(fill_like_a_model)
        engine, rows, number = llm.llm_engine, [], 0
        for run, (kind, count) in enumerate((("image", 2), ("image", args.prompts), ("text", args.prompts))):
            sampling = vllm.SamplingParams(
                temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0, max_tokens=args.new, n=args.n,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            prompts: list[dict[str, Any]] = []
            for i in range(count):
                seed = 1000 * run + i
                if kind == "text":
                    prompts.append({"prompt_token_ids": text_of(seed, length).tolist()})
                    continue
                pixels = np.random.default_rng(seed).integers(0, 256, (args.side, args.side, 3), np.uint8)
                words = text_of(seed, args.text - 2).tolist()
                ids = [*words[:4], _VISION_START, IMAGE_TOKEN, _VISION_END, *words[4:]]
                prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": Image.fromarray(pixels)}})
            first: dict[str, float] = {}
            added_s = time.perf_counter()
            for prompt in prompts:  # its processor runs here, before the clock
                engine.add_request(str(number), prompt, sampling)
                number += 1
            began_s = time.perf_counter()
            while engine.has_unfinished_requests():
                for output in engine.step():
                    first.setdefault(output.request_id, time.perf_counter() - began_s)
            seconds = time.perf_counter() - began_s
            if run:
                found = row(args, kind, seconds, sorted(first.values()), count if kind == "image" else 0)
                rows.append(found | {"processor_s": began_s - added_s, "version": vllm.__version__})
    return rows


def write_processor(folder: Path, most_pixels: int) -> Path:
    """Add a processor to a checkpoint: a tokenizer of a few words, and the defaults for images.

    Larger images than `most_pixels` are made smaller. vLLM sets memory aside for the largest one.
    """
    names = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": _VISION_START}
    names |= {"<|vision_end|>": _VISION_END, "<|image_pad|>": IMAGE_TOKEN, "<|video_pad|>": IMAGE_TOKEN + 1}
    added = [
        {"id": token, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for name, token in names.items()
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, **names}, "unk_token": "[UNK]"},
    }  # fmt: skip
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": _PATCH, "merge_size": _MERGE,
        "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": min(65_536, most_pixels), "longest_edge": most_pixels},
        "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor"},
        "preprocessor_config.json": pixels,
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def row(args: argparse.Namespace, kind: str, seconds: float, first_s: list[float], encoded: int) -> dict[str, Any]:
    """The figures of one run."""
    completions = args.prompts * args.n
    return {
        "engine": args.engine,
        "shape": args.shape,
        "kind": kind,
        "rows": args.rows,
        "completions": completions,
        "seconds": round(seconds, 3),
        "completions_per_s": round(completions / seconds, 3),
        "tokens_per_s": round(completions * args.new / seconds, 1),
        "first_token_s": {"least": round(first_s[0], 4), "median": round(statistics.median(first_s), 4)},
        "images_encoded": encoded,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=("ours", "vllm"), default="ours")
    add("--out", type=Path, help="JSON file to create or extend")
    add("--shape", choices=SHAPES, default="qwen3-vl-8b")
    add("--device", default="auto", help="of this engine")
    add("--prompts", type=int, default=48)
    add("--n", type=int, default=8, help="completions of a prompt")
    add("--rows", type=int, default=128)
    add("--side", type=int, default=1024, help="pixels of an image's height and width")
    add("--text", type=int, default=128, help="tokens of text of a prompt")
    add("--new", type=int, default=256, help="tokens of a completion")
    args = parser.parse_args(argv)
    rows = run_ours(args) if args.engine == "ours" else run_vllm(args)
    for each in rows:
        print(json.dumps(each), flush=True)
    if args.out is not None:
        kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
        write_results(args.out, [*kept, *rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
