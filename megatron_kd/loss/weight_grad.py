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

Memory: nothing beyond main_grad in its own dtype. An ordinary bf16 gradient is summed up in float32, in two parts of
twice its size together, and rounded into the memory of the first part: at no time is there more than those two.

Legend: n tokens of a strip, V rows of the weight, H hidden size.
"""

import torch

from megatron_kd.loss.errors import require
from megatron_kd.loss.matmul import BLOCK, add_weight_gradient, scaled


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


class WeightGradient:
    """The gradient of the weight [V, H] while it is made.

    Args:
        parts: It, cut along V into one or two tensors. Padded columns never get anything.
        in_main_grad: Whether they are `main_grad`.
        empty: Whether they hold nothing yet, not even zeros.
    """

    def __init__(self, parts: list[torch.Tensor], *, in_main_grad: bool = False, empty: bool = False):
        self.parts, self.in_main_grad, self._empty = parts, in_main_grad, empty

    @classmethod
    def of_one_call(cls, weight: torch.Tensor, dtype: torch.dtype) -> "WeightGradient":
        """New memory; in two parts if the result will be rounded to half their size."""
        goes_to_main_grad = hasattr(weight, "__fsdp_param__") or getattr(weight, "main_grad", None) is not None
        halved = not goes_to_main_grad and weight.dtype.itemsize * 2 == dtype.itemsize
        first = -(-len(weight) // 2) if halved else len(weight)
        parts = [part for part in (weight[:first], weight[first:]) if len(part)] or [weight]
        return cls([torch.empty_like(part, dtype=dtype) for part in parts], empty=True)

    @classmethod
    def onto_main_grad(cls, weight: torch.Tensor, dtype: torch.dtype) -> "WeightGradient":
        """What finished gradients can be added to: `main_grad` if it has this dtype, else new memory."""
        main_grad = main_grad_of(weight)
        if main_grad is None or main_grad.dtype != dtype:
            return cls.of_one_call(weight, dtype)
        return cls([main_grad.zero_() if is_fresh(weight) else main_grad], in_main_grad=True)

    def add(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add grad.T @ hidden; grad [n, real columns], hidden [n, H]."""
        for part in self.parts:
            columns, grad = grad[:, : len(part)], grad[:, len(part) :]
            real = columns.shape[1]
            add_weight_gradient(part[:real], columns, hidden, first=self._empty)
            if self._empty:
                part[real:].zero_()
        self._empty = False

    def finished(self) -> list[torch.Tensor]:
        """The parts, once all is added."""
        if self._empty:
            for part in self.parts:
                part.zero_()
            self._empty = False
        return self.parts

    def deliver(
        self, weight: torch.Tensor, scale: torch.Tensor | None = None, *, reuse: bool = True
    ) -> torch.Tensor | None:
        """Hand it, times the 0-dim `scale`, to `main_grad` or to autograd, rounded once.

        Args:
            weight: The parameter.
            scale: Factor; None: 1.
            reuse: Whether the parts may be written over.

        Returns:
            What backward returns for the weight.
        """
        self.finished()
        main_grad = main_grad_of(weight)
        if main_grad is None:
            return self._rounded(weight, scale, reuse)
        if not self.in_main_grad:
            if is_fresh(weight):
                main_grad.zero_()
            for own, total in zip(main_grad.split([len(part) for part in self.parts]), self.parts, strict=True):
                own.add_(total) if scale is None else own.addcmul_(total, scale.reshape(1, 1))
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else unread_gradient(weight)

    def _rounded(self, weight: torch.Tensor, scale: torch.Tensor | None, reuse: bool) -> torch.Tensor:
        """It times the scale, [V, H] in the dtype of the weight."""
        scale = self.parts[0].new_ones(()) if scale is None else scale
        if len(self.parts) == 1:
            return scaled(self.parts[0], scale, weight.dtype, reuse=reuse)
        first, second = self.parts
        if reuse:
            out = first.view(-1).view(weight.dtype)[: weight.numel()].view(weight.shape)
        else:
            out = torch.empty_like(weight)
        for start in range(0, len(first), BLOCK):  # what is written lies in front of what is still to be read
            rows = slice(start, start + BLOCK)
            out[: len(first)][rows] = scaled(first[rows], scale, weight.dtype, reuse=False)
        scaled(second, scale, weight.dtype, out=out[len(first) :])
        return out


def unread_gradient(weight: torch.Tensor) -> torch.Tensor:
    """A gradient that nobody reads and that takes no memory: sparse, without entries. Megatron makes [V, H] of it."""
    return torch.sparse_coo_tensor(size=weight.shape, dtype=weight.dtype, device=weight.device, check_invariants=False)
