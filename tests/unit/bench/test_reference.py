"""The reference of the checks is the model of its config, whatever attention its class claims to support."""

import pytest
import torch
from transformers import Gemma2PreTrainedModel

from scripts.bench.reference import Trainer, logprobs_of, make_model, save_weights
from scripts.bench.shapes import shrunk
from scripts.check import mismatch
from scripts.check.family_sizes import family_config
from tests.support.models.paged import PagedRunner


@pytest.mark.parametrize("claimed", [True, False])
def test_scores_have_their_softcap(claimed, monkeypatch, tmp_path):
    """transformers 5.17 claims sdpa for Gemma 2, whose function drops the softcap there; later releases refuse it."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", claimed)
    config = {**shrunk(family_config("gemma-2-9b", 2)), "attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0}
    model = make_model({**config, "torch_dtype": "float32"}, "float32", "cpu", tmp_path)
    trainer = Trainer(model, tmp_path, "float32", "cpu")
    prompt, completion = list(range(3, 40)), list(range(40, 60))
    logits_TV = PagedRunner(model, rows=1, max_tokens=64).prefill({0: prompt + completion})[0]
    exact_KV = trainer.recompute(prompt, completion).exact
    torch.testing.assert_close(exact_KV, logits_TV[len(prompt) - 1 : -1], rtol=0, atol=1e-3)
    assert exact_KV.std() > 1
    save_weights(model, tmp_path)
    recomputed_K = mismatch.recompute(mismatch.load(str(tmp_path), torch.float32, "cpu"), prompt, completion)
    torch.testing.assert_close(torch.from_numpy(recomputed_K), logprobs_of(exact_KV, completion), rtol=0, atol=1e-3)
