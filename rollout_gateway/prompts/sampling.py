"""Sampling fields of vLLM's and OpenAI's requests, and the arguments of `generate` that are made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, create_model

from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.kv_hints import KvFields
from trainer_bridge.client.results import Chunk
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED
from trainer_bridge.wire.sampling_rules import RULES

MAX_TOKEN_ID = 2**31 - 1
#: Ids of tokens that a request names at positions of its prompt, in rows of one length: a short body may ask for any
#: number, and a worker cuts off what sends it twice its default limit of 64 MiB.
MOST_IDS = 1 << 24
_LARGEST_VOCABULARY = 1 << 24  # AReaL sends a top_k of 1e8, which means all tokens
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Int32 = Annotated[int, Field(ge=-MAX_TOKEN_ID, le=MAX_TOKEN_ID)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
Number = Annotated[float, Field(allow_inf_nan=False)]

#: JSON texts whose outermost value is an object, in xgrammar's EBNF.
_JSON_OBJECT = r"""
root ::= object
object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
pair ::= string ws ":" ws value
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" hex hex hex hex)
hex ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
ws ::= [ \t\n]?
""".strip()


#: OpenAI's fields that mean nothing here.
OPENAI_ACCOUNTING = dict.fromkeys(
    ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    "OpenAI's accounting and cache",
)
#: The worker's fields of a budget for thoughts.
_THINKING = ("thinking_token_budget", "thinking", "thinking.start", "thinking.end")


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one constraint."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    switched_off: ClassVar = dict.fromkeys(
        ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), (None, False)
    ) | dict.fromkeys(("whitespace_pattern", "structural_tag"), (None,))

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def constraint(self, within: str) -> dict[str, Any]:
        """The worker's `constraint`. Raises `HttpError` unless exactly one is given."""
        given: list[dict[str, Any]] = [
            {name: value}
            for name, value in (
                ("json_schema", self.json_ if isinstance(self.json_, str | None) else json.dumps(self.json_)),
                ("regex", self.regex),
                ("choices", self.choice),
                ("grammar", self.grammar),
                ("grammar", _JSON_OBJECT if self.json_object else None),
            )
            if value is not None
        ]
        if len(given) != 1:
            raise bad_request("give exactly one of json, regex, choice, grammar and json_object", within)
        return given[0]


class JsonSchema(Body):
    """The `json_schema` of a `response_format`. `strict` changes nothing: the schema is always enforced."""

    ignored: ClassVar = {"description": "for readers", "strict": "a schema is always enforced"}
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    def constraint(self, within: str) -> dict[str, Any] | None:
        """The worker's `constraint`, None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"grammar": _JSON_OBJECT}
        return {"json_schema": json.dumps(JsonSchema.take(self.json_schema, f"{within}json_schema.").schema_)}


class RepetitionBody(Body):
    """vLLM's `repetition_detection`."""

    max_pattern_size: Int32 = 0
    min_pattern_size: Int32 = 0
    min_count: Int32 = 0


if TYPE_CHECKING:
    from rollout_gateway.http.bodies import Body as _Rules
else:  # the sampling rules; each dialect has three of them with types of its own
    _Rules = create_model(
        "Rules",
        __base__=Body,
        **{
            rule.name: (Int32 if rule.kind is int else Number, rule.default)
            for rule in RULES
            if rule.name not in ("temperature", "top_p", "top_k")
        },
    )


class SamplerFields(_Rules):
    """Sampling fields that all dialects but Tinker's have under these names. The worker checks ranges."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
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


class SamplingBody(SamplerFields):
    """Sampling fields that OpenAI's endpoints and vLLM's `sampling_params` share."""

    switched_off: ClassVar = {
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1.0, 1),
        "early_stopping": (None, False),
        "bad_words": (None, []),
        "truncate_prompt_tokens": (None,),
        "logits_processors": (None, []),
        "logprob_token_ids": (None,),
        "flat_logprobs": (None, False),
        "extra_args": (None, {}),
        "vllm_xargs": (None, {}),
    }
    ignored: ClassVar = {
        "output_kind": "the answer has each token once",
        "spaces_between_special_tokens": "the tokenizer's own rule holds",
        "detokenize": "an endpoint has text or not",
    }

    n: int = Field(1, ge=1, le=1024)
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Int32 = 0
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    stop: Annotated[list[str], BeforeValidator(_strings)] = []
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_PROMPT_TOKENS_SCORED)

    def thought_budget(self, within: str = "") -> tuple[int | None, str]:
        """The most tokens of a thought, None for any number, and the name of the field that says so."""
        budget = self.thinking_token_budget
        return None if budget == -1 else budget, f"{within}thinking_token_budget"

    def worker_fields(self, within: str = "") -> dict[str, Any]:
        """The arguments of `generate` for these fields. `within` goes in front of names in errors."""
        fields: dict[str, Any] = {
            **{rule.name: getattr(self, rule.name) for rule in RULES},
            "top_k": 0 if self.top_k > _LARGEST_VOCABULARY else self.top_k,
            "seed": None if self.seed in (None, -1) else self.seed % 2**63,  # -1: none, as in vLLM
            "max_tokens": self.max_tokens,
            "stop": {
                "strings": self.stop,
                "token_ids": self.stop_token_ids,
                "ignore_eos": self.ignore_eos,
                "min_tokens": self.min_tokens,
            },
            "constraint": self._constraint(within),
        }
        if self.logit_bias:
            fields["logit_bias"] = self.logit_bias
        if self.prompt_logprobs is not None:
            fields["prompt_top_logprobs"] = self.prompt_logprobs
        if self.repetition_detection is not None:
            detection = RepetitionBody.take(self.repetition_detection, f"{within}repetition_detection.")
            fields["repetition_detection"] = detection.model_dump()
        return fields

    def worker_names(self, prompt: str, within: str = "") -> dict[str, str]:
        """The fields of a request by the worker's names for them, for errors. `prompt`: the field with the prompt."""
        body, tokens = within.removesuffix("."), f"{within}allowed_token_ids"
        names = {"prompt": prompt, "sampling": body, "stop": body, "max_tokens": f"{within}max_tokens"}
        names |= {"stop.strings": f"{within}stop", "stop.token_ids": f"{within}stop_token_ids"}
        names |= dict.fromkeys(_THINKING, self.thought_budget(within)[1])
        names["repetition_detection"] = f"{within}repetition_detection"
        names |= {"prompt_top_logprobs": f"{within}prompt_logprobs"}
        if self.allowed_token_ids is not None:
            return names | {"constraint": tokens, "constraint.token_ids": tokens}
        kinds = {"json_schema": "json", "regex": "regex", "choices": "choice", "grammar": "grammar"}
        given = {f"constraint.{kind}": f"{within}structured_outputs.{name}" for kind, name in kinds.items()}
        return names | {"constraint": f"{within}structured_outputs"} | given

    def response_constraint(self, within: str) -> dict[str, Any] | None:
        """The constraint of a `response_format`; endpoints that have this field say so."""
        return None

    def _constraint(self, within: str) -> dict[str, Any] | None:
        given = {
            "structured_outputs": None
            if self.structured_outputs is None
            else StructuredOutputs.take(self.structured_outputs, f"{within}structured_outputs.").constraint(
                f"{within}structured_outputs"
            ),
            "response_format": self.response_constraint(within),
            "allowed_token_ids": None if self.allowed_token_ids is None else {"token_ids": self.allowed_token_ids},
        }
        found = {name: constraint for name, constraint in given.items() if constraint is not None}
        if len(found) > 1:
            names = " and ".join(found)
            raise bad_request(f"{names} cannot be combined; send only one", within + list(found)[-1])
        return next(iter(found.values()), None)


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    ignored: ClassVar = {"include_obfuscation": "OpenAI's padding of events"}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @classmethod
    def of(cls, fields: Any) -> StreamOptions:
        """The options of a body. Raises `HttpError`."""
        return cls() if fields is None else cls.take(fields, "stream_options.")

    def usage_so_far(self, prompt_tokens: int, chunk: Chunk) -> dict[str, Any]:
        """The field that `continuous_usage_stats` adds to an event: the tokens of its completion up to this chunk."""
        if not (self.include_usage and self.continuous_usage_stats):
            return {}
        tokens = chunk.offset + len(chunk.part)
        total = prompt_tokens + tokens
        return {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": total}}


StreamOptionsField = Annotated[StreamOptions, BeforeValidator(StreamOptions.of)]


class RequestFields(KvFields):
    """Fields about a request as a whole that OpenAI's endpoints and vLLM's `generate` share."""

    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128)
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    stream: bool = False
    stream_options: StreamOptionsField = StreamOptions()
    return_token_ids: bool = False
    return_weight_versions: bool = False


class OpenAiBody(SamplingBody, RequestFields):
    """The fields that `/v1/completions` and `/v1/chat/completions` share."""

    ignored: ClassVar = SamplingBody.ignored | OPENAI_ACCOUNTING | {"metadata": "it belongs to stored completions"}
    switched_off: ClassVar = SamplingBody.switched_off | {
        "kv_transfer_params": (None,),
        "moderation": (None,),
        "store": (None, False),
        "service_tier": (None, "auto", "default"),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "suffix": (None, ""),
        "prompt_embeds": (None,),
        "no_stop_trim": (None, False),  # vllm-router and sglang-router add this field and the next one
        "return_hidden_states": (None, False),
    }

    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None

    def worker_names(self, prompt: str, within: str = "") -> dict[str, str]:
        names = super().worker_names(prompt, within)
        if self.response_format is not None:
            names |= dict.fromkeys(("constraint", "constraint.grammar"), "response_format")
            names["constraint.json_schema"] = "response_format.json_schema.schema"
        return names

    def response_constraint(self, within: str) -> dict[str, Any] | None:
        """The constraint of `response_format`."""
        if self.response_format is None:
            return None
        return ResponseFormat.take(self.response_format, "response_format.").constraint("response_format.")
