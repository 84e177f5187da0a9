# SPDX-License-Identifier: Apache-2.0
"""Output projection and divergence in one function, a strip of tokens at a time; [tokens, vocabulary] never exists.

In: hidden states, this rank's rows of the head's weight, the teacher's top K. Out: four sums, and two gradients.

Let s = z / T be the student's logits, lt and L their log-sum-exp over the tail and over the vocabulary, and
Q = [s_I - L, lt - L] the student's bucket log-probabilities. With G = df/dQ of the divergence f and S = sum G, the
logit gradient of f is

    v in the tail:  a * exp(s_v - lt) / T   with  a = G_tail - S * exp(lt - L)
    v = I_k:        (G_k - S * exp(s_k - L)) / T

and cross entropy adds softmax(z)_v - [v = label]. So a strip needs two scalars per token for the tail and K values.

Cost per strip: "forward" 3 GEMMs, all in forward; "recompute" 1 in forward and 3 in backward; the passes of
row_kernels.py over the logits. Memory beyond the arguments and their gradients: a strip of logits; "forward" keeps the
hidden gradient [R, H] and, in `compute_dtype`, the weight gradient [shard.size, H] until backward; "recompute" keeps
2 numbers a token (3 if labels meet T != 1).
Collectives per strip, TP > 1: all-gather of hidden (sequence parallel), one all-reduce of about K + TP numbers a token
(again in backward if recomputing), reduce-scatter (sequence parallel) or all-reduce of the hidden gradient, in the
dtype of hidden. The all-gather travels during the products of the strip before, the hidden gradient during the
products that follow; only the all-reduce is waited for.

Legend: N tokens of the call, R rows of hidden on this rank, n tokens of a strip, H hidden size, K teacher entries,
V real columns of this rank.
"""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from megatron_kd.loss.arguments import LossCall, LossSums, TopK, check_arguments
from megatron_kd.loss.divergence import EMPTY, is_empty, value_and_gradient
from megatron_kd.loss.hidden_grad import HiddenGradient
from megatron_kd.loss.matmul import operand_dtype, scaled, without_autocast
from megatron_kd.loss.row_kernels import (
    RowGradient,
    exponentials_gradient_,
    read_owned,
    row_exponentials,
    row_gradient_,
    row_statistics,
    use_triton,
)
from megatron_kd.loss.strips import Strip, strips
from megatron_kd.loss.tracing import untraced
from megatron_kd.loss.vocab_parallel import VocabShard, share_statistics
from megatron_kd.loss.weight_grad import WeightGradient


@untraced
def fused_linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopK,
    token_weight: torch.Tensor,
    *,
    divergence: str | Callable = "forward_kl",
    labels: torch.Tensor | None = None,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    gradient: str = "forward",
    strip_tokens: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    keep: torch.Tensor | None = None,
    distinct: bool = False,
) -> LossSums:
    """Sum over tokens of the divergence between teacher and student, and of the cross entropy, from hidden states.

    The value is that of dense_divergence; in two lines, for forward KL without temperature, tail and labels:

        logq = (hidden @ weight.T).log_softmax(-1).gather(-1, ids)
        total = (token_weight * (logprobs.exp() * (logprobs - logq)).sum(-1)).sum()

    All ranks of the shard's group make the same call and get the same sums. No argument is modified.

    Args:
        hidden: [N, H] or [S, B, H]; under sequence_parallel this rank's [N / TP, H] or [S / TP, B, H].
        weight: [shard.size, H], same dtype. With `main_grad` its gradient is added there, the flag
            `grad_added_to_main_grad` is set, and autograd gets the dummy that Megatron's hooks expect.
        teacher: Whole sequence, also under sequence_parallel.
        token_weight: [N] or [S, B]; a token of weight 0 is selected away, whatever its rows hold.
        divergence: A name in DIVERGENCES, "jsd(0.3)", or a function f(Q, P) -> [n] (see divergence.py).
        labels: [N] or [S, B] integer. Given, the cross entropy is reported also when ce_weight is 0.
        kd_weight: Factor of the divergence, which already carries T^2.
        ce_weight: Factor of the cross entropy at temperature 1.
        temperature: T; the teacher must be at T already.
        shard: This rank's columns; None for a weight with the whole vocabulary and no padding.
        sequence_parallel: Whether hidden is split over the shard's group along its first axis.
        gradient: "forward" computes gradients at once, in 3 GEMMs; "recompute" projects again in backward: 4 GEMMs,
            least memory.
        strip_tokens: Tokens of a strip, over all ranks; None fits STRIP_BYTES of logits.
        logits_dtype: float32, float64, or bfloat16 as stock Megatron rounds (7 to 48 % error of the gradient).
        keep: [N] or [S, B] bool on the host, equal on all ranks: False leaves a token out before the products, so that
            half a batch costs half. Only tokens of weight 0 may be. Strips then hold strip_tokens kept tokens, and the
            shapes of the collectives follow from keep. None: nothing depends on data.
        distinct: The caller vouches that no row of the teacher repeats an id; then none is looked for. If one does
            all the same, the result is wrong without an error.

    Raises:
        LossArgumentError: See check_arguments.
    """
    call = check_arguments(
        hidden,
        weight,
        teacher,
        token_weight,
        divergence=divergence,
        labels=labels,
        kd_weight=kd_weight,
        ce_weight=ce_weight,
        temperature=temperature,
        shard=shard,
        sequence_parallel=sequence_parallel,
        gradient=gradient,
        strip_tokens=strip_tokens,
        logits_dtype=logits_dtype,
        keep=keep,
        distinct=distinct,
    )
    with without_autocast(hidden):
        rows = hidden.flatten(0, -2)
        return LossSums(*FusedLinearDivergence.apply(rows, weight, call, torch.is_grad_enabled()))


class FusedLinearDivergence(torch.autograd.Function):
    """The loop over strips. `total` alone is differentiable, so backward receives one scalar."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, call: LossCall, grad_enabled: bool) -> tuple:
        """Sum up the strips; "forward" computes their gradients as well, as if the scalar from backward were 1."""
        ctx.needs = tuple(needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        ctx.weight, ctx.call = weight, None
        at_once = call.gradient == "forward" and any(ctx.needs)
        kd, ce = hidden.new_zeros(2, dtype=torch.float64)
        kept = []
        if at_once:
            grad_hidden = HiddenGradient(hidden, call) if ctx.needs[0] else None
            grad_weight = WeightGradient.of_one_call(weight, call.compute_dtype) if ctx.needs[1] else None
        for strip in strips(hidden, weight, call):
            owned, tails = share_statistics(*strip_statistics(strip, call, at_once), call.shard)
            log_sums = vocabulary_log_sums(strip, owned, tails, call)
            token_kd, token_ce, gradient = token_losses(strip, owned, log_sums, call)
            kd += (strip.token_weight * token_kd).sum(dtype=torch.float64)
            ce += (strip.token_weight * token_ce).sum(dtype=torch.float64)
            if at_once:
                add_gradients(strip, gradient, weight, grad_hidden, grad_weight, call)
            else:
                kept.append(log_sums)
        if at_once:
            ctx.save_for_backward(
                None if grad_hidden is None else grad_hidden.finished(),
                *([] if grad_weight is None else grad_weight.finished()),
            )
        elif any(ctx.needs):
            ctx.call = call
            ctx.save_for_backward(hidden, weight, *kept)
        results = loss_sums(kd, ce, call)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: torch.Tensor, *_: torch.Tensor) -> tuple:
        """Scale the gradients, or compute them now. `scale` stays on the device."""
        if ctx.call is None:
            grad_hidden, *parts = ctx.saved_tensors
            last = not torch._C._autograd._get_current_graph_task_keep_graph()
            if grad_hidden is not None:
                grad_hidden = scaled(grad_hidden, scale, grad_hidden.dtype, reuse=last)
            grad_weight = WeightGradient(parts).deliver(ctx.weight, scale, reuse=last) if parts else None
            return grad_hidden, grad_weight, None, None

        hidden, weight, *kept = ctx.saved_tensors
        grad_hidden = HiddenGradient(hidden, ctx.call) if ctx.needs[0] else None
        grad_weight = WeightGradient.onto_main_grad(ctx.weight, ctx.call.compute_dtype) if ctx.needs[1] else None
        recompute_gradients(hidden, weight, kept, scale, grad_hidden, grad_weight, ctx.call)
        return (
            None if grad_hidden is None else grad_hidden.finished(),
            None if grad_weight is None else grad_weight.deliver(ctx.weight),
            None,
            None,
        )


def recompute_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    kept: list[torch.Tensor],
    scale: torch.Tensor,
    grad_hidden: HiddenGradient | None,
    grad_weight: WeightGradient | None,
    call: LossCall,
) -> None:
    """Project each strip again and add up its gradients. On return no strip is in memory."""
    with without_autocast(hidden):
        for strip, log_sums in zip(strips(hidden, weight, call), kept, strict=True):
            owned = read_owned(strip.logits, strip.columns, strip.label_column)
            owned, _ = share_statistics(owned, log_sums[:, :0], call.shard)
            _, _, gradient = token_losses(strip, owned, log_sums, call, scale)
            add_gradients(strip, gradient, weight, grad_hidden, grad_weight, call)


def strip_statistics(strip: Strip, call: LossCall, at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a strip's statistics, for share_statistics.

    The strip's logits keep the tail alone; if their gradient follows at once, as exponentials where that saves work.
    """
    arguments = strip.logits, strip.columns, strip.label_column, call.temperature
    on_cpu = strip.logits.device.type == "cpu" and not use_triton(strip.logits)
    if not (at_once and on_cpu and strip.logits.numel()) or call.two_temperatures:
        return row_statistics(*arguments, at_one=call.two_temperatures)
    owned, tails, strip.shift = row_exponentials(*arguments)
    return owned, tails


def entry_logits(strip: Strip, owned: torch.Tensor, temperature: float) -> torch.Tensor:
    """s_I [n, K] at a temperature, with -inf for an absent entry."""
    return (owned[:, : strip.ids.shape[1]] / temperature).masked_fill(strip.ids < 0, -torch.inf)


def vocabulary_log_sums(strip: Strip, owned: torch.Tensor, tails: torch.Tensor, call: LossCall) -> torch.Tensor:
    """Log-sum-exp [n, 2]: over the tail, over the vocabulary; with two temperatures [n, 3]: the latter at T = 1."""
    entries = entry_logits(strip, owned, call.temperature)
    sums = [tails[:, 0], torch.logaddexp(tails[:, 0], entries.logsumexp(1))]
    if call.two_temperatures:
        sums.append(torch.logaddexp(tails[:, 1], entry_logits(strip, owned, 1).logsumexp(1)))
    return torch.stack(sums, dim=1)


def token_losses(
    strip: Strip, owned: torch.Tensor, log_sums: torch.Tensor, call: LossCall, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, RowGradient]:
    """The two losses of each token, and the coefficients of its logit gradient by the module's formula.

    Args:
        strip: n tokens.
        owned: As read_owned returns them, but known to all ranks.
        log_sums: As vocabulary_log_sums returns them.
        call: Weights and temperature.
        scale: 0-dim factor of the gradient.

    Returns:
        The divergence [n] without T^2, the cross entropy [n] (0 without labels), and the gradient.
    """
    entries = entry_logits(strip, owned, call.temperature)
    log_tail, log_total = log_sums[:, 0], log_sums[:, 1]
    Q = (torch.cat([entries, log_tail[:, None]], dim=1) - log_total[:, None]).clamp(min=EMPTY)
    # A tail without columns is no bucket: a teacher's mass there can only be rounding.
    kd, G = value_and_gradient(call.divergence, Q, strip.P.masked_fill(is_empty(Q), EMPTY))
    token_weight = strip.token_weight if scale is None else strip.token_weight * scale
    kd_factor = token_weight * (call.kd_weight * call.temperature)  # T^2, and 1 / T since s = z / T
    by_bucket = kd_factor[:, None] * (G - G.sum(1, keepdim=True) * Q.exp())
    gradient = RowGradient(tail=by_bucket[:, -1], log_tail=log_tail, entries=by_bucket[:, :-1])
    if call.labels is None:
        return kd, torch.zeros_like(kd), gradient
    ce = log_sums[:, -1] - owned[:, -1]
    if call.ce_weight:
        gradient = with_cross_entropy(gradient, strip, owned, log_sums, token_weight * call.ce_weight, call)
    return kd, ce, gradient


def with_cross_entropy(
    gradient: RowGradient,
    strip: Strip,
    owned: torch.Tensor,
    log_sums: torch.Tensor,
    factor: torch.Tensor,
    call: LossCall,
) -> RowGradient:
    """Add factor [n] times softmax(z) - onehot(label) to a row gradient."""
    log_total = log_sums[:, -1]
    probability = (entry_logits(strip, owned, 1) - log_total[:, None]).exp()
    gradient = gradient._replace(
        entries=gradient.entries + factor[:, None] * (probability - strip.label_entry.to(probability.dtype)),
        label=-factor,
    )
    if call.two_temperatures:
        return gradient._replace(ce=factor, log_total=log_total)
    return gradient._replace(tail=gradient.tail + factor * (gradient.log_tail - log_total).exp())


def add_gradients(
    strip: Strip,
    gradient: RowGradient,
    weight: torch.Tensor,
    grad_hidden: HiddenGradient | None,
    grad_weight: WeightGradient | None,
    call: LossCall,
) -> None:
    """Turn the strip's logits into their gradient, and send it to hidden and weight."""
    factor = None
    if strip.shift is None:
        dtype = operand_dtype(strip.logits, weight)
        grad = row_gradient_(strip.logits, strip.columns, strip.label_column, gradient, call.temperature, dtype)
    else:
        grad = strip.logits
        factor = exponentials_gradient_(grad, strip.columns, strip.label_column, gradient, strip.shift)
    if grad_hidden is not None:
        grad_hidden.add(strip, grad, weight[: call.shard.real], factor)
    if grad_weight is not None:
        grad_weight.add(grad, strip.hidden if factor is None else strip.hidden * factor)


def loss_sums(kd: torch.Tensor, ce: torch.Tensor, call: LossCall) -> LossSums:
    """The four results from the sums over all strips, in `compute_dtype`."""
    kd = kd * call.temperature**2
    total = call.kd_weight * kd + call.ce_weight * ce
    weight = call.token_weight.sum(dtype=torch.float64)
    return LossSums(*(value.to(call.compute_dtype) for value in (total, kd, ce, weight)))
