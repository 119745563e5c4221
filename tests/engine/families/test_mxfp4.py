"""gpt-oss with experts in MXFP4 through the engine, beside transformers' model with the decoded weights."""

from pathlib import Path

import torch

from tests.engine.families.test_every_family import agrees, prompt_of
from tests.support.engine.harness import Bench, load
from tests.support.engine.updates import Mailbox
from tests.support.models.mxfp4 import make_mxfp4


class Sent:
    """An update as a trainer sends it: every tensor in bf16."""

    nbytes, names, version = 0, (), 1

    def __init__(self, tensors: dict[str, torch.Tensor], target) -> None:
        self._tensors, self._views = tensors, target.hf_views()

    def copy_into(self) -> None:
        for name, tensor in self._tensors.items():
            self._views[name].copy_(tensor.bfloat16())


def test_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    """Before an update in bf16, whose experts are in MXFP4 too, and after it."""
    torch.set_num_threads(1)
    references = [make_mxfp4(tmp_path / str(seed), seed, hidden_size=64, intermediate_size=32) for seed in range(2)]
    with torch.no_grad():
        for parameter in references[1].parameters():
            parameter.copy_(parameter.bfloat16())
    model, mailbox = load(tmp_path / "0"), Mailbox()
    assert model.format == "mxfp8"
    bench = Bench(model, receiver=mailbox, max_rows=5, page_size=4, prefill_chunk_tokens=23, kv_on_swap="recompute")
    prompts = [prompt_of(model.spec.vocab, length, i) for i, length in enumerate((3, 50, 17, 31))]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 24)
    bench.ticks(12)
    mailbox.ready = Sent(references[1].state_dict(), model)
    bench.run()
    for i, prompt in enumerate(prompts):
        agrees(references, prompt, bench.completions[f"r{i}", 0])
    assert set(bench.completions["r0", 0].versions) == {0, 1}
    bench.close()
