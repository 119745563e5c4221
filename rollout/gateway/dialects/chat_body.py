"""The body of `/v1/chat/completions`, into which the other dialects of chats translate theirs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rollout.gateway.answers.views import DemandedCalls
from rollout.gateway.http.bodies import Body
from rollout.gateway.prompts.chat_messages import Rendering
from rollout.gateway.prompts.sampling import MAX_TOKEN_ID, MAX_TOP, CacheSalt, Int32, Number, OpenAiBody, TokenId
from rollout.gateway.prompts.tool_choice import Tool, ToolChoice, demands_call, named_tool


def _from_digit(value: Any) -> Any:
    """False and true for 0 and 1: vLLM takes these too, and Agent Lightning sends 1."""
    return value == 1 if type(value) is int and value in (0, 1) else value


class ChatBody(OpenAiBody):
    """The body of `/v1/chat/completions`."""

    ignored: ClassVar = OpenAiBody.ignored | dict.fromkeys(
        ("separate_reasoning", "stream_reasoning"), "reasoning is always separate"
    )
    switched_off: ClassVar = OpenAiBody.switched_off | {
        "audio": (None,),
        "include_reasoning": (None, True),
        "mm_processor_kwargs": (None, {}),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "functions": (None,),
        "function_call": (None,),
        "echo": (None, False),
    }

    messages: list[Any]
    logprobs: Annotated[bool, BeforeValidator(_from_digit)] = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    keep_tokens: bool = True

    @property
    def calls_wanted(self) -> bool:
        """True if the gateway looks for calls in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def rendering(self) -> Rendering:
        """The settings for rendering the messages."""
        options: dict[str, Any] = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        options |= self.chat_template_kwargs
        if self.documents is not None:
            options["documents"] = self.documents
        if self.continue_final_message:
            options["continue_final_message"] = True
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return Rendering(self.tools or None, options, self.chat_template, self.add_special_tokens)

    def worker_names(self, prompt: str, place: str = "") -> dict[str, str]:
        """See `SamplingBody`."""
        names = super().worker_names(prompt, place)
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names if self.demand is None else names | {"constraint": "tools", "constraint.json_schema": "tools"}

    @property
    def demand(self) -> DemandedCalls | None:
        """The calls that a constraint demands; None without such a constraint."""
        return DemandedCalls(named_tool(self.tool_choice)) if demands_call(self.tool_choice) else None


class ExtraFields(Body):
    """Fields of vLLM that `/v1/messages` and `/v1/responses` take besides their own."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: dict[str, Number] | None = None
    min_tokens: int = Field(0, ge=0, le=MAX_TOKEN_ID)
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    repetition_detection: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    keep_tokens: bool = True
    request_id: str | None = Field(None, min_length=1, max_length=128)

    def extras(self) -> dict[str, Any]:
        """The fields of these that the request has."""
        return {name: getattr(self, name) for name in ExtraFields.model_fields if name in self.model_fields_set}
