# SPDX-License-Identifier: Apache-2.0
"""The losses by definition, token by token in float64, with none of the product's code; and inputs for the tests.

Buckets are a python list: only those that exist, so there is no padding, mask or -inf to get wrong.
"""

import math
from dataclasses import dataclass, replace

import torch

from megatron_kd.loss import TopK

NAMES = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "tvd",
    "forward_kl_topk_teacher",
    "forward_kl_topk",
    "forward_kl_truncated",
)


def kl(a, b):
    """sum a log(a / b) over log-probabilities, 0 log 0 = 0."""
    some = a > -math.inf
    return (a[some].exp() * (a[some] - b[some])).sum()


def by_definition(name, Q, P, has_tail):
    """A divergence of two vectors of bucket log-probabilities, the tail last if there is one."""
    entries = slice(None, -1) if has_tail else slice(None)
    Qk, Pk = Q[entries], P[entries]
    match name:
        case "forward_kl":
            return kl(P, Q)
        case "reverse_kl":
            return kl(Q, torch.where(P == -math.inf, -100.0, P))
        case "jsd" | "jsd(0.3)":
            beta = 0.3 if "3" in name else 0.5
            M = torch.logaddexp(P + math.log(beta), Q + math.log(1 - beta))
            return beta * kl(P, M) + (1 - beta) * kl(Q, M)
        case "tvd":
            return 0.5 * (Q.exp() - P.exp()).abs().sum()
        case "forward_kl_topk_teacher":
            return kl(Pk - Pk.logsumexp(0), Qk)
        case "forward_kl_topk":
            return kl(Pk - Pk.logsumexp(0), Qk - Qk.logsumexp(0))
        case "forward_kl_truncated":
            return kl(Pk, Qk)
        case "chi_squared":
            return ((Q.exp() - P.exp()) ** 2 / Q.exp()).sum()
    raise AssertionError(name)


def chi_squared(Q, P):
    """A user's own divergence."""
    return ((Q.exp() - P.exp()) ** 2 / Q.clamp(min=-80).exp()).sum(-1)


@dataclass
class Case:
    """Inputs of one call, whole vocabulary and whole sequence, rows flattened."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher: TopK
    token_weight: torch.Tensor
    labels: torch.Tensor
    total: int
    """Real vocabulary; the rows of weight beyond are padding."""
    temperature: float = 1.0

    def leaves(self):
        """hidden and weight as fresh leaves."""
        return (part.detach().clone().requires_grad_() for part in (self.hidden, self.weight))


@dataclass
class Truth:
    """Sums, and the gradients of total."""

    total: torch.Tensor
    kd: torch.Tensor
    ce: torch.Tensor
    weight: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def oracle(case, name, *, kd_weight=1.0, ce_weight=0.0):
    """All of it in float64, from the inputs as they are."""
    T = case.temperature
    hidden, weight = (part.double().detach().requires_grad_() for part in (case.hidden, case.weight))
    kd = ce = torch.zeros((), dtype=torch.float64)
    for n in range(len(hidden)):
        w = case.token_weight[n].double()
        if w == 0:
            continue
        z = weight[: case.total] @ hidden[n]
        logq = (z / T).log_softmax(0)
        mass = {}
        for i, lp in zip(case.teacher.ids[n].tolist(), case.teacher.logprobs[n].double().tolist(), strict=True):
            if i >= 0 and lp > -math.inf:
                mass.setdefault(i, []).append(lp)
        P = [torch.tensor(parts, dtype=torch.float64).logsumexp(0) for parts in mass.values()]
        Q = [logq[i] for i in mass]
        tail = torch.tensor([v not in mass for v in range(case.total)])
        if tail.any():
            P.append(case.teacher.log_tail[n].double())
            Q.append(logq[tail].logsumexp(0))
        if mass or "topk" not in name:
            kd = kd + T * T * w * by_definition(name, torch.stack(Q), torch.stack(P), bool(tail.any()))
        ce = ce - w * z.log_softmax(0)[case.labels[n]]
    total = kd_weight * kd + ce_weight * ce
    grads = (torch.zeros_like(hidden), torch.zeros_like(weight))
    if total.requires_grad:
        grads = torch.autograd.grad(total, (hidden, weight))
    return Truth(total.detach(), kd.detach(), ce.detach(), case.token_weight.double().sum(), *grads)


def top_k(logits, k, temperature=1.0, dtype=None):
    """TopK of a teacher's logits [N, V], by sorting float64 log-probabilities."""
    logp = (logits.double() / temperature).log_softmax(-1)
    order = logp.argsort(-1, descending=True)
    log_tail = torch.stack([row[rest].logsumexp(0) for row, rest in zip(logp, order[:, k:], strict=True)])
    dtype = dtype or logits.dtype
    return TopK(order[:, :k], logp.gather(1, order[:, :k]).to(dtype), log_tail.to(dtype))


def make_case(
    *, tokens=13, hidden=8, total=37, padded=40, k=5, temperature=1.0, dtype=torch.float64, seed=0, spread=1.0
):
    """Random inputs: NaN in the padding; labels inside and outside the teacher's entries; every fifth token masked."""
    random = torch.Generator().manual_seed(seed)
    weight = spread * torch.randn(padded, hidden, generator=random, dtype=torch.float64)
    states = torch.randn(tokens, hidden, generator=random, dtype=torch.float64)
    logits = states @ weight[:total].T + 2 * torch.randn(tokens, total, generator=random, dtype=torch.float64)
    weight[total:] = math.nan
    token_weight = 0.1 + torch.rand(tokens, generator=random, dtype=torch.float64)
    token_weight[3::5] = 0
    teacher = top_k(logits, k, temperature)
    labels = torch.randint(0, total, (tokens,), generator=random)
    labels[::2] = teacher.ids[::2, k // 2]
    return Case(
        states.to(dtype),
        weight.to(dtype),
        TopK(teacher.ids, teacher.logprobs.to(dtype), teacher.log_tail.to(dtype)),
        token_weight.to(dtype),
        labels,
        total,
        temperature,
    )


def poison_masked(case):
    """The same case with rubbish in every row of a masked token."""
    masked = case.token_weight == 0
    bad = {0: math.nan, 1: math.inf, 2: -math.inf}
    filler = torch.tensor([bad[n % 3] for n in range(len(masked))], dtype=case.hidden.dtype)[:, None]
    ids, logprobs, log_tail = case.teacher
    return replace(
        case,
        hidden=torch.where(masked[:, None], filler, case.hidden),
        teacher=TopK(
            torch.where(masked[:, None], 10**6, ids),
            torch.where(masked[:, None], filler, logprobs),
            torch.where(masked, filler[:, 0], log_tail),
        ),
        labels=torch.where(masked, -100, case.labels),
    )


def ragged(case, *, seed=0):
    """The same teacher with fewer entries in some rows (by id -1 or log-probability -inf) and more in the tail."""
    random = torch.Generator().manual_seed(seed)
    ids, logprobs, log_tail = (part.clone() for part in case.teacher)
    counts = torch.randint(0, ids.shape[1] + 1, (len(ids),), generator=random)
    drop = torch.arange(ids.shape[1]) >= counts[:, None]
    log_tail = torch.cat([logprobs.where(drop, -math.inf), log_tail[:, None]], dim=1).logsumexp(1)
    by_id = torch.rand(ids.shape, generator=random) < 0.5
    ids[drop & by_id] = -1
    logprobs[drop & ~by_id] = -math.inf
    return replace(case, teacher=TopK(ids, logprobs, log_tail))
