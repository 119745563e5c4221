"""Triton kernels run in Triton's interpreter where there is no CUDA device; it has to be chosen before Triton loads."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
