"""What tests of matrix products share: operands with their exact product, and the relative error of a result."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, generator=generator).bfloat16().to(DEVICE)
    w = (torch.randn(outputs, inputs, generator=generator) * 0.1).bfloat16().to(DEVICE)
    return x, w, x.double() @ w.double().T


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()
