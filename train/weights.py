"""The drafter's weights as the step's products read them: copies in the compute dtype, refreshed after every update.

Gradients go straight into the optimizer's flat float32 buffer. Parameters that lie side by side in it (query, key and
value; gate and up) can be read as one taller matrix, so that one product serves them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Weight:
    """One or several parameters, stacked along their first axis."""

    value: Tensor  # [n] or [out, in], compute dtype
    gradient: Tensor  # the same shape, float32, summed into
    parameter: Tensor  # one of them; autograd runs a backward pass for its sake


class ComputeWeights:
    """Copies of all parameters in the compute dtype. Their addresses never change."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Tensor, dtype: torch.dtype) -> None:
        """`gradients` is the flat float32 buffer that holds the parameters' gradients in this order."""
        self._masters: list[Tensor] = list(parameters)
        self._gradients = gradients
        self._values = torch.empty(len(gradients), dtype=dtype, device=gradients.device)
        self._begin: dict[Tensor, int] = {}
        self._copies: list[Tensor] = []
        offset = 0
        for parameter in parameters:
            self._begin[parameter] = offset
            self._copies.append(self._values[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.refresh()

    def weight(self, *parameters: Tensor) -> Weight:
        """Neighbouring parameters as one."""
        begin = end = self._begin[parameters[0]]
        for parameter in parameters:
            assert self._begin[parameter] == end, "these parameters are not neighbours in the gradient buffer"
            end += parameter.numel()
        shape = (sum(p.shape[0] for p in parameters), *parameters[0].shape[1:])
        return Weight(self._values[begin:end].view(shape), self._gradients[begin:end].view(shape), parameters[0])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the float32 masters again."""
        torch._foreach_copy_(self._copies, self._masters)
