# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of the head's weight goes: Megatron's `main_grad`, or an ordinary gradient.

Megatron's data-parallel wrapper gives each parameter `main_grad`, a view into its gradient buffer, and the flag
`grad_added_to_main_grad`. Whoever adds to `main_grad` itself sets the flag and returns a dummy gradient, which keeps
the backward hooks on the main thread. With `zero_out_wgrad` the dummy must be zeros, since the hook adds it as well:
the weight is a tied embedding, whose other gradient autograd has added to the dummy. The flag never means that this
call's gradient is there already: always add.
Megatron-FSDP makes the buffer when `get_main_grad()` is called; if it shards gradients, the buffer is fresh memory to
be written over, and reduced and added up afterwards.
Source: megatron-core 0.19, tensor_parallel/layers.py, distributed/distributed_data_parallel.py and distributed/fsdp.

Memory: nothing beyond main_grad in its own dtype. An ordinary gradient is rounded into a second tensor.
"""

import torch

from megatron_kd.loss.errors import require


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer for the weight's gradient, checked; None for a weight without.

    Raises:
        LossArgumentError: If it has another shape than the weight.
    """
    main_grad = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)
    if main_grad is not None:
        require(
            main_grad.shape == weight.shape,
            f"weight.main_grad: expected {list(weight.shape)} like weight, found {list(main_grad.shape)}.",
        )
    return main_grad


def is_fresh(weight: torch.Tensor) -> bool:
    """Whether `main_grad` holds nothing to add to: Megatron-FSDP, unless it leaves gradients unsharded."""
    buffer = getattr(weight, "_gbuf", None)
    return hasattr(weight, "__fsdp_param__") and getattr(buffer, "is_data_distributed", True)


def accumulator(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What finished gradients can be added to: `main_grad` if it has this dtype, else zeros of this dtype."""
    main_grad = main_grad_of(weight)
    if main_grad is not None and main_grad.dtype == dtype:
        return main_grad.zero_() if is_fresh(weight) else main_grad
    return torch.zeros_like(weight, dtype=dtype)


def deliver(
    weight: torch.Tensor, total: torch.Tensor, scale: torch.Tensor | None = None, *, reuse: bool = False
) -> torch.Tensor | None:
    """Hand `total`, times the 0-dim `scale`, to `main_grad` or to autograd, rounded once.

    Args:
        weight: The parameter.
        total: [V, H]: its gradient, or what accumulator returned.
        scale: Factor of `total`; None: 1.
        reuse: Whether `total` may be written over.

    Returns:
        What backward returns for the weight.
    """
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return total.to(weight.dtype) if scale is None else scaled(total, scale, weight.dtype, reuse=reuse)
    if not (scale is None and total.dtype == main_grad.dtype):  # else total is what accumulator found: main_grad
        if is_fresh(weight):
            main_grad.zero_()
        if scale is None:
            main_grad.add_(total)
        else:
            main_grad.addcmul_(total, scale.reshape(1, 1))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else unread_gradient(weight)


def unread_gradient(weight: torch.Tensor) -> torch.Tensor:
    """A gradient that nobody reads and that takes no memory: sparse, without entries. Megatron makes [V, H] of it."""
    return torch.sparse_coo_tensor(size=weight.shape, dtype=weight.dtype, device=weight.device, check_invariants=False)


def scaled(total: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, reuse: bool) -> torch.Tensor:
    """total [R, H] times a 0-dim scale, rounded to `dtype` once; in place with `reuse` if that is its dtype.

    The scale has two axes here, since a 0-dim factor would be rounded itself.
    """
    out = total if reuse and dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    return torch.mul(total, scale.reshape(1, 1), out=out)
