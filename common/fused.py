"""Compiles a pointwise function into few kernels at its first use on CUDA; on the CPU it runs as it stands."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Rest = ParamSpec("Rest")
Result = TypeVar("Result")

MAX_COMPILATIONS = 64
"""Shapes that one function may be compiled for; past it, `fullgraph` makes torch raise instead of running slowly."""


def fused(function: Callable[Concatenate[Tensor, Rest], Result]) -> Callable[Concatenate[Tensor, Rest], Result]:
    """The function, compiled where its first argument lies on CUDA. It must read nothing but its arguments."""
    compiled: Callable[Concatenate[Tensor, Rest], Result] | None = None

    @wraps(function)
    def call(first: Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        nonlocal compiled
        if not first.is_cuda:
            return function(first, *args, **kwargs)
        if compiled is None:
            torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
            compiled = torch.compile(function, fullgraph=True)
        return compiled(first, *args, **kwargs)

    return call
