"""One conversation on its way through the workers, for every dialect of chats: prompt, call and views.

ChatBody --> prompt, which goes on with kept tokens --> call --> views of each completion, which is kept at its end
"""

from dataclasses import dataclass
from typing import Any

from rollout_gateway.answers.answer_facts import fault, finish_reason, now
from rollout_gateway.answers.logprobs import sampled
from rollout_gateway.answers.text_pieces import text_pieces, worker_decodes
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.answer_segments import AnswerPiece, Segments
from rollout_gateway.formats.format_chooser import SearchedRegions
from rollout_gateway.history.trajectories import AnswerTokens, Beginning, reasoning_of, text_of
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.chat_messages import RenderedChat, render_chat
from rollout_gateway.requests.call import Call
from rollout_gateway.requests.chat_body import ChatBody, call_constraint
from rollout_gateway.requests.http_request import Gateway, HttpRequest
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.assembly import join_parts
from trainer_bridge.client.results import Completion


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """The prompt of a conversation. `known`: what the trajectory `kept_as` has of it; None if none is kept."""

    chat: RenderedChat
    kept_as: str | None
    known: Beginning | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that asks for an answer."""

    call: Call
    body: ChatBody
    prompt: ConversationPrompt
    cut: SearchedRegions

    def views(self) -> CompletionViews:
        """The views of one completion, whose tokens are kept at its end if there is a trajectory."""
        body, text, chat = self.body, self.call.gateway.model.text, self.prompt.chat
        pieces = text_pieces(text, body, body.include_stop_str_in_output, self.cut.shown)
        most_calls = None if body.parallel_tool_calls else 1
        seen = None if self.prompt.known is None else _Keeper(self).take
        return CompletionViews(pieces, self.cut.regions, body.tools or (), chat.begun, body.demand, most_calls, seen)


class _Keeper:
    """Gathers one completion while it arrives, and keeps it once it has ended without a fault."""

    def __init__(self, asked: Conversation) -> None:
        self._asked = asked
        self._answer = AnswerPiece()
        self._parts: list[Completion] = []

    def take(self, part: Completion, piece: AnswerPiece) -> None:
        """Add new tokens and what they add to the views."""
        self._answer.extend(piece)
        self._parts.append(part)
        if part.finish_reason is not None and fault(part) is None:
            self._keep(part)

    def _keep(self, last: Completion) -> None:
        body, gateway, prompt = self._asked.body, self._asked.call.gateway, self._asked.prompt
        assert prompt.kept_as is not None and prompt.known is not None
        position, begun, thought = len(body.messages), "", ""
        if body.continue_final_message:  # the last message is the beginning of the answer
            position -= 1
            begun, thought = text_of(body.messages[position]), reasoning_of(body.messages[position])
        answer = {
            "role": "assistant",
            "content": begun + self._answer.content,
            "tool_calls": [call.shown() for call in self._answer.calls],
            "reasoning_content": thought + self._answer.reasoning,
        }
        whole = join_parts(self._parts, last.index)
        logprobs = sampled(whole, gateway.settings.logprobs)
        drawn = AnswerTokens(whole.token_ids, logprobs, whole.versions, whole.forced)
        facts = {
            "id": self._asked.call.id,
            "model": body.model or gateway.model.names[0],
            "created": now(),
            "finish_reason": finish_reason(last),
        }
        gateway.trajectories.keep(prompt.kept_as, prompt.known, prompt.chat.token_ids, answer, position, drawn, facts)


async def prompt_of(request: HttpRequest[Any], body: ChatBody, kept_as: str | None = None) -> ConversationPrompt:
    """The prompt of a conversation. It goes on with the tokens of the trajectory `kept_as`, else of the session's.

    With `keep_tokens` false it is tokenized anew, and its answer is not kept.

    Raises `HttpError`.
    """
    gateway, name = request.gateway, kept_as or request.placement()[0]
    known = None
    kept = body.keep_tokens and gateway.trajectories.keeps and all(isinstance(each, dict) for each in body.messages)
    if kept and name is not None:
        known = gateway.trajectories.beginning(name, body.messages, body.rendering)
    drawn = None if known is None else known.drawn
    return ConversationPrompt(await render_chat(gateway.model, body.messages, body.rendering, drawn), name, known)


async def begin(
    request: HttpRequest[Any], body: ChatBody, known_id: str, kept_as: str | None = None, at_most: bool = False
) -> Conversation:
    """The conversation of a request, ready to be generated. `known_id`: the id that the client knows.

    With `at_most`, a limit of tokens may be larger than what the context has left. Raises `HttpError`.
    """
    gateway, model = request.gateway, request.gateway.model
    session, routing = request.placement()
    fields = await gateway.openai_fields(body) | routing
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    demanded = call_constraint(body.tool_choice, body.tools or (), body.parallel_tool_calls)
    if body.calls_wanted and demanded is None and model.formats.tools is None:
        raise bad_request(
            "this gateway does not know this model's format of tool calls: start it with --tool-parser, or set "
            "'tool_choice' to 'none' or 'required'",
            "tools",
        )
    if demanded is not None:
        if fields["constraint"] is not None:
            raise bad_request(
                "a 'tool_choice' that demands a call is a constraint of its own; remove the other constraint",
                "tool_choice",
            )
        fields["constraint"] = demanded
    prompt = await prompt_of(request, body, kept_as)
    chat = prompt.chat
    left = model.context_tokens - len(chat.token_ids)
    if at_most and fields["max_tokens"] is not None and left > 0:  # otherwise the worker refuses the request
        fields["max_tokens"] = min(fields["max_tokens"], left)
    cut = model.formats.cuts[body.calls_wanted and demanded is None]
    if fields["constraint"] is not None:
        after = _answer_after(gateway, cut, chat.begun)
        if after is None:  # the constraint holds from the first token on: there is no reasoning
            cut = cut.without_reasoning()
        else:
            fields["constraint"] = fields["constraint"] | {"after": after}
    fields |= {"return_text": worker_decodes(model.text, body, cut.shown), "logprobs": body.top_logprobs}
    asked = TokenRequest(chat.token_ids, fields, body.n, body.worker_names("messages"), chat.media)
    return Conversation(Call(gateway, known_id, [asked], session), body, prompt, cut)


def _answer_after(gateway: Gateway, cut: SearchedRegions, begun: str) -> str | None:
    """The mark after which a constraint begins; None if it holds from the first token on."""
    if gateway.settings.constrain_reasoning or not Segments(cut.regions, begun=begun).may_reason:
        return None
    return gateway.model.formats.answer_after
