"""The settings of a gateway. Each is declared once; the flags of `rollout gateway` are made from the declarations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

#: The log-prob of a sampled token that answers show; see `logprobs.py`.
LogprobMode = Literal["policy", "processed", "raw"]
#: The form in which `/inference/v1/generate` shows the experts of tokens; see `routed_experts.py`.
ExpertFormat = Literal["off", "npy", "object"]


def setting(default: Any, meaning: str, **more: Any) -> Any:
    """A field of `GatewaySettings` with its help text."""
    return field(default=default, metadata={"meaning": meaning, **more})


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a gateway. Raises ValueError for values that make no sense."""

    endpoints: tuple[str, ...]
    host: str = setting("127.0.0.1", "address to listen at; other than loopback addresses need --api-key-file")
    port: int = setting(8000, "port to listen at; 0 takes a free one")
    model: str | None = setting(
        None, "folder or hub id of the tokenizer and chat template; absent: the model that the workers name"
    )
    served_model_name: tuple[str, ...] = setting(
        (), "names that requests may call the model; absent: the workers' name"
    )
    api_key_file: str | None = setting(None, "file with the bearer tokens that are accepted, one a line")
    ready_file: str | None = setting(None, "file that is written, with the URL, when the gateway listens")
    start_s: float = setting(600.0, "seconds to wait at the start until a worker answers")
    resume: bool | None = setting(
        None, "continue requests of a lost worker at another one; absent: with several endpoints"
    )
    resume_s: float = setting(120.0, "seconds that a request may be without a worker, with --resume")
    heartbeat_s: float = setting(
        2.0, "seconds between heartbeats; a worker that leaves three without an answer is lost, also if it hangs"
    )
    min_version: int = setting(0, "weights version below which a worker counts as unhealthy")
    stream_every: int = setting(1, "tokens of an event of a stream, at the least")
    session_s: float = setting(3600.0, "seconds after which an idle X-Session-ID is forgotten")
    max_in_flight: int = setting(8192, "completions in flight; beyond that requests get status 429")
    max_connections: int = setting(
        4096, "connections of clients; for a further one an idle one is closed, or it gets status 503"
    )
    keep_alive_s: float = setting(
        620.0,
        "seconds until a connection without a request is closed; keep it above the limit of the clients' pools and of "
        "proxies",
    )
    max_body_bytes: int = setting(64 << 20, "most bytes of a request's body")
    body_s: float = setting(60.0, "seconds within which a request's body must arrive")
    send_s: float = setting(60.0, "seconds that a client may leave an answer unread; then it is cut off")
    logprobs: LogprobMode = setting(
        "policy",
        "log-prob of a sampled token: of the policy at the request's temperature, of the distribution it was "
        "drawn from, or at temperature 1",
    )
    routed_experts: ExpertFormat = setting(
        "off", "experts in answers of /inference/v1/generate: none, vLLM's base64 .npy, or prime-rl's object"
    )
    tool_parser: str = setting(
        "auto",
        "format of tool calls, such as hermes; auto: the one that the chat template writes; none: calls stay text",
    )
    reasoning_parser: str = setting(
        "none",
        "format of reasoning, such as think; auto: the one that the chat template writes; none: it stays text",
    )
    constrain_reasoning: bool = setting(
        False, "let constraints hold from the first token on; absent: behind the reasoning, if there is a parser of it"
    )
    trust_request_chat_template: bool = setting(False, "accept chat templates in requests; each is a program")
    weights_root: str | None = setting(
        None, "folder below which folders of weights are read for updates; absent: no updates from folders"
    )
    images_root: str | None = setting(
        None, "folder below which pictures with file URLs are read; absent: pictures come in data URLs only"
    )
    update_s: float = setting(600.0, "seconds from the start of an update until all workers use it")

    def __post_init__(self) -> None:
        if not self.endpoints or len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("give at least one ENDPOINT, and each of them once")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port is {self.port}; use 0 to 65535")
        for name in ("start_s", "resume_s", "heartbeat_s", "session_s", "body_s", "send_s", "keep_alive_s", "update_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0 seconds")
        for name in ("stream_every", "max_in_flight", "max_connections", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.min_version < 0:
            raise ValueError("--min-version must be at least 0")

    @property
    def resumes(self) -> bool:
        """True if requests go on at another worker when theirs is lost."""
        return len(self.endpoints) > 1 if self.resume is None else self.resume


def declared() -> list[tuple[str, Any, str, Any]]:
    """The settings that have flags: name, annotation, help text, default."""
    return [
        (each.name, each.type, each.metadata["meaning"], each.default)
        for each in fields(GatewaySettings)
        if "meaning" in each.metadata
    ]
