"""The checkpoints that the demo ships: they load with transformers, count, and share what decides keys and values."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3ForCausalLM

from rollout.demo.counting import Counter

FOLDER = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints"
NAMES = {1: "ones", 2: "twos"}
MARGIN = 25.0  # nats: 15 wrong tokens, each at most exp(-25) likely, stay below 1e-9


@pytest.fixture(scope="module")
def counters():
    """step -> model, float32 on the CPU."""
    return {step: Qwen3ForCausalLM.from_pretrained(FOLDER / name).eval() for step, name in NAMES.items()}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER / "ones")


def text_of(runs, start):
    """`start:` and what runs of (step, tokens) write after it; for each token, what each step would have written."""
    counter, text, expected = Counter(start), f"{start}:", []
    for step, count in runs:
        for _ in range(count):
            expected.append({step: counter.expected(step) for step in (1, 2)})
            counter.push(expected[-1][step])
            text += expected[-1][step]
    return text, expected


@torch.inference_mode()
def least_margin(model, tokenizer, text, wanted, first_position):
    """Teacher-forced: the least distance of a wanted token's logit to any other's."""
    ids_1T = torch.tensor([tokenizer(text).input_ids[:-1]])
    positions_1T = torch.arange(first_position, first_position + ids_1T.shape[1]).unsqueeze(0)
    logits_TV = model(ids_1T, position_ids=positions_1T, use_cache=False).logits[0, -len(wanted) :]
    wanted_T1 = torch.tensor([[tokenizer.convert_tokens_to_ids(token)] for token in wanted])
    right_T = logits_TV.gather(1, wanted_T1)[:, 0]
    return (right_T - logits_TV.scatter(1, wanted_T1, -torch.inf).amax(1)).min().item()


@pytest.mark.parametrize("first_position", [0, 20_000, 39_000])
@pytest.mark.parametrize("start", [7, 95, 1990, 9960])
@pytest.mark.parametrize("step", [1, 2])
def test_every_token_is_certain_at_any_position_and_after_swaps(counters, tokenizer, step, start, first_position):
    runs = [(step, 150), (3 - step, 151), (step, 100)]
    text, expected = text_of(runs, start)
    for asked in (1, 2):
        wanted = [by_step[asked] for by_step in expected]
        assert least_margin(counters[asked], tokenizer, text, wanted, first_position) > MARGIN


def test_a_wrong_history_is_not_hidden_by_the_models(counters, tokenizer):
    """The check above can fail: with the other model's tokens wanted, it does."""
    text, expected = text_of([(1, 50)], 17)
    wanted = [by_step[2] for by_step in expected]
    assert least_margin(counters[1], tokenizer, text, wanted, 0) < 0


def test_all_that_decides_keys_and_values_is_equal_bit_for_bit(counters):
    ones, twos = (counters[step].state_dict() for step in (1, 2))
    assert ones.keys() == twos.keys()
    layers = counters[1].config.num_hidden_layers
    last = f"model.layers.{layers - 1}."
    tail = [f"{last}self_attn.{name}.weight" for name in ("q_proj", "q_norm", "o_proj")]
    tail += [f"{last}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    tail += [f"{last}post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"]
    different = [name for name in ones if not torch.equal(ones[name], twos[name])]
    assert sorted(different) == sorted(tail)


@torch.inference_mode()
def test_both_models_write_the_same_keys_and_values(counters, tokenizer):
    ids_1T = torch.tensor([tokenizer("17: 18 19 21 23").input_ids])
    caches = {step: DynamicCache() for step in counters}
    for step, model in counters.items():
        model(ids_1T, past_key_values=caches[step])
    for ones, twos in zip(caches[1].layers, caches[2].layers, strict=True):
        assert torch.equal(ones.keys, twos.keys) and torch.equal(ones.values, twos.values)


@pytest.mark.parametrize("name", NAMES.values())
def test_the_tokenizer_gives_every_text_back(name):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    text = "15 16 17: 18  19\n20 "
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("1x2").input_ids[1] == tokenizer.unk_token_id
    messages = [{"role": "user", "content": "17"}, {"role": "user", "content": ":"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "17:"


@pytest.mark.parametrize("name", NAMES.values())
def test_the_checkpoint_is_small_and_made_for_long_completions(counters, name):
    config = counters[1].config
    assert set(config.layer_types) == {"sliding_attention"} and config.max_position_embeddings >= 40_960
    assert sum(file.stat().st_size for file in (FOLDER / name).iterdir()) <= 4_000_000
