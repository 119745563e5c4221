"""The settings of a gateway, which is a process of its own: the table `[gateway]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.config.section import SettingsSection

#: The log-prob of a sampled token that is shown; see `rollout_gateway/answers/logprobs.py`.
LogprobMode = Literal["policy", "processed", "raw"]
#: Forms in which `/inference/v1/generate` shows the experts of tokens; see `rollout_gateway/dialects/vllm.py`.
ExpertFormat = Literal["off", "npy", "object"]


class GatewaySettings(SettingsSection):
    """The gateway."""

    endpoints: tuple[str, ...] = Field((), description="addresses of workers, such as tcp://127.0.0.1:5757")
    host: str = Field("127.0.0.1", description="address; all but loopback need api_key_file")
    port: int = Field(8000, ge=0, le=65535, description="port; 0: a free one")
    model: str | None = Field(
        None, description="folder or hub id of the tokenizer and chat template; none: the workers'"
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="names of the model in requests; none: the workers' name"
    )
    api_key_file: str | None = Field(None, description="file with the accepted bearer tokens, one a line")
    ready_file: str | None = Field(None, description="file for the URL, written when the gateway listens")
    start_s: float = Field(600.0, gt=0, description="seconds to wait at the start for a worker")
    resume: bool | None = Field(
        None, description="continue requests of a lost worker on another worker; none: with several workers"
    )
    resume_s: float = Field(120.0, gt=0, description="seconds that a resumed request may be without a worker")
    heartbeat_s: float = Field(2.0, gt=0, description="seconds between heartbeats; a worker that misses three is lost")
    min_version: int = Field(0, ge=0, description="a worker with older weights is unhealthy")
    stream_every: int = Field(1, ge=1, description="least tokens of an event of a stream")
    session_s: float = Field(
        3600.0, gt=0, description="seconds until an idle X-Session-ID or stored response is forgotten"
    )
    max_kept_bytes: int = Field(
        1 << 30, ge=0, description="most bytes of kept trajectories, and of stored responses; 0: none"
    )
    max_in_flight: int = Field(8192, ge=1, description="most completions in flight; further ones get status 429")
    max_connections: int = Field(
        4096, ge=1, description="most connections; a further one replaces an idle one, or gets status 503"
    )
    keep_alive_s: float = Field(
        620.0, gt=0, description="seconds until an idle connection is closed; more than proxies and clients wait"
    )
    max_body_bytes: int = Field(64 << 20, ge=1, description="most bytes of a request's body")
    body_s: float = Field(60.0, gt=0, description="seconds for a request's body to arrive")
    send_s: float = Field(60.0, gt=0, description="seconds for a client to read an answer")
    logprobs: LogprobMode = Field(
        "policy",
        description="log-prob of a sampled token; policy: at the request's temperature; processed: as drawn; raw: at "
        "temperature 1",
    )
    routed_experts: ExpertFormat = Field(
        "off", description="experts in answers of /inference/v1/generate: vLLM's base64 .npy, or prime-rl's object"
    )
    tool_parser: str = Field(
        "auto", description="format of tool calls, such as hermes; auto: the chat template's; none: calls stay text"
    )
    reasoning_parser: str = Field(
        "none", description="format of reasoning, such as think; auto: the chat template's; none: reasoning stays text"
    )
    constrain_reasoning: bool = Field(
        False, description="apply constraints from the first token on, not after the reasoning"
    )
    trust_request_chat_template: bool = Field(False, description="accept chat templates in requests: each is a program")
    weights_root: str | None = Field(None, description="folder below which updates read weights; none: they do not")
    images_root: str | None = Field(None, description="folder of pictures named by file URLs; none: data URLs only")
    update_s: float = Field(600.0, gt=0, description="seconds until all workers use an update")

    @model_validator(mode="after")
    def _names_workers(self) -> GatewaySettings:
        if not self.endpoints or len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("give at least one ENDPOINT, and each of them once")
        return self

    @property
    def resumes(self) -> bool:
        """True if requests go on at another worker when theirs is lost."""
        return len(self.endpoints) > 1 if self.resume is None else self.resume


class GatewayFile(SettingsSection):
    """The tables of a settings file that a gateway reads."""

    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
