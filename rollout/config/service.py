"""The settings of the request socket and of requests: a small group for each feature, and `ServiceSettings`."""

from pydantic import Field

from rollout.config.section import SettingsSection

#: The longest lease of KV that a request may ask for, in seconds. A tool call of a turn rarely takes longer.
MAX_SESSION_LEASE_S = 3600.0


class SocketSettings(SettingsSection):
    """The request socket."""

    bind: str = Field("tcp://127.0.0.1:5757", description="port 0: a free one; IPv6 addresses stand in brackets")
    max_message_bytes: int = Field(64 << 20, ge=1024, description="most bytes of a message")
    max_stream_buffer_bytes: int = Field(
        256 << 20, ge=1 << 16, description="unsent bytes after which a client gets no more chunks"
    )


class RequestSettings(SettingsSection):
    """Requests and their clients."""

    max_queue: int = Field(4096, ge=1, description="most completions in the queue")
    lease_s: float = Field(60.0, ge=0, description="seconds until requests of an absent named client are cancelled")
    drain_s: float = Field(30.0, ge=0, description="seconds until a drain returns completions as they are")


class MediaSettings(SettingsSection):
    """Images and videos of requests."""

    media_store_bytes: int = Field(2 << 30, ge=1, description="host memory for pixels")


class ServiceConstants(SettingsSection):
    """Limits that no source of settings can change. Tests build services with other limits."""

    #: Completions of one request. The largest groups of published recipes have some hundreds.
    max_n: int = 1024
    #: Tokens of one prompt, checked before anything is allocated for it. Longer contexts are not served.
    max_prompt_tokens: int = 1 << 20
    #: Characters of one prompt, as text or rendered by a chat template: eight for each of `max_prompt_tokens`.
    max_prompt_chars: int = 8 << 20
    #: Seconds for chat template and tokenizer of one prompt. The longest prompts take some seconds; an endless template
    #: must not block the prompts after it for long.
    max_prompt_s: float = 60.0
    #: Seconds for compiling a constraint: one that never ends must not hold a thread of the compiler.
    max_constraint_s: float = 20.0
    #: Seconds that a session keeps its KV for the next turn, unless the request says otherwise. Later its full pages
    #: are cached like any prompt's.
    session_lease_s: float = 300.0
    max_session_lease_s: float = MAX_SESSION_LEASE_S
    #: Images and videos of a request; of some models each frame of a video is one.
    max_media: int = 1024
    #: Patches of all images and videos of a request: 16 of the largest size.
    max_media_patches: int = 262_144
    #: Bytes of top log-probs, routing and prompt ids in one reply, which is made as a whole on the service thread.
    max_reply_bytes: int = 1 << 30
    #: Bytes of messages whose requests wait or run: bounds the memory that clients can take.
    max_pending_bytes: int = 1 << 30
    #: Clients with requests in flight: bounds what many clients with one small request each can take.
    max_clients: int = 1024
    #: Bytes of a message header, and blobs of a message: the defaults of `trainer_bridge.wire.codec.WireLimits`.
    max_header_bytes: int = 16 << 20
    max_blobs: int = 256
    #: Messages in the pipe of one connection, before its backlog.
    send_hwm: int = 256
    #: Reports of log-probs that wait for their comparison, and their bytes: one thread compares some a millisecond.
    max_reports: int = 1024
    max_report_bytes: int = 256 << 20
    #: Bytes of kept results, and their number, since each takes some memory besides its bytes.
    max_results_bytes: int = 512 << 20
    max_results: int = 4096
    #: Ended requests whose tokens others may continue (`fork`), and bytes of these tokens: 64 million tokens.
    max_histories: int = 16_384
    max_history_bytes: int = 256 << 20
    #: Seconds after which a kept result is dropped: a client that is away for an hour has ended.
    max_results_age_s: float = 3600.0


class ServiceSettings(SocketSettings, RequestSettings, MediaSettings):
    """The request socket and the limits of requests."""

    constants: ServiceConstants = ServiceConstants()
