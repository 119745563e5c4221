"""How to go on with a completion that lost its worker: its seed, and the request that continues it.

The random numbers of a completion depend on its own seed and on positions only. A client that chose the request's seed
therefore knows the seeds of all its completions before the first token has come, and can have any of them continued,
or begun, by another worker.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from trainer_bridge.client.generate_request import RequestPlan, prior_fields
from trainer_bridge.client.results import Completion, FinishReason

_SEED_BITS = 63


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with this `seed`, as `docs/reference/protocol.md` defines it."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _SEED_BITS) - 1)


def draw_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def request_seed(plan: RequestPlan) -> int | None:
    """The seed that a request names: its own, or that of the completion which it continues. Raises ValueError."""
    seed = plan.fields.get("sampling", {}).get("seed") if plan.prior is None else plan.prior.seed
    if seed is None:
        return None
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << _SEED_BITS:
        raise ValueError(f"the seed is {seed!r:.40}; use an integer from 0 to 2**63 - 1")
    return int(seed)


def first_plan(plan: RequestPlan, seed: int, remaining_s: float | None) -> RequestPlan:
    """The request as a whole, streamed and with a seed of the client's choice. `remaining_s` of its deadline are left.

    The text of a completion that continues one without text is asked for from its start, unless the caller sees the
    pieces: put together they are then the whole.
    """
    fields = {**plan.fields, "stream": "tokens"}
    if remaining_s is not None:
        fields["deadline_s"] = remaining_s
    if plan.prior is None:
        fields["sampling"] = {**fields.get("sampling", {}), "seed": seed}
    elif fields.get("return_text") and plan.prior.text is None and plan.stream != "tokens":
        fields["continue_from"] = {**fields["continue_from"], "text_chars": 0}
    return replace(plan, fields=fields, stream="tokens")


def continued_plan(plan: RequestPlan, held: Completion, remaining_s: float | None, scored: bool = True) -> RequestPlan:
    """The request that goes on with one completion: `held` is what there is of it, its seed included.

    With `scored` the log-probs of the prompt are known, or another request brings them: they are not asked for. Routing
    stays here, since it may be large: chunks bring what is added to it.
    """
    left_out = ("n", "min_complete", "prompt_logprobs") if scored else ("n", "min_complete")
    fields = {name: value for name, value in plan.fields.items() if name not in left_out}
    if "sampling" in fields:
        fields["sampling"] = {name: value for name, value in fields["sampling"].items() if name != "seed"}
    if fields.get("return_text") and held.text is None and (plan.prior is None or plan.stream != "tokens"):
        held = replace(held, text="")
    fields |= {"stream": "tokens", "continue_from": prior_fields(replace(held, routing=None))}
    if remaining_s is not None:
        fields["deadline_s"] = remaining_s
    prior = replace(held, index=0)
    return replace(plan, fields=fields, n=1, prior=prior, request_id=None, stream="tokens")


def empty_part(index: int, seed: int, finish_reason: FinishReason | None = None) -> Completion:
    """A completion, or a part of one, without tokens."""
    none = np.zeros(0, np.float32)
    return Completion(index, np.zeros(0, np.int32), none, none, [], finish_reason=finish_reason, seed=seed)
