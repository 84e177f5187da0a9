# SPDX-License-Identifier: Apache-2.0
"""What is minimised: functions of two [n, K + 1] tensors of bucket log-probabilities, student Q and teacher P.

The teacher's K ids split the vocabulary into K buckets of one token and one bucket, the last, with all the others (the
tail). Q and P are log-probabilities of these buckets at the loss's temperature, and a divergence is any torch function
f(Q, P) -> [n] that treats rows apart. Its gradient G = df/dQ is all that the logits need (see fused_linear.py).

An empty bucket (an entry that is absent, a tail without columns, no teacher mass) holds EMPTY instead of -inf. Then
0 * log 0 is 0 by itself, in value and gradient, and a function needs no care of its own.

Legend: n tokens, K teacher entries. Cost: a few passes over [n, K + 1].
"""

import difflib
import math
import re
from collections.abc import Callable

import torch

from megatron_kd.loss.errors import LossArgumentError, require

type Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

EMPTY = -1e30
"""Log-probability of a bucket without mass: exp gives 0, differences and products with 0 stay finite in float32."""

LOG_ZERO = -100.0
"""What reverse KL takes for the teacher's log 0, where the true value is infinite (torch's BCE clamps there too)."""


def forward_kl(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) over all K + 1 buckets: sum p (log p - log q), at least 0."""
    Q, P = _finite(Q), _finite(P)
    return (P.exp() * (P - Q)).sum(-1)


def reverse_kl(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) over all K + 1 buckets: sum q (log q - log p), at least 0.

    Infinite where the teacher's bucket is empty and the student's is not: there log p counts as LOG_ZERO.
    """
    Q, P = _finite(Q), _finite(P)
    return (Q.exp() * (Q - P.masked_fill(is_empty(P), LOG_ZERO))).sum(-1)


def jsd(beta: float) -> Divergence:
    """The generalised Jensen-Shannon divergence: beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q.

    Between 0 and log 2; the form of Agarwal et al., "On-Policy Distillation of Language Models" (2023).

    Args:
        beta: The teacher's share of the mixture, within (0, 1).

    Raises:
        LossArgumentError: For another beta, where the divergence is 0 everywhere or undefined.
    """
    require(0 < beta < 1, f"jsd: expected 0 < beta < 1, found {beta}; use forward_kl or reverse_kl for the limits.")

    def jensen_shannon(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
        Q, P = _finite(Q), _finite(P)
        M = torch.logaddexp(P + math.log(beta), Q + math.log1p(-beta))
        return (beta * P.exp() * (P - M) + (1 - beta) * Q.exp() * (Q - M)).sum(-1)

    return jensen_shannon


def tvd(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Total variation distance over all K + 1 buckets: half of sum |q - p|, between 0 and 1."""
    return 0.5 * (Q.exp() - P.exp()).abs().sum(-1)


def forward_kl_topk_teacher(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """The published sparse form: the teacher renormalised over its K, the student over the whole vocabulary.

    For equal models it is not 0 but -log of the mass of the top K.
    """
    Q = _finite(Q)[..., :-1]
    p, log_p = _renormalised(P)
    return (p * (log_p - Q)).sum(-1)


def forward_kl_topk(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Forward KL with both renormalised over the teacher's K; the student's tail is left free."""
    p, log_p = _renormalised(P)
    return (p * (log_p - _finite(Q)[..., :-1].log_softmax(-1))).sum(-1)


def forward_kl_truncated(Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Forward KL over the K entries alone, neither renormalised. Can be negative, and is never clamped."""
    Q, P = _finite(Q)[..., :-1], _finite(P)[..., :-1]
    return (P.exp() * (P - Q)).sum(-1)


def mixture(**shares: float) -> Divergence:
    """A weighted sum of named divergences, for instance ``mixture(forward_kl=0.7, tvd=0.3)``.

    Raises:
        LossArgumentError: For an unknown name, or none at all.
    """
    require(len(shares) > 0, "mixture: expected at least one share such as forward_kl=0.5, found none.")
    parts = [(share, find_divergence(name)) for name, share in shares.items()]
    return lambda Q, P: sum(share * part(Q, P) for share, part in parts)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd(0.5),
    "tvd": tvd,
    "forward_kl_topk_teacher": forward_kl_topk_teacher,
    "forward_kl_topk": forward_kl_topk,
    "forward_kl_truncated": forward_kl_truncated,
}
"""By the names that `divergence=` takes; besides, "jsd(0.3)" is jsd with that beta."""


def find_divergence(divergence: str | Divergence) -> Divergence:
    """The function behind a name, or a function as it is.

    Raises:
        LossArgumentError: For an unknown name; the message has the nearest one.
    """
    if callable(divergence):
        return divergence
    if divergence in DIVERGENCES:
        return DIVERGENCES[divergence]
    if found := re.fullmatch(r"jsd\((\d*\.?\d+)\)", str(divergence)):
        return jsd(float(found[1]))
    near = difflib.get_close_matches(str(divergence), DIVERGENCES, n=1, cutoff=0)[0]
    raise LossArgumentError(
        f"divergence: expected one of {', '.join(DIVERGENCES)}, jsd(beta), or a function of (Q, P); "
        f"found {divergence!r}. Did you mean {near!r}?"
    )


def value_and_gradient(divergence: Divergence, Q: torch.Tensor, P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f(Q, P) [n] and G = df/dQ [n, K + 1], by autograd on these small tensors.

    Raises:
        LossArgumentError: If the function does not return one value per row.
    """
    with torch.enable_grad():
        leaf = Q.detach().requires_grad_()
        value = divergence(leaf, P)
        require(
            value.shape == Q.shape[:1],
            f"divergence: expected one value per token, {list(Q.shape[:1])}, found shape {list(value.shape)}.",
        )
        (G,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), G


def teacher_buckets(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    log_tail: torch.Tensor,
    keep: torch.Tensor,
    dtype: torch.dtype,
    *,
    distinct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's rows made ready: distinct ids, and finite bucket log-probabilities.

    Args:
        ids: [n, K] integer. Absent: -1, or any id with log-probability -inf.
        logprobs: [n, K].
        log_tail: [n].
        keep: [n] bool. A row not kept is replaced before anything is computed from it, so NaN there does no harm.
        dtype: Of the result.
        distinct: Whether no row repeats an id, so that none has to be looked for.

    Returns:
        ids [n, K] int64 with -1 for absent, and P [n, K + 1].
    """
    present = keep[:, None] & (ids >= 0) & (logprobs > -math.inf)
    ids = torch.where(present, ids, -1).long()
    logprobs = torch.where(present, logprobs, -math.inf).to(dtype)
    if not distinct:
        ids, logprobs = merge_repeated(ids, logprobs)
    log_tail = torch.where(keep, log_tail, 0).to(dtype)
    return ids, _finite(torch.cat([logprobs, log_tail[:, None]], dim=1))


def merge_repeated(ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the probabilities of an id that its row repeats; one entry keeps the sum, the others become absent.

    A segmented scan over the sorted ids: no atomics, so bit-identical from run to run, and rows without repeats keep
    their bits.

    Args:
        ids: [n, K] int64, -1 for absent.
        logprobs: [n, K], -inf for absent.
    """
    count = ids.shape[1]
    run, order = ids.sort(dim=1, stable=True)
    sums = logprobs.gather(1, order)
    step = 1
    while step < count:
        same = run[:, step:] == run[:, :-step]
        merged = torch.where(same, torch.logaddexp(sums[:, step:], sums[:, :-step]), sums[:, step:])
        sums = torch.cat([sums[:, :step], merged], dim=1)
        step *= 2
    repeated = torch.zeros_like(run, dtype=torch.bool)
    repeated[:, :-1] = run[:, :-1] == run[:, 1:]
    run = run.masked_fill(repeated, -1)
    sums = sums.masked_fill(repeated, -math.inf)
    return torch.empty_like(ids).scatter_(1, order, run), torch.empty_like(logprobs).scatter_(1, order, sums)


def is_empty(log_probability: torch.Tensor) -> torch.Tensor:
    """True for a bucket without mass."""
    return log_probability < EMPTY / 2


def _finite(log_probability: torch.Tensor) -> torch.Tensor:
    return log_probability.clamp(min=EMPTY)


def _renormalised(P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-probabilities of the K entries among themselves; a row without entries has no mass."""
    P = _finite(P)[..., :-1]
    log_p = P.log_softmax(-1)
    return log_p.exp().masked_fill(is_empty(P), 0), log_p
