# SPDX-License-Identifier: Apache-2.0
"""From hidden states to teacher rows: project, normalise and keep the top K, a strip of tokens at a time.

In: hidden [N, H] and output weight [V, H]. Out: ids, log-probabilities and tail mass, [N, K] and [N]. The largest
tensor is one strip of logits, [strip_tokens, vocab_real], in fp32 (256 MiB unless told otherwise), whatever N is.

    logits = hidden.float() @ weight[:vocab_real].float().T          # the two-line oracle
    logprobs, ids = logits.log_softmax(-1).topk(K)

Shapes: N tokens, H hidden size, V rows of the weight (padding included), K kept, n tokens of a strip.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_STRIP_ELEMENTS = 1 << 26
_CAST_ROWS = 1 << 14


class Selection(NamedTuple):
    """What a cache stores of the teacher's distribution."""

    ids: torch.Tensor
    """int64 [N, K], most likely first, equal logits by ascending id."""
    logprobs: torch.Tensor
    """[N, K] natural log, normalised over the real vocabulary."""
    log_tail: torch.Tensor
    """[N] log-sum-exp of the log-probabilities outside the K; -inf if there is nothing there."""
    tail_T: torch.Tensor
    """[N, temperatures] log-sum-exp of the same entries, each divided by T."""
    label_logprobs: torch.Tensor | None
    """[N] log-probability of `labels`, if they were given; 0 where the label is negative."""


@torch.no_grad()
def select_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    vocab_real: int,
    top_k: int,
    temperatures: Sequence[float] = (),
    strip_tokens: int | None = None,
    bias: torch.Tensor | None = None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    labels: torch.Tensor | None = None,
) -> Selection:
    """Teacher rows of `hidden`. The tail is a log-sum-exp over the logits that were not kept, never 1 - sum.

    Args:
        hidden: [N, H], after the final norm.
        weight: [V, H]; rows from `vocab_real` on are padding and take no part.
        vocab_real: ids that exist.
        top_k: K, at most `vocab_real`.
        temperatures: T of each column of `tail_T`.
        strip_tokens: tokens projected at once; default as many as make 2^26 logits.
        bias: [V], added to the logits.
        transform: applied to each strip of logits (soft-capping, scaling).
        labels: int64 [N]; negative means none.

    Returns:
        Everything in fp32; fp64 if `hidden` is.

    Raises:
        ValueError: sizes that do not fit.
        FloatingPointError: the teacher produced NaN or +inf.
    """
    if not 1 <= top_k <= vocab_real <= weight.shape[0]:
        raise ValueError(
            f"need 1 <= top_k <= vocab_real <= weight rows, found {top_k}, {vocab_real}, {weight.shape[0]}"
        )
    if strip_tokens is not None and strip_tokens < 1:
        raise ValueError(f"strip_tokens must be at least 1, found {strip_tokens}")
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    n, device = hidden.shape[0], hidden.device
    strip = strip_tokens or max(1, _STRIP_ELEMENTS // vocab_real)
    out = Selection(
        torch.empty(n, top_k, dtype=torch.int64, device=device),
        torch.empty(n, top_k, dtype=dtype, device=device),
        torch.empty(n, dtype=dtype, device=device),
        torch.empty(n, len(temperatures), dtype=dtype, device=device),
        None if labels is None else torch.empty(n, dtype=dtype, device=device),
    )
    for start in range(0, n, strip):
        part = slice(start, start + strip)
        logits = project(hidden[part], weight[:vocab_real], dtype)
        if bias is not None:
            logits += bias[:vocab_real].to(dtype)
        if transform is not None:
            logits = transform(logits)
        _select_strip(
            logits, temperatures, None if labels is None else labels[part], *(x[part] for x in out if x is not None)
        )
    return out


def project(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [n, V] in `dtype`; a narrower weight is widened 16,384 rows at a time."""
    hidden = hidden.to(dtype)
    if weight.dtype == dtype:
        return hidden @ weight.T
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=dtype, device=hidden.device)
    for start in range(0, weight.shape[0], _CAST_ROWS):
        part = slice(start, start + _CAST_ROWS)
        logits[:, part] = hidden @ weight[part].to(dtype).T
    return logits


def _select_strip(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    labels: torch.Tensor | None,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    log_tail: torch.Tensor,
    tail_T: torch.Tensor,
    label_logprobs: torch.Tensor | None = None,
) -> None:
    """Fill the rows of one strip; `logits` [n, V] is used up."""
    values, kept = ranked_top_k(logits, ids.shape[1])
    own = None if labels is None else logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    logits.scatter_(-1, kept, -torch.inf)
    tail = logits.logsumexp(-1)
    total = torch.logaddexp(values.logsumexp(-1), tail)
    if not total.isfinite().all():
        row = int((~total.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"the teacher's logits are NaN or infinite (row {row} of a strip); its weights or dtype fail"
        )
    ids.copy_(kept)
    torch.sub(values, total[:, None], out=logprobs)
    torch.sub(tail, total, out=log_tail)
    for column, temperature in enumerate(temperatures):
        tail_T[:, column] = (logits / temperature).logsumexp(-1) - total / temperature
    if label_logprobs is not None:
        label_logprobs.copy_((own - total).where(labels >= 0, 0))


def ranked_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest entries of each row, by value and, where equal, by ascending id; at the cut too.

    `torch.topk` takes any of the entries that tie with the last one, so one more is asked for, and rows where it ties
    are chosen again.

    Returns:
        Values and ids, [n, K].
    """
    values, ids = logits.topk(min(top_k + 1, logits.shape[-1]), dim=-1)
    cut, ids = values[:, top_k - 1 : top_k], ids[:, :top_k].contiguous()
    tied = (values[:, top_k:] == cut).any(-1)
    if tied.any():
        ids[tied] = _lowest_ids_at_the_cut(logits[tied], cut[tied], top_k)
    ids = ids.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _lowest_ids_at_the_cut(logits: torch.Tensor, cut: torch.Tensor, top_k: int) -> torch.Tensor:
    above, tied = logits > cut, logits == cut
    places = top_k - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= places))
    return keep.nonzero()[:, 1].view(-1, top_k)
