"""The tokens of a completion, computed anew from what it reports."""

import torch
from transformers import DynamicCache

from tests.support.engine.harness import Completion


def replayed(hf_models, prompt: list[int], completion: Completion) -> list[int]:
    """The greedy tokens, computed with the weights and the KV that the completion says it had at each of them."""
    history, marks, again = list(prompt), dict(completion.recomputed), []
    cache, fed = None, 0
    for i, (token, version) in enumerate(zip(completion.token_ids, completion.versions, strict=True)):
        if i in marks:
            assert marks[i] == version  # the newest token's own step computed it
            cache, fed = None, 0
        cache = cache or DynamicCache(config=hf_models[version].config)
        with torch.inference_mode():
            ids = torch.tensor([history[fed:]])
            logits = hf_models[version](ids, past_key_values=cache, use_cache=True).logits[0, -1]
        fed = len(history)
        again.append(int(logits.argmax()))
        history.append(token)
    return again


def agrees(hf_model, prompt: list[int], completion: Completion) -> bool:
    """Tokens are transformers' greedy choice, and log-probs within 1e-4 of its logits'."""
    tokens = completion.token_ids
    with torch.inference_mode():
        logits = hf_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    close = torch.allclose(torch.tensor(completion.raw_logprobs), logprobs, atol=1e-4, rtol=0)
    return close and logits.argmax(-1).tolist() == tokens
