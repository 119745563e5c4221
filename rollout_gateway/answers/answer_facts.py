"""Fields of a completion that several dialects share, apart from the text: end, tokens, versions."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_gateway.answers.logprobs import prompt_entries
from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.prompts.sampling import RequestFields, SamplingBody
from rollout_gateway.prompts.tokenizer import GatewayTokenizer
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.results import Completion, GenerateResult

#: vLLM's stop reason of a completion that repeats itself.
REPETITION = "repetition_detected"


def now() -> int:
    """Unix time, for `created`."""
    return int(time.time())


def usage(results: list[GenerateResult]) -> dict[str, Any]:
    """OpenAI's `usage` of all results."""
    prompt = sum(result.prompt_tokens for result in results)
    tokens = sum(len(completion) for result in results for completion in result.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


def prompt_ids(request: TokenRequest, result: GenerateResult) -> list[int]:
    """The token ids of a prompt, after the tokens that it continues."""
    return request.prompt if result.prompt_token_ids is None else result.prompt_token_ids.tolist()


def fault(completion: Completion) -> HttpError | None:
    """The error of a completion that a fault has ended."""
    if completion.finish_reason == "error":
        return HttpError(500, f"a fault ended the completion: {completion.error}")
    if completion.finish_reason == "cancelled" and completion.error is not None:
        return HttpError(503, f"the worker ended: {completion.error}", retry_s=1.0)
    return None


def end_facts(part: Completion, body: SamplingBody) -> dict[str, Any]:
    """The end of a completion, in vLLM's words; null while it continues.

    `stop_reason` is a stop string or token of the request; the model's own end of a turn has none. A completion that a
    fault has ended keeps its tokens and has an `error`: the other completions of the request may be whole. `forced` has
    the positions of the tokens that a budget of thoughts has forced, if there are any.
    """
    own = isinstance(part.stop, int) and part.stop not in body.stop_token_ids
    stop = REPETITION if part.finish_reason == "repetition" else None if own else part.stop
    facts: dict[str, Any] = {"finish_reason": finish_reason(part), "stop_reason": stop}
    if part.forced:
        facts["forced"] = part.forced
    failed = fault(part)
    return facts if failed is None else facts | {"error": str(failed)}


def choice_facts(part: Completion, sampling: SamplingBody, body: RequestFields, start: int) -> dict[str, Any]:
    """The fields of a choice, or of its new tokens from `start` on, that OpenAI's and vLLM's answers share."""
    facts = end_facts(part, sampling)
    if body.return_token_ids:
        facts["token_ids"] = part.token_ids.tolist()
    return facts | {"weight_versions": version_runs(part.versions, start)} if body.return_weight_versions else facts


def finish_reason(completion: Completion) -> str | None:
    """The finish reason of a completion, in vLLM's words; None while it continues."""
    if fault(completion) is not None:
        return "error"
    reasons = {"cancelled": "abort", "stale": "abort", "deadline": "length"}
    reason = completion.finish_reason
    return None if reason is None else reasons.get(reason, reason)


def version_runs(versions: Sequence[tuple[int, int]], start: int = 0) -> list[dict[str, int]]:
    """Runs of tokens with one weights version: `[{"version", "start", "end"}]`, with `end` exclusive."""
    runs = []
    for version, count in versions:
        runs.append({"version": version, "start": start, "end": start + count})
        start += count
    return runs


def experts_of(completion: Completion, start: int) -> np.ndarray:
    """The experts of tokens from position `start` on: [tokens, MoE layers, experts of a token].

    A worker that is asked for all experts returns an entry for each token of prompt and completion but the last. Raises
    `HttpError` if it sent none.
    """
    if completion.routing is None:
        raise HttpError(500, "the worker sent no experts for this completion; send the request again")
    return completion.routing[start:]


async def prompt_facts(
    text: GatewayTokenizer, prompt: list[int], result: GenerateResult, body: RequestFields, most: int | None
) -> dict[str, Any]:
    """Fields of an answer about its prompt: log-probs with the `most` likeliest tokens, their version, token ids."""
    facts: dict[str, Any] = {}
    if most is not None:
        facts["prompt_logprobs"] = await prompt_entries(prompt, result, most, text.token_bytes)
    if body.return_weight_versions and result.prompt_version is not None:
        facts["prompt_weight_version"] = result.prompt_version
    return facts | {"prompt_token_ids": prompt} if body.return_token_ids else facts
