"""The drafter's weights as products read them: copies in the compute dtype, written by the optimizer's update.

Gradients go straight into the optimizer's flat float32 buffer. Parameters that lie side by side in it (query, key and
value; gate and up) can be read as one taller matrix, so that one product serves them all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftcache.train.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Weight:
    """One or several parameters, stacked along their first axis."""

    value: Tensor  # [n] or [out, in], compute dtype
    gradient: Tensor  # the same shape, float32, summed into
    parameter: Tensor  # one of them; autograd runs a backward pass for its sake


class ComputeWeights:
    """Copies of all parameters in the compute dtype. Their addresses never change."""

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        """Copies the masters as they are: weights are loaded before."""
        self._optimizer = optimizer
        self.values = optimizer.masters.to(dtype, copy=True)
        """Flat, in the order of the optimizer's buffers; its update keeps them equal to the masters."""
        self._begin: dict[Tensor, int] = {}
        offset = 0
        for parameter in optimizer.parameters:
            self._begin[parameter] = offset
            offset += parameter.numel()

    def weight(self, *parameters: Tensor) -> Weight:
        """Neighbouring parameters as one."""
        begin = end = self._begin[parameters[0]]
        for parameter in parameters:
            assert self._begin[parameter] == end, "these parameters are not neighbours in the gradient buffer"
            end += parameter.numel()
        shape = (sum(p.shape[0] for p in parameters), *parameters[0].shape[1:])
        return Weight(
            self.values[begin:end].view(shape), self._optimizer.gradients[begin:end].view(shape), parameters[0]
        )
