# SPDX-License-Identifier: Apache-2.0
"""The two passes over a strip's logits: statistics of its rows, and the rows of its gradient written over them.

In: logits z [n, V], and the columns of the teacher's entries and the labels on this rank (-1: none). Out: a few
numbers a row; then the same memory, with d total / d z, as the operand of the next two products: in `dtype`, which may
be narrower than that of the logits, over the front of its own row.

Here are the eager forms, and the choice between them and the Triton kernels of triton_kernels.py, one pass each.
Cost of the eager forms: a few rows at a time, so that what lies between two operators stays in a cache; beyond the
logits, two or three blocks of BLOCK_ELEMENTS. On CPU, where the gradient follows at once, row_exponentials leaves
exponentials behind, which are the gradient but for a factor of each row (exponentials_gradient_): one pass in all.

Legend: n tokens of a strip, V real columns of this rank, K teacher entries.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_kd.loss.errors import require

BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Logits that the eager forms hold twice: 2 MiB, about two cores' caches; 32 MiB where each operator is a launch."""

KERNELS_VARIABLE = "MEGATRON_KD_KERNELS"
KERNELS = ("auto", "triton", "eager")
_forced: str | None = None


class RowGradient(NamedTuple):
    """What the gradient of a row is made of.

    Column v of the tail gets `tail * exp(z_v / T - log_tail) + ce * exp(z_v - log_total)`, the column of entry k gets
    `entries[k]`. The label's column, if no entry has it, gets `label` more than the tail.
    """

    tail: torch.Tensor
    """[n]"""
    log_tail: torch.Tensor
    """[n]: log-sum-exp of z / T over the tail; -inf for a tail without columns."""
    entries: torch.Tensor
    """[n, K]"""
    label: torch.Tensor | None = None
    """[n]; None without a gradient of the cross entropy."""
    ce: torch.Tensor | None = None
    """[n]; None unless cross entropy has a temperature of its own."""
    log_total: torch.Tensor | None = None
    """[n]: log-sum-exp of z over the vocabulary; None as `ce`."""


def set_kernels(choice: str | None) -> None:
    """Choose the form of both passes for this process.

    "auto": Triton for float32 logits on CUDA if the package triton is there, else eager. "triton" and "eager" force
    one; Triton on CPU needs its interpreter, TRITON_INTERPRET=1. None: what MEGATRON_KD_KERNELS says, by default
    "auto".

    Raises:
        LossArgumentError: For another value.
    """
    global _forced
    require(choice is None or choice in KERNELS, f"kernels: expected one of {KERNELS} or None, found {choice!r}.")
    _forced = choice


def use_triton(logits: torch.Tensor) -> bool:
    """Whether the passes over these logits are the Triton kernels.

    Raises:
        LossArgumentError: If they are forced and cannot run, or the environment variable has no known value.
    """
    choice = _forced or os.environ.get(KERNELS_VARIABLE, "auto")
    require(choice in KERNELS, f"{KERNELS_VARIABLE}: expected one of {KERNELS}, found {choice!r}.")
    if choice == "eager":
        return False
    installed = importlib.util.find_spec("triton") is not None
    if choice == "auto":
        return installed and _is_device(logits) and logits.dtype == torch.float32
    require(installed, "kernels='triton': expected the package triton, found none; install it or use 'eager'.")
    require(
        logits.dtype == torch.float32,
        f"kernels='triton': expected float32 logits, found {logits.dtype}; use 'eager' for this dtype.",
    )
    require(
        _is_device(logits) or _triton_kernels().INTERPRETED,
        f"kernels='triton': expected logits on CUDA, found them on {logits.device}; use 'eager', or set "
        "TRITON_INTERPRET=1 before the first import of triton.",
    )
    return True


def row_statistics(
    logits: torch.Tensor,
    columns: torch.Tensor,
    label_column: torch.Tensor | None,
    temperature: float,
    *,
    at_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of the tail, and the logits of entries and label, which read_owned would have found.

    Leaves -inf at the entries, so that the logits keep the tail alone.

    Args:
        logits: [n, V].
        columns: [n, K] int64; -1: not on this rank. The others of a row are distinct.
        label_column: [n] int64, -1 as above, or None.
        temperature: T.
        at_one: Whether z is to be summed up at temperature 1 as well.

    Returns:
        The logits [n, K], or with labels [n, K + 1]; and log-sum-exps of z / T, [n, 1], with `at_one` [n, 2], the
        second of z.
    """
    if use_triton(logits) and logits.numel():
        return _triton_kernels().row_statistics(logits, columns, label_column, temperature, at_one)
    owned = read_owned(logits, columns, label_column)
    _take_(logits, columns)
    tails = logits.new_full((len(logits), 1 + at_one), -torch.inf)
    for rows in row_blocks(logits):
        z = logits[rows]
        tails[rows, 0] = (z if temperature == 1 else z / temperature).logsumexp(1)
        if at_one:
            tails[rows, 1] = z.logsumexp(1)
    return owned, tails


def row_exponentials(
    logits: torch.Tensor, columns: torch.Tensor, label_column: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """row_statistics in eager form, which leaves exp(z / T - shift) of the tail behind, and 0 at the entries.

    Returns:
        As row_statistics without `at_one`; and the shift [n], the largest z / T of the tail.
    """
    owned = read_owned(logits, columns, label_column)
    _take_(logits, columns)
    shift, sums = logits.new_empty(2, len(logits)).unbind()
    for rows in row_blocks(logits):
        z = logits[rows]
        if temperature != 1:
            z.div_(temperature)
        top = torch.amax(z, 1, out=shift[rows]).clamp_(min=torch.finfo(z.dtype).min)  # of no column it is -inf
        torch.sum(z.sub_(top[:, None]).exp_(), 1, out=sums[rows])
    return owned, (sums.log_() + shift)[:, None], shift


def read_owned(logits: torch.Tensor, columns: torch.Tensor, label_column: torch.Tensor | None) -> torch.Tensor:
    """The logits of entries and, last, of the label, [n, K] or [n, K + 1]; 0 at -1. Arguments as row_statistics."""
    if label_column is not None:
        columns = torch.cat([columns, label_column[:, None]], dim=1)
    if not logits.shape[1]:
        return logits.new_zeros(columns.shape)
    return torch.where(columns >= 0, logits.gather(1, columns.clamp(min=0)), 0)


def row_gradient_(
    logits: torch.Tensor,
    columns: torch.Tensor,
    label_column: torch.Tensor | None,
    gradient: RowGradient,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Write the gradient over the logits. What they hold at the entries does not matter.

    Everything is computed in the dtype of the logits and rounded to `dtype` once, the entries and the label included.

    Args:
        logits: [n, V].
        columns: [n, K], as for row_statistics.
        label_column: [n], as for row_statistics.
        gradient: Coefficients.
        temperature: T.
        dtype: That of the logits, or one of at most half its size.

    Returns:
        The gradient [n, V] in `dtype`: a view of the memory of the logits, whose rows keep their distance in bytes.
    """
    grad = logits.view(dtype)[:, : logits.shape[1]]
    if use_triton(logits) and logits.numel():
        _triton_kernels().row_gradient(logits, columns, label_column, *gradient, temperature, dtype)
        return grad
    _take_(logits, columns)
    # Entries and label are made empty, so the dense pass leaves exact zeros there, and adding to 0 is storing.
    values = gradient.entries
    if gradient.label is not None:
        label_column = _label_alone(columns, label_column)
        z = read_owned(logits, label_column, None)
        _take_(logits, label_column)
        values = torch.cat([values, _dense_(z, gradient, temperature) + gradient.label[:, None]], dim=1)
        columns = torch.cat([columns, label_column], dim=1)
    for rows in row_blocks(logits):
        # A narrower row lands on the front of its own wider one, so that one has to be in a block of its own by then.
        block = logits[rows] if dtype == logits.dtype else logits[rows].clone()
        part = RowGradient(*(None if field is None else field[rows] for field in gradient))
        _dense_(block, part, temperature)
        if dtype != logits.dtype:
            grad[rows] = block
    _add_at(grad, columns, values.to(dtype))
    return grad


def exponentials_gradient_(
    exponentials: torch.Tensor,
    columns: torch.Tensor,
    label_column: torch.Tensor | None,
    gradient: RowGradient,
    shift: torch.Tensor,
) -> torch.Tensor:
    """Turn what row_exponentials left into the gradient, but for a factor of each row.

    The two products that follow take the factor up on their thin side, [n, H], which spares a pass over the strip.
    Where the factor is too small to divide by, a larger one takes its place: the tail then is wrong by less than what
    rounding takes from the entries. A row without gradient has the factor 0. Nothing here depends on data.

    Args:
        exponentials: [n, V], written over; exp(z / T - shift) of the tail and 0 at the entries.
        columns: [n, K], as for row_statistics.
        label_column: [n], as for row_statistics.
        gradient: Coefficients, for one temperature.
        shift: [n], from row_exponentials.

    Returns:
        The factor [n, 1]; times it, `exponentials` is the gradient.
    """
    # No column is larger than their sum, but for rounding; and without columns here there is nothing to scale.
    factor = gradient.tail * (shift - _finite(gradient.log_tail)).clamp(max=0).exp()
    largest = gradient.entries.abs().amax(1)
    if gradient.label is not None:
        largest = torch.maximum(largest, gradient.label.abs())
    tiny = torch.finfo(factor.dtype).tiny
    least = torch.where(largest > 0, (largest * tiny**0.5).clamp(min=tiny), 0)
    factor = torch.where(factor.abs() < least, least, factor)[:, None]
    divisor = factor.masked_fill(factor == 0, 1)
    _add_at(exponentials, columns, gradient.entries / divisor)
    if gradient.label is not None:
        _add_at(exponentials, _label_alone(columns, label_column), gradient.label[:, None] / divisor)
    return factor


def _label_alone(columns: torch.Tensor, label_column: torch.Tensor) -> torch.Tensor:
    """The label's column [n, 1], -1 where it is an entry's."""
    is_entry = (columns == label_column[:, None]).any(1)
    return label_column.masked_fill(is_entry, -1)[:, None]


def _dense_(z: torch.Tensor, gradient: RowGradient, temperature: float) -> torch.Tensor:
    """Turn logits of the tail, [n, any], into its gradient, in place."""
    ce = None
    if gradient.ce is not None:
        ce = (z - gradient.log_total[:, None]).exp_().mul_(gradient.ce[:, None])
    if temperature != 1:
        z.div_(temperature)
    z.sub_(_finite(gradient.log_tail)[:, None]).exp_().mul_(gradient.tail[:, None])
    return z if ce is None else z.add_(ce)


def _finite(log_tail: torch.Tensor) -> torch.Tensor:
    """A tail without columns has only -inf: with any finite value its gradient is 0."""
    return log_tail.masked_fill(log_tail == -torch.inf, 0)


def _take_(logits: torch.Tensor, columns: torch.Tensor) -> None:
    """Leave -inf at columns; where it is already, it stays."""
    _add_at(logits, columns, torch.full_like(columns, -torch.inf, dtype=logits.dtype))


def _add_at(logits: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add values [n, K] at columns, exactly: a column of -1 adds 0 somewhere, and no two others of a row are equal."""
    if logits.shape[1]:
        logits.scatter_add_(1, columns.clamp(min=0), torch.where(columns >= 0, values, 0))


def row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Whole rows, about BLOCK_ELEMENTS at a time."""
    elements = BLOCK_ELEMENTS["cpu" if logits.device.type == "cpu" else "cuda"]
    height = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, min(start + height, len(logits))) for start in range(0, len(logits), height))


def _is_device(logits: torch.Tensor) -> bool:
    """Whether a GPU would have these logits. Meta tensors stand for CUDA's."""
    return logits.device.type in ("cuda", "meta")


def _triton_kernels():
    """The module with the kernels: triton is imported when they are first used, or asked for."""
    from megatron_kd.loss import triton_kernels

    return triton_kernels
