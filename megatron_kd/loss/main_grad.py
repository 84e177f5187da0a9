# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of the head's weight goes: Megatron's `main_grad`, or an ordinary gradient.

Megatron's data-parallel wrapper gives each parameter `main_grad`, a view into its gradient buffer, and the flag
`grad_added_to_main_grad`. Whoever adds to `main_grad` itself sets the flag and returns a dummy gradient, which keeps
the backward hooks on the main thread. With `zero_out_wgrad` the dummy must be zeros, since the hook adds it as well:
the weight is a tied embedding, whose other gradient autograd has added to the dummy. The flag never means that this
call's gradient is there already: always add.
Source: megatron-core 0.19, tensor_parallel/layers.py and distributed/distributed_data_parallel.py.
"""

import torch

from megatron_kd.loss.errors import require


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight's `main_grad`, checked; None for a weight without.

    Raises:
        LossArgumentError: If it has another shape than the weight.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        require(
            main_grad.shape == weight.shape,
            f"weight.main_grad: expected {list(weight.shape)} like weight, found {list(main_grad.shape)}.",
        )
    return main_grad


def accumulator(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What finished gradients can be added to: `main_grad` if it has this dtype, else zeros of this dtype."""
    main_grad = main_grad_of(weight)
    if main_grad is not None and main_grad.dtype == dtype:
        return main_grad
    return torch.zeros_like(weight, dtype=dtype)


def deliver(weight: torch.Tensor, total: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor | None:
    """Hand `total`, times the 0-dim `scale`, to `main_grad` or to autograd, rounded once. `total` stays as it is.

    Returns:
        What backward returns for the weight.
    """
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return total.to(weight.dtype) if scale is None else scaled(total, scale, weight.dtype)
    if scale is not None:
        main_grad.addcmul_(total, scale.reshape(1, 1))
    elif total is not main_grad:
        main_grad.add_(total)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zeros = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


def scaled(total: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total [R, H] times a 0-dim scale, rounded to `dtype` once. A 0-dim factor would be rounded itself."""
    return torch.mul(total, scale.reshape(1, 1), out=torch.empty_like(total, dtype=dtype))
