# SPDX-License-Identifier: Apache-2.0
"""The three GEMMs of a strip: logits, gradient of hidden, gradient of weight. All accumulate in float32 or better.

bf16 on CUDA multiplies bf16 operands and keeps float32 results. Where torch has no such product (CPU), and for fp16,
whose range a logit gradient would leave, the operands are widened a block of columns at a time.
Megatron adds weight gradients to `main_grad` with apex's fused_weight_gradient_mlp_cuda: one cuBLAS product with a
float32 sum, as is addmm with an `out_dtype`. Apex's takes no gaps between rows, and a gradient that lies over its own
wider logits has them: it would need a copy of the strip. So addmm it is, with or without apex.

Legend: n tokens of a strip, H hidden size, V columns of this rank. Cost: 2 * n * H * V FLOPs each.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

BLOCK = 8192
"""Columns whose weights are widened at a time: 90 MiB at H = 2,880."""


def logits_into(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """out[n, V] = hidden @ weight.T, rounded to `dtype` on the way."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    elif hidden.dtype == dtype:
        out.copy_(hidden @ weight.T)
    elif _mixed(hidden, out):
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for block in _blocks(weight):
            out[:, block] = hidden @ weight[block].T.to(out.dtype)


def operand_dtype(logits: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """In which dtype the next two products take the gradient of logits: where they keep float32 results, weight's."""
    return weight.dtype if _mixed(weight, logits) else logits.dtype


def hidden_gradient(
    grad: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """grad @ weight, [n, H] in the dtype of weight, times the factor [n, 1]. In new memory or `out`.

    grad is in operand_dtype, the factor in its dtype.
    """
    if grad.dtype == weight.dtype:
        product = torch.mm(grad, weight, out=out)
        return product if factor is None else product.mul_(factor)
    total = grad.new_zeros(len(grad), weight.shape[1])
    for block in _blocks(weight):
        torch.addmm(total, grad[:, block], weight[block].to(grad.dtype), out=total)
    if factor is not None:
        total.mul_(factor)
    return total.to(weight.dtype) if out is None else out.copy_(total)


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor, *, first: bool) -> None:
    """total[V, H] += grad.T @ hidden in the dtype of total, whose content does not matter if this is the first.

    grad is in operand_dtype.
    """
    beta = 0 if first else 1
    if grad.dtype == total.dtype:
        torch.addmm(total, grad.T, hidden.to(grad.dtype), beta=beta, out=total)
    else:
        torch.addmm(total, grad.T, hidden, out_dtype=total.dtype, beta=beta, out=total)


def scaled(
    total: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    reuse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """total [R, H] times a 0-dim scale, rounded to `dtype` once; in place with `reuse` if that is its dtype.

    The scale has two axes here, since a 0-dim factor would be rounded itself.
    """
    if out is None:
        out = total if reuse and dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    return torch.mul(total, scale.reshape(1, 1), out=out)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """A context in which operators keep the dtypes they are given. Meta tensors know no autocast."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _mixed(operand: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether there is a product of such operands as they are with such a result. Meta tensors stand for CUDA's."""
    return (
        operand.device.type in ("cuda", "meta") and operand.dtype == torch.bfloat16 and result.dtype == torch.float32
    )


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, len(weight), BLOCK))
