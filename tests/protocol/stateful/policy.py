"""A model that shows whether all its weights are of one version.

Worker processes import this module, so it imports no test code.
"""

from __future__ import annotations

import torch


class Policy(torch.nn.Module):
    """A model whose tensors and extra state all hold the same number if they are of one version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.extra = 0
        self.mood = "fine"

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        if self.mood == "refuses":
            raise RuntimeError("the model's hook refuses")
        self.extra = state
        if self.mood == "breaks":
            raise RuntimeError("the model's hook breaks, and cannot be put back")

    @property
    def codes(self) -> set[int]:
        """The numbers that the model holds: exactly one, unless its weights are torn."""
        return {self.extra, *map(int, (*self.weight.tolist(), *self.bias.tolist(), *self.count.tolist()))}
