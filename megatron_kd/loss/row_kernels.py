# SPDX-License-Identifier: Apache-2.0
"""The passes over a strip's logits: statistics of its rows, and the rows of its gradient written over them.

In: logits [n, V] at temperature T, and the columns of the teacher's entries and the labels on this rank (-1: none).
Out: the same memory, with d total / d logits. These are the eager forms; each touches a strip a few times.

Legend: n tokens of a strip, V real columns of this rank, K teacher entries.
"""

from typing import NamedTuple

import torch


class RowGradient(NamedTuple):
    """What the gradient of a row is made of.

    Column v of the tail gets `tail * exp(s_v - log_tail) + ce * exp(T * s_v - log_total)`, the column of entry k gets
    `entries[k]`, and the label's column gets `label` more.
    """

    tail: torch.Tensor
    """[n]"""
    log_tail: torch.Tensor
    """[n]: log-sum-exp over the tail; -inf for a tail without columns."""
    entries: torch.Tensor
    """[n, K]"""
    label: torch.Tensor | None = None
    """[n]; None without a gradient of the cross entropy, and 0 where the label is an entry."""
    ce: torch.Tensor | None = None
    """[n]; None unless cross entropy has a temperature of its own."""
    log_total: torch.Tensor | None = None
    """[n]: log-sum-exp over the vocabulary at temperature 1; None as `ce`."""


def read_logits(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The logits [n, K] at `columns` [n, K], 0 where that is -1."""
    if logits.shape[1] == 0:
        return logits.new_zeros(columns.shape)
    return torch.where(columns >= 0, logits.gather(1, columns.clamp(min=0)), 0)


def take_logits_(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Like read_logits, and leave -inf behind, so that the tail stays. The columns of a row are distinct."""
    taken = read_logits(logits, columns)
    _add_at(logits, columns, torch.full_like(taken, -torch.inf))
    return taken


def row_statistics(logits: torch.Tensor, temperature: float, *, at_one: bool) -> torch.Tensor:
    """Log-sum-exp of the tail, [n, 1]; with `at_one` [n, 2], the second of z = T * s, at temperature 1."""
    if logits.shape[1] == 0:
        return logits.new_full((len(logits), 1 + at_one), -torch.inf)
    sums = [logits.logsumexp(1)]
    if at_one:
        sums.append((logits * temperature).logsumexp(1))
    return torch.stack(sums, dim=1)


def row_gradient_(
    logits: torch.Tensor,
    columns: torch.Tensor,
    label_column: torch.Tensor | None,
    gradient: RowGradient,
    temperature: float,
) -> None:
    """Write the gradient over logits from which the entries were taken.

    Args:
        logits: [n, V].
        columns: [n, K], as for take_logits_.
        label_column: [n]: the label's column if it is on this rank, else -1.
        gradient: Coefficients.
        temperature: T.
    """
    own_ce = None
    if gradient.ce is not None:
        own_ce = (logits * temperature).sub_(gradient.log_total[:, None]).exp_().mul_(gradient.ce[:, None])
    # A tail without columns has only -inf here: with any finite shift exp gives 0.
    shift = gradient.log_tail.masked_fill(gradient.log_tail == -torch.inf, 0)
    logits.sub_(shift[:, None]).exp_().mul_(gradient.tail[:, None])
    if own_ce is not None:
        logits.add_(own_ce)
    _add_at(logits, columns, gradient.entries)
    if gradient.label is not None:
        _add_at(logits, label_column[:, None], gradient.label[:, None])


def _add_at(logits: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add values [n, K] at columns, exactly: a column of -1 adds 0 somewhere, and no two others of a row are equal."""
    if logits.shape[1]:
        logits.scatter_add_(1, columns.clamp(min=0), torch.where(columns >= 0, values, 0))
