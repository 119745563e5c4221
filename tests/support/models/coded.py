"""Models whose weights are those that codes stand for."""

from __future__ import annotations

import torch

from rollout.models.coded import CodedView
from rollout.models.decoder import Decoder


def decode_into(plain: Decoder, coded: Decoder) -> Decoder:
    """Put into a plain model the weights that the codes of another one stand for; returns it."""
    views, coded_views = plain.hf_views(), coded.hf_views()
    with torch.no_grad():
        for region in coded.hf_regions():
            for name in region.alternatives[0]:
                view = coded_views[name]
                if isinstance(view, CodedView):
                    views[name].copy_(view.decoded_values())
    return plain
