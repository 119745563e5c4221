"""PrimeIntellect's `renderers`, which verifiers and prime-rl use: the same calls, the same tokens of the next turn."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from rollout.text.codec import TextCodec
from rollout_gateway.answers.text_pieces import text_pieces
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.prompts.chat_messages import Rendering, prompt_of
from rollout_gateway.prompts.tokenizer import GatewayTokenizer
from tests.support.gateway.chat_templates import FAMILIES, tokenizer_with
from trainer_bridge.client.results import Completion

renderers = pytest.importorskip("renderers", reason="make test-integrations installs renderers")

import numpy as np  # noqa: E402
from renderers import configs  # noqa: E402

from rollout_gateway.prompts.sampling import OpenAiBody  # noqa: E402

#: The module and the configuration of a family's renderer. That of gpt-oss downloads a vocabulary.
RENDERERS = {
    "qwen3": ("qwen3", "Qwen3RendererConfig"),
    "qwen3.5": ("qwen35", "Qwen35RendererConfig"),
    "nemotron-3": ("nemotron3", "Nemotron3RendererConfig"),
    "llama-3.1": ("llama_3", "Llama3RendererConfig"),
    "glm-4.5": ("glm45", "GLM45RendererConfig"),
    "deepseek-v3": ("deepseek_v3", "DeepSeekV3RendererConfig"),
    "kimi-k2": ("kimi_k2", "KimiK2RendererConfig"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2RendererConfig"),
}
QUESTION = {"role": "user", "content": "What is the weather in Köln?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "looks something up",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "functions.look_up:0",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"city": "Köln 𝄞", "days": 3}},
}


class Side:
    """A family's renderer and this gateway's text, with one tokenizer."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        module, config = RENDERERS[family]
        source = inspect.getsource(importlib.import_module(f"renderers.{module}"))
        self.tokenizer = tokenizer_with(family, source)
        self.tokenizer.save_pretrained(folder)
        self.renderer = renderers.create_renderer(self.tokenizer, getattr(configs, config)())
        self.text = GatewayTokenizer(TextCodec(folder), folder)

    def drawn(self, message: dict[str, Any]) -> tuple[list[int], list[int]]:
        """A prompt and the tokens of an answer, as the renderer has them, with the token that ends the turn."""
        prompt = self.renderer.render_ids([QUESTION], tools=TOOLS, add_generation_prompt=True)
        whole = self.renderer.render_ids([QUESTION, message], tools=TOOLS)
        same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        answer = whole[same:]
        stops = set(self.renderer.get_stop_token_ids())
        end = next((at for at, token in enumerate(answer) if token in stops), None)
        if end is None:  # the beginning of the next turn ends this one
            answer.append(self.tokenizer.convert_tokens_to_ids(FAMILIES[self.family].ends["tool_calls" in message]))
        return whole[:same], answer if end is None else answer[: end + 1]

    def views(self, tokens: list[int], begun: str) -> dict[str, Any]:
        """What this gateway shows of an answer."""
        formats = self.text.formats("auto", "auto")
        cut = formats.cuts[True]
        pieces = text_pieces(
            self.text, OpenAiBody.take({}).model_copy(update={"stop_token_ids": [1 << 30]}), False, cut.shown
        )
        numbers = np.zeros(len(tokens), np.float32)
        ended = tokens[-1] in self.renderer.get_stop_token_ids()
        part = Completion(
            0, np.array(tokens, np.int32), numbers, numbers, [(0, len(tokens))], None,
            "stop" if ended else "length", tokens[-1] if ended else None,
        )  # fmt: skip
        piece = CompletionViews(pieces, cut.regions, TOOLS, begun).take(part)
        return {
            "reasoning": piece.reasoning.strip(),
            "content": piece.content.strip(),
            "calls": [(call.name, json.loads(call.arguments)) for call in piece.calls],
        }


@pytest.fixture(scope="module", params=RENDERERS)
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    return Side(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "It rains."},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm, so."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "reasoning_content": "Hm, so.", "tool_calls": [CALL]},
    ],
)
def test_an_answer_is_read_as_the_renderer_reads_it(side: Side, message: dict[str, Any]) -> None:
    prompt, answer = side.drawn(message)
    theirs = side.renderer.parse_response(answer, tools=TOOLS, prompt_ids=prompt)
    begun = side.text.turns(None).begun(side.tokenizer.decode(prompt))
    calls = [(call.name, call.arguments) for call in theirs.tool_calls or [] if call.status.value == "ok"]
    assert side.views(answer, begun) == {
        "reasoning": (theirs.reasoning_content or "").strip(),
        "content": (theirs.content or "").strip(),
        "calls": calls,
    }
    assert bool(calls) == ("tool_calls" in message)


@pytest.mark.parametrize("calls", [False, True])
def test_the_next_prompt_is_the_one_that_the_renderer_bridges_to(side: Side, calls: bool) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "It rains."}
    follows = {"role": "user", "content": "And tomorrow?"}
    if calls:
        message["tool_calls"] = [CALL]
        follows = {"role": "tool", "content": "rain", "tool_call_id": CALL["id"], "name": "look_up"}
    prompt, answer = side.drawn(message)
    bridged = side.renderer.bridge_to_next_turn(prompt, answer, [follows], tools=TOOLS)
    if bridged is None:
        pytest.skip("this renderer renders the conversation anew")
    known = message | {"prompt_token_ids": prompt, "generation_token_ids": answer}
    ours = prompt_of(side.text, [QUESTION, known, follows], Rendering(TOOLS, {}, None, False)).token_ids
    theirs = list(getattr(bridged, "token_ids", bridged))
    known_tokens = len(prompt) + len(answer)
    assert ours[:known_tokens] == theirs[:known_tokens] == prompt + answer
    # The template of DeepSeek-V3 here opens the thoughts.
    after = side.tokenizer.decode(ours[known_tokens:]).removesuffix("<think>\n")
    assert after == side.tokenizer.decode(theirs[known_tokens:]).removesuffix("<think>\n")
