"""Prompts with images through the engine, held against transformers' whole model in float32."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import ModelSettings
from rollout.constraints.marker import AfterMarker, IdMarker
from rollout.constraints.matcher import AllowList
from rollout.engine.build import rebuild_engine
from rollout.engine.features.images.encodings import encodes_of
from rollout.engine.features.images.feature import ImagesFeature
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import PutAdapter
from rollout.engine.messages.to_service import Done
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.step.rehearsal import ALL_FEATURES
from rollout.engine.upload import UploadStaging
from rollout.models import load_model
from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder
from rollout.models.peft_tensors import load_peft_folder
from tests.support.engine.constraints import AlwaysMasked
from tests.support.engine.drafting import replayed_drafts
from tests.support.engine.harness import Bench, watch_prefills
from tests.support.engine.images import encoded, encoder_of, engine_prompt, submit
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.images import (
    FAMILIES,
    MODELS,
    SINGLE_FRAMES,
    ImagePrompt,
    logits_across,
    logits_of,
    make_model,
    picture,
    prompt_with,
)
from tests.support.peft_adapters import ATTENTION, make_adapter, merged

CPU = torch.device("cpu")


def load(folder: Path) -> Decoder:
    return load_model(ModelSettings(path=str(folder), images=True), CPU).model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Decoder]]:
    """Transformers' model and ours, by name."""
    made = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp("images")
        made[name] = make_model(name, folder), load(folder)
    return made


def prompts_of(name: str) -> dict[str, ImagePrompt]:
    """Prompts with awkward grids: none is square, several images, next to each other, a video, text between."""
    frames = [picture(4, 6, 7 + i, video=True) for i in range(3)]
    video = [frames[0], 2, frames[1], 2, frames[2]] if name in SINGLE_FRAMES else [picture(4, 6, 7, 3, True, 2.0)]
    return {
        "text": prompt_with(23),
        "one": prompt_with(5, picture(4, 10), 7, seed=1),
        "several": prompt_with(3, picture(2, 8, 1), 1, picture(6, 2, 2), 4, picture(2, 2, 3), 9, seed=2),
        "begins": prompt_with(picture(6, 4, 4), 3, seed=3),
        "video": prompt_with(4, *video, 6, seed=4),
    }


def long_prompts() -> dict[str, ImagePrompt]:
    """Images a token high or wide, and one that no window of a tower divides."""
    grids = {"low": (2, 60), "narrow": (60, 2), "one token": (2, 2), "uneven": (14, 18)}
    prompts = {name: prompt_with(3, picture(*grid, i), 4, seed=i) for i, (name, grid) in enumerate(grids.items())}
    parts = [part for i, grid in enumerate(grids.values()) for part in (picture(*grid, i), 1)]
    return prompts | {"all": prompt_with(*parts, seed=9)}


def check_greedy(bench: Bench, reference: Any, name: str, prompt: ImagePrompt) -> None:
    """The tokens are the likeliest ones of the whole model, their log-probs within 1e-4 of its own."""
    done = bench.completions[name, 0]
    logits = logits_of(reference, prompt, done.token_ids)[len(prompt.ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == done.token_ids
    exact = logits.log_softmax(-1)[torch.arange(len(done.token_ids)), done.token_ids]
    np.testing.assert_allclose(done.raw_logprobs, exact.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *nightly(*sorted(set(MODELS) - set(FAMILIES)))])
@pytest.mark.parametrize("chunk", [64, 7])
def test_greedy_tokens_of_mixed_rows_are_those_of_the_whole_model(name: str, chunk: int, models: Any) -> None:
    """A chunk of 7 tokens ends inside images."""
    reference, model = models[name]
    bench = Bench(model, prefill_chunk_tokens=chunk, max_rows=4)
    prompts = prompts_of(name)
    for each, prompt in prompts.items():
        submit(bench, each, prompt)
    bench.run()
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)
    assert encoded(bench) == sum(len(prompt.places) for prompt in prompts.values())


@pytest.mark.parametrize("name", [*FAMILIES, *nightly(*sorted(set(MODELS) - set(FAMILIES)))])
def test_images_of_odd_grids_are_those_of_the_whole_model(name: str, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model, prefill_chunk_tokens=17, max_rows=5, kv_pages=300)
    prompts = long_prompts()
    for each, prompt in prompts.items():
        submit(bench, each, prompt)
    bench.run()
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_logprobs_are_those_of_the_whole_model(name: str, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model, prefill_chunk_tokens=9)
    prompt = prompts_of(name)["several"]
    for max_tokens in (0, 1):
        submit(bench, f"r{max_tokens}", prompt, max_tokens, prompt_logprobs=True)
    bench.run()
    exact = logits_of(reference, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt.ids[1:])[:, None])[:, 0]
    for max_tokens in (0, 1):
        done = bench.completions[f"r{max_tokens}", 0]
        np.testing.assert_allclose(done.prompt_logprobs[1:], exact.numpy(), atol=1e-4)
        assert len(done.token_ids) == max_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_with_images_draw_again_after_a_marker(name: str, models: Any) -> None:
    """Their next position of the rotary embedding is not their place."""
    _, model = models[name]
    found = []
    for kind in (AlwaysMasked, AfterMarker):
        bench = Bench(model, max_rows=8)
        for i, (each, prompt) in enumerate(prompts_of(name).items()):
            constraint = kind(AllowList(tuple(range(20, 50)), model.spec.vocab), IdMarker((9,)))
            sampling = {"temperature": 1.0, "seed": i, "logit_bias": ((9, 4.0),)}
            submit(bench, each, prompt, 40, sampling=sampling, constraint=constraint)
        bench.run()
        found.append({key: done.token_ids for key, done in bench.completions.items()})
        bench.close()
    assert found[0] == found[1] and sum(9 in tokens[:-1] for tokens in found[0].values()) >= 2


def test_the_end_of_a_turn_after_a_video_is_not_that_of_tokens_with_the_ids_of_its_jump(models: Any) -> None:
    """After a video the content of a token has the jump of positions, in the bytes of two more token ids."""
    reference, model = models["Qwen2.5-VL"]
    base = prompt_with(9, picture(2, 2, 1, 5, True, 4.0))
    with closing(Bench(model, max_rows=4, page_size=32)) as bench:
        jump = engine_prompt(base, encoder_of(bench).spec).rope_jump
        assert jump > 0
        submit(bench, "turn", base, 2)
        bench.run()
        same = [*base.ids, bench.tokens("turn")[0], jump, 0]
        for name, ids, most in (("same", same, 1), ("longer", [*same, 7, 11], 6)):
            submit(bench, name, replace(base, ids=ids), most)
            bench.run()
        assert bench.done["longer"].cached_tokens > 0
        done = bench.completions["longer", 0]
        logits = logits_of(reference, replace(base, ids=[*same, 7, 11]), done.token_ids)
        exact = logits[len(same) + 1 : -1].log_softmax(-1)[torch.arange(len(done.token_ids)), done.token_ids]
        assert torch.allclose(torch.tensor(done.raw_logprobs), exact, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3.5"])
def test_a_prompt_that_ends_with_an_image_or_a_long_video(name: str, models: Any) -> None:
    """The last token is an image, so it can't take the decode forward, not even when all others are cached."""
    reference, model = models[name]
    bench = Bench(model, max_rows=4)
    last = picture(2, 2, 1, 5, True, 4.0) if name == "Qwen2.5-VL" else picture(2, 2, 1)
    prompts = {"image": prompt_with(8, picture(4, 6)), "small": prompt_with(9, last), "after": prompt_with(9, last, 1)}
    for turn in range(2):
        for each, prompt in prompts.items():
            submit(bench, f"{each}{turn}", prompt, n=2)
            bench.run()
            check_greedy(bench, reference, f"{each}{turn}", prompt)
            assert bench.tokens(f"{each}{turn}", 1) == bench.tokens(f"{each}{turn}")


def test_a_groups_image_and_equal_images_are_encoded_once(models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench = Bench(model, prefix_cache=False, prefill_chunk_tokens=8)
    image, prompts = picture(4, 10), {}
    prompts["group"] = prompt_with(5, image, 7)
    prompts["other text"] = prompt_with(9, image, 2, seed=3)
    for each, prompt in prompts.items():
        submit(bench, each, prompt, n=4)
    bench.run()
    assert encoded(bench) == 1
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)
        assert all(bench.tokens(each, index) == bench.tokens(each) for index in range(4))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_equal_prompt_is_cached_and_one_with_another_image_is_not(name: str, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model)
    prompt, other = (prompt_with(9, picture(4, 10, seed), 7) for seed in range(2))
    for each, which in (("first", prompt), ("same", prompt), ("other", other)):
        submit(bench, each, which)
        bench.run()
        check_greedy(bench, reference, each, which)
    cached = [bench.done[each].cached_tokens for each in ("first", "same", "other")]
    assert cached[:2] == [0, len(prompt.ids) - 1]
    assert cached[2] <= 9, "what comes before the image"
    assert encoded(bench) == 2


def test_images_that_do_not_fit_in_the_buffer_together_are_encoded_one_after_the_other(models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench = Bench(model, image_tokens=64, image_patches=64, kv_pages=64)
    prompt = prompt_with(2, picture(4, 10), 1, picture(6, 6, 1), 3, picture(4, 10), 2)
    sizes = watch_prefills(bench)
    submit(bench, "r", prompt)
    bench.run()
    check_greedy(bench, reference, "r", prompt)
    assert sizes[:3] == [13, 12, 12] and encoded(bench) == 3


@pytest.mark.parametrize(("kv_on_swap", "name"), checkered(("recompute", "keep"), FAMILIES))
def test_a_swap_in_the_middle_encodes_again_with_the_new_tower(
    name: str, kv_on_swap: str, models: Any, tmp_path: Path
) -> None:
    reference, _ = models[name]
    for seed, folder in enumerate(("old", "new")):
        newer = make_model(name, tmp_path / folder, seed)
    model, other = load(tmp_path / "old"), load(tmp_path / "new")
    mailbox = Mailbox()
    bench = Bench(model, receiver=mailbox, max_rows=2, kv_on_swap=kv_on_swap)
    prompts = {f"r{i}": prompt_with(4, picture(4, 6, i), 5, seed=i) for i in range(3)}
    for each, prompt in prompts.items():
        submit(bench, each, prompt, 30)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 15)
    for each, prompt in prompts.items():
        done = bench.completions[each, 0]
        if kv_on_swap == "keep" and set(done.versions) == {0, 1}:
            logits = logits_across(reference, newer, prompt, done.token_ids, done.versions.index(1))
            assert logits.argmax(-1).tolist() == done.token_ids
            continue
        both = [logits_of(model, prompt, done.token_ids)[len(prompt.ids) - 1 : -1] for model in (reference, newer)]
        logits = torch.stack(both)[torch.tensor(done.versions), torch.arange(30)]
        assert logits.argmax(-1).tolist() == done.token_ids
    assert set(bench.completions["r0", 0].versions) == {0, 1} and set(bench.completions["r2", 0].versions) == {1}


def test_an_update_without_the_tower_keeps_encodings(models: Any, tmp_path: Path) -> None:
    make_model("Qwen3-VL", tmp_path / "old")
    make_model("Qwen3-VL", tmp_path / "new", 1)
    model, other = load(tmp_path / "old"), load(tmp_path / "new")
    update = Update(1, other, model)
    mailbox, prompt = Mailbox(), prompt_with(4, picture(4, 6), 5)
    bench = Bench(model, receiver=mailbox)
    submit(bench, "old", prompt)
    bench.run()
    update.names = tuple(key for key in update.names if "visual" not in key)
    mailbox.ready = update
    bench.run()
    submit(bench, "new", prompt)
    bench.run()
    assert encoded(bench) == 1 and bench.done["new"].cached_tokens == 0


@pytest.mark.parametrize(("host_kv_gib", "name"), checkered((0.01, 0.0), FAMILIES))
def test_preempted_rows_go_on_as_before(name: str, host_kv_gib: float, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model, kv_pages=34, max_rows=4, host_kv_gib=host_kv_gib, image_tokens=64, image_patches=64)
    prompts = {f"r{i}": prompt_with(3, picture(4, 6, i), 4, seed=i) for i in range(5)}
    for each, prompt in prompts.items():
        submit(bench, each, prompt, 40)
    bench.run()
    assert sum(done.preemptions for done in bench.done.values()) > 0
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_turn_of_a_session_may_add_an_image(name: str, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model, prefix_cache=False)
    first = prompt_with(6, picture(4, 6), 5)
    submit(bench, "1", first, session=("c", "s"), session_lease_s=60.0)
    bench.run()
    check_greedy(bench, reference, "1", first)
    second = prompt_with(6, picture(4, 6), 5)
    second.ids += bench.tokens("1")
    more = prompt_with(2, picture(2, 8, 1), 3, seed=5)
    second.places += [(len(second.ids) + place, image) for place, image in more.places]
    second.ids += more.ids
    submit(bench, "2", second, session=("c", "s"), session_lease_s=60.0)
    bench.run()
    check_greedy(bench, reference, "2", second)
    assert bench.done["2"].cached_tokens >= len(first.ids) and encoded(bench) == 2
    changed = prompt_with(6, picture(4, 6, 8), 5)
    changed.ids += bench.tokens("1")
    submit(bench, "3", changed, session=("c", "s"), session_lease_s=60.0)
    bench.run()
    check_greedy(bench, reference, "3", changed)
    assert bench.done["3"].cached_tokens <= 6, "the image before what is kept is another one"


def test_a_completion_is_continued_after_its_tokens(models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench = Bench(model)
    prompt = prompt_with(6, picture(4, 6), 5)
    submit(bench, "whole", prompt, 12)
    bench.run()
    known = np.array(bench.tokens("whole")[:5], np.int32)
    submit(bench, "rest", prompt, 12, prior=Prior(known))
    bench.run()
    assert bench.tokens("whole")[5:] == bench.tokens("rest")
    check_greedy(bench, reference, "whole", prompt)


def test_drafts_of_rows_with_images_change_no_token(models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench = Bench(model, speculation="suffix", speculation_tokens=3)
    prompts = {f"r{i}": prompt_with(3, picture(4, 6, i), 4, seed=i) for i in range(3)}
    for each, prompt in prompts.items():
        submit(bench, each, prompt, 60)
    bench.run()
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)
    assert bench.drafts.accepted > 0


@pytest.mark.parametrize(
    "name", ["Qwen3-VL", *nightly(*(name for name in sorted(MODELS) if not name.startswith(("Qwen3-VL", "Qwen3.5"))))]
)
def test_a_draft_model_drafts_for_rows_with_images(name, tmp_path) -> None:
    """Beside rows of text; the draft model sees placeholders, and places instead of the axes."""
    target, head = tmp_path / "target", tmp_path / "head"
    reference = make_model(name, target)
    config = head_config(reference.config.get_text_config())
    save_head(head, config, random_head(config))
    prompts = prompts_of(name)

    def run(model: Decoder, **fields: Any) -> Bench:
        bench = Bench(model, prefill_chunk_tokens=16, **fields)
        for i, (each, prompt) in enumerate(prompts.items()):
            submit(bench, each, prompt, 30, sampling={"temperature": 0.0, "seed": i})
        return bench.finish()

    plain = run(load(target))
    recorded = {done.seed: done.token_ids for done in plain.completions.values()}
    model = load_model(ModelSettings(path=str(target), images=True), CPU, draft=head).model
    bench = run(model, speculation="heads", speculation_model="a folder", **replayed_drafts(recorded, 0.2))
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)
    assert bench.drafts.accepted > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pixels_may_have_16_bits(dtype: torch.dtype, models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench = Bench(model)
    exact, image = prompt_with(6, picture(4, 6), 5), picture(4, 6)
    rounded = torch.from_numpy(image.pixels).to(dtype)
    exact.places[0][1].pixels = rounded.float().numpy()
    image.pixels = rounded.view(torch.int16).numpy().view(np.uint16 if dtype == torch.bfloat16 else np.float16)
    submit(bench, "r", prompt_with(6, image, 5))
    bench.run()
    check_greedy(bench, reference, "r", exact)


class Fused(FusedDecoder):
    """Takes what the torch twins of a step's begin return: views that are not contiguous."""

    def __call__(self, token_ids_T: torch.Tensor, batch: AttentionBatch, kv: KVCache) -> torch.Tensor:
        parts = {name: getattr(batch, name) for name in ("positions_T", "kv_slots_T", "context_lens_B")}
        whole = {name: part.contiguous() for name, part in parts.items()}
        return super().__call__(token_ids_T.contiguous(), replace(batch, **whole), kv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize("name", [*FAMILIES[:1], *nightly(*FAMILIES[1:])])
def test_the_fused_kernels_take_images(name: str, models: Any) -> None:
    reference, model = models[name]
    bench = Bench(model, prefill_chunk_tokens=16)
    step = bench.engine.executor.step
    step.forward, step.skips_unwanted = Fused(model), True
    prompts = {"images": prompt_with(3, picture(2, 8, 1), 2, picture(6, 4, 2), 2), "text": prompt_with(4)}
    for each, prompt in prompts.items():
        submit(bench, each, prompt, 3)
    bench.run()
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)


def test_the_largest_image_fits_in_the_buffer(models: Any) -> None:
    """The rehearsal of a GPU encodes it."""
    bench = Bench(models["Qwen3-VL"][1], image_tokens=128, image_patches=450)
    encoder = encoder_of(bench)
    staging = UploadStaging(torch.zeros(1, dtype=torch.int32))
    encoder.put_largest(staging, 1, np.zeros(1, np.int64), ALL_FEATURES)
    (encode,) = encodes_of(staging.extras[0])
    assert len(encode.pixels.patches) > 400 and len(encode.cells) <= len(encoder.buffer_PW)
    encoder.encode([encode])


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen3.5"])
def test_a_sleep_leaves_nothing_of_the_encodings(name: str, models: Any, tmp_path: Path) -> None:
    reference = make_model(name, tmp_path)
    bench = Sleeping(load(tmp_path), max_rows=2, prefill_chunk_tokens=8, image_tokens=64, image_patches=64)
    prompts = {f"r{i}": prompt_with(3, picture(4, 10, i), 4, seed=i) for i in range(4)}
    for each, prompt in prompts.items():
        submit(bench, each, prompt, 20)
    for ticks in (2, 3, 12):
        bench.ticks(ticks)
        assert isinstance(bench.sleep(), Done)
        assert not bench.pages.backed and find_feature(bench.engine.roster.features, ImagesFeature).encodings.used == 0
        assert isinstance(bench.wake(), Done)
    bench.run()
    for each, prompt in prompts.items():
        check_greedy(bench, reference, each, prompt)


def test_an_engine_that_is_built_anew_encodes_anew(models: Any) -> None:
    reference, model = models["Qwen3-VL"]
    bench, prompt = Bench(model), prompt_with(3, picture(4, 10), 4)
    submit(bench, "before", prompt)
    bench.run()
    buffer = encoder_of(bench).buffer_PW
    rebuild_engine(bench.engine, bench.settings)
    buffer.fill_(float("nan"))
    submit(bench, "after", prompt)
    bench.run()
    check_greedy(bench, reference, "after", prompt)
    assert encoder_of(bench).buffer_PW is buffer and encoded(bench) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_changes_what_is_said_of_an_image(name: str, models: Any, tmp_path: Path) -> None:
    reference, model = models[name]
    folder = make_adapter(reference, tmp_path, 1, ATTENTION)
    bench = Bench(model, adapter_slots=2, adapter_rank=8, prefill_chunk_tokens=8)
    bench.engine.inbox.put(PutAdapter("a", load_peft_folder(folder, model.spec, 8, torch.float32), token=0))
    prompt = prompt_with(5, picture(4, 6), 4)
    for each, adapter in (("plain", None), ("adapted", "a"), ("plain again", None)):
        submit(bench, each, prompt, adapter=adapter)
    bench.run()
    check_greedy(bench, reference, "plain", prompt)
    check_greedy(bench, merged(reference, folder), "adapted", prompt)
    assert bench.tokens("plain") == bench.tokens("plain again") != bench.tokens("adapted")
    assert encoded(bench) == 1, "the tower has no adapter"


def test_an_idle_session_with_an_image_that_gave_way_is_computed_again(models: Any) -> None:
    reference, model = models["Qwen2.5-VL"]
    bench = Bench(model, kv_pages=24, max_rows=2, prefix_cache=False)
    talks = {f"s{i}": prompt_with(3, picture(4, 6, i), 4, seed=i) for i in range(4)}
    for turn, names in enumerate((list(talks), list(reversed(talks)))):
        for name in names:
            submit(bench, f"{name}.{turn}", talks[name], 16, session=("c", name), session_lease_s=60.0)
            bench.run()
            check_greedy(bench, reference, f"{name}.{turn}", talks[name])
            talks[name].ids += [*bench.tokens(f"{name}.{turn}"), 5 + turn]
    reused = [bench.done[f"{name}.1"].cached_tokens for name in talks]
    assert reused[0] == 0 and reused[3] > 13 and encoded(bench) == len(talks), "the buffer still has all images"
