# SPDX-License-Identifier: Apache-2.0
"""The loss under torch.compile: a function that graphs go around.

Strips overwrite each other's memory and are multiplied by library kernels: a compiler has nothing to gain there, and
would unroll the loop.
"""

import functools
from collections.abc import Callable

import torch


def untraced(function: Callable) -> Callable:
    """The function, run as it is also where its caller is being compiled: one break of the graph.

    torch.compiler.disable alone would do, but to decorate with it takes seconds of imports.
    """
    disabled = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
