"""One choice of experts for several computations of the same steps, so that their numbers can be compared.

Products in 16 bits round differently on different CPUs. Where two experts of a token are nearly equally likely, one
computation takes the one and another the other, and all that follows differs by far more than rounding. So the steps
under test choose, and those beside them take the same experts; `ExpertChoices.taken` gives the regrets: how much
worse than its own a choice is in the eyes of the computation that takes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rollout.models import fused_experts, layers
from rollout.models.spec import RouterSpec

#: By how much the logit of an expert that was left out may exceed that of one that was taken; logits spread over 1.
NEARLY_EQUAL = 0.1


class ExpertChoices:
    """What the routers of some fused steps chose, layer by layer and step by step."""

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []  # [T, K] of each call

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the choices of the fused steps that run within."""
        run = fused_experts.run_experts

        def note(x_TH: torch.Tensor, routing: Any, *rest: Any, **options: Any) -> torch.Tensor:
            self.chosen.append(routing.experts_TK.long().clone())
            return run(x_TH, routing, *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused_experts, "run_experts", note)
            yield

    @contextmanager
    def taken(self) -> Iterator[list[float]]:
        """Let the same steps, run within by the torch modules, take these experts, with weights of their own logits.

        The list that it gives holds, after each router, by how much the logit (of a router with a bias: sigmoid plus
        bias) of an expert that was left out exceeds that of one that was taken: 0 if it would have chosen the same.
        """
        regrets: list[float] = []
        left = iter(self.chosen)

        def take(
            rule: layers.Route, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec
        ) -> tuple[torch.Tensor, torch.Tensor]:
            experts_TK = next(left).view(len(logits_TE), -1)[:, : router.top_k]  # without a shared expert
            assert experts_TK.shape == (len(logits_TE), router.top_k)
            scores_TE = logits_TE.float() if bias_E is None else logits_TE.float().sigmoid() + bias_E
            others_TE = scores_TE.scatter(1, experts_TK, -torch.inf)
            regrets.append((others_TE.amax(1) - scores_TE.gather(1, experts_TK).amin(1)).amax().clamp(min=0).item())
            # All experts, in the order of their number, with the weights that they would have if they were chosen.
            weights_TE, order_TE = rule(logits_TE, bias_E, replace(router, top_k=logits_TE.shape[1]))
            weights_TK = torch.zeros_like(weights_TE).scatter(1, order_TE, weights_TE).gather(1, experts_TK)
            if router.renormalize:  # to the sum that the rule gives, which may have a scale
                weights_TK = weights_TK / weights_TK.sum(1, keepdim=True) * weights_TE.sum(1, keepdim=True)
            return weights_TK, experts_TK

        with pytest.MonkeyPatch.context() as patch:
            for scoring, rule in layers.ROUTES.items():
                patch.setitem(layers.ROUTES, scoring, partial(take, rule))
            yield regrets
        assert next(left, None) is None, "these are not the same steps"
