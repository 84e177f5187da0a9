# SPDX-License-Identifier: Apache-2.0
"""The error of a wrong argument, raised without waiting for a device."""

import torch

from megatron_kd.errors import UserError


class LossArgumentError(UserError, ValueError):
    """An argument of a loss is wrong by itself or does not fit the others."""


def require(condition: bool, message: str) -> None:
    """Raise LossArgumentError(message) unless the condition holds."""
    if not condition:
        raise LossArgumentError(message)


def require_on_device(condition: torch.Tensor, message: str) -> None:
    """Require a 0-dim bool: at once on CPU, elsewhere by an assertion on the device, since to look is to wait."""
    if condition.device.type != "cpu":
        torch._assert_async(condition, message)
    elif type(condition) is torch.Tensor:  # a fake tensor has no value to look at
        require(bool(condition), message)
