# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch's Adam inside Megatron's distributed optimizer, which expects Transformer Engine's or apex's.

In: a DistributedOptimizer around `torch.optim.Adam` or `AdamW`. Out: its state and load functions, mended. torch
counts steps in a tensor per parameter and creates it at the first step. Megatron wants a count before that; on loading
it gives all parameters one tensor, which would advance once per parameter, or puts back the count from before loading.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_state(state_dict: Callable) -> Callable:
    """`DistributedOptimizer.state_dict` that works before the first step."""

    @functools.wraps(state_dict)
    def state_dict_at_any_time(self: Any) -> dict[str, Any]:
        _start_state(self.optimizer)
        return state_dict(self)

    return state_dict_at_any_time


def with_own_steps(load_state_dict: Callable) -> Callable:
    """`DistributedOptimizer.load_state_dict` that leaves each parameter a step count of its own, the saved one."""

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if "step" in group and "step" in self.optimizer.state[parameter]:
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    return load_with_own_steps


def without_steps(set_states: Callable) -> Callable:
    """`DistributedOptimizer._set_main_param_and_optimizer_states` that leaves step counts alone."""

    @functools.wraps(set_states)
    def set_states_without_steps(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})  # it skips what is not a tensor

    return set_states_without_steps


def _start_state(optimizer: torch.optim.Optimizer) -> None:
    """What Adam itself creates at its first step."""
    if optimizer.state or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
