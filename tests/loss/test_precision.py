# SPDX-License-Identifier: Apache-2.0
"""Errors of half-precision inputs against float64 on the same inputs, and of long sums."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_kd.loss import TopK, VocabShard, fused_linear_divergence, matmul
from tests.loss.checks import relative, run
from tests.loss.oracle import make_case, oracle, top_k

MODES = ("forward", "recompute")


def close_student(dtype, tokens=96, vocabulary=4096, width=64):
    """A teacher that is sure of some 30 tokens, and a student near it: the case where rounded logits hurt most."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=random) / width**0.5
    hidden = 3 * torch.randn(tokens, width, generator=random)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = hidden.double() @ weight.double().T
    teacher = top_k(logits + 0.02 * torch.randn(logits.shape, generator=random), 100, dtype=torch.float32)
    case = make_case(tokens=tokens)
    return replace(
        case, hidden=hidden, weight=weight, teacher=teacher, token_weight=case.token_weight.float(), total=vocabulary
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ("forward_kl", "reverse_kl", "jsd"))
def test_half_precision_inputs_lose_only_the_rounding_of_the_result(mode, dtype, name):
    case = close_student(dtype)
    truth = oracle(case, name)
    found = run(partial(fused_linear_divergence, gradient=mode, strip_tokens=40), case, name)
    assert found.grad_hidden.dtype == found.grad_weight.dtype == dtype
    assert relative(found.grad_hidden, truth.grad_hidden) < 3e-3
    assert relative(found.grad_weight, truth.grad_weight) < 3e-3
    assert float(found.total) == pytest.approx(float(truth.total), rel=1e-3)


@pytest.fixture
def products_of_cuda(monkeypatch):
    """CUDA's way on the CPU: bf16 operands, float32 sums, the logit gradient rounded to bf16 over its own logits."""

    def mm(a, b, *, out_dtype=None, out=None):
        product = a.float() @ b.float()
        return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)

    def addmm(total, a, b, *, out_dtype=None, beta=1, out):
        assert out is total and total.dtype == torch.float32
        return out.add_(a.float() @ b.float()) if beta else out.copy_(a.float() @ b.float())

    monkeypatch.setattr(matmul, "_mixed", lambda operand, result: True)
    monkeypatch.setattr(matmul.torch, "mm", mm)
    monkeypatch.setattr(matmul.torch, "addmm", addmm)


@pytest.fixture(scope="module")
def gpt_oss():
    """V = 201,088, K = 100: a case, and its truth."""
    case = close_student(torch.bfloat16, tokens=24, vocabulary=201_088)
    return case, oracle(case, "forward_kl")


@pytest.mark.parametrize("mode", MODES)
def test_a_student_near_its_teacher_at_full_vocabulary(mode, gpt_oss, products_of_cuda):
    """At most 0.3 % of the gradient is lost, to the rounding of what leaves as bf16."""
    case, truth = gpt_oss
    hidden, weight = case.leaves()
    fused_linear_divergence(
        hidden, weight, case.teacher, case.token_weight, gradient=mode, strip_tokens=10
    ).total.backward()
    for name, found, true in (("hidden", hidden.grad, truth.grad_hidden), ("weight", weight.grad, truth.grad_weight)):
        print(f"{mode}: gradient of {name}: {relative(found, true):.2%}")
        assert relative(found, true) < 3e-3


def test_rounded_logits_exist_for_parity_and_are_worse():
    case = close_student(torch.bfloat16)
    truth = oracle(case, "forward_kl")
    rounded = run(partial(fused_linear_divergence, logits_dtype=torch.bfloat16), case, "forward_kl")
    assert 0.03 < relative(rounded.grad_hidden, truth.grad_hidden) < 2.0


@pytest.mark.parametrize("mode", MODES)
def test_the_weight_gradient_over_2048_strips(mode):
    """Summed in float32: at most 1e-6 off before the final rounding. A bf16 sum would be off by 5e-2."""
    strips, rows, vocabulary, width = 2048, 8, 64, 16
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(strips * rows, width, generator=random).bfloat16()
    weight = (torch.randn(vocabulary, width, generator=random) / width**0.5).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(vocabulary, width)
    noise = torch.randn(len(hidden), vocabulary, generator=random)
    teacher = top_k(hidden.double() @ weight.detach().double().T + noise, 8)
    teacher = TopK(*(part.float() if part.is_floating_point() else part for part in teacher))
    fused_linear_divergence(
        hidden, weight, teacher, torch.ones(len(hidden)), gradient=mode, strip_tokens=rows
    ).total.backward()

    z = (hidden.double() @ weight.detach().double().T).requires_grad_()
    logq = z.log_softmax(-1)
    tail = logq.scatter(1, teacher.ids, -torch.inf).logsumexp(1)
    p, p_tail = teacher.logprobs.double().exp(), teacher.log_tail.double().exp()
    (-(p * logq.gather(1, teacher.ids)).sum() - (p_tail * tail).sum()).backward()
    assert relative(weight.main_grad, z.grad.T @ hidden.double()) < 1e-6


def test_the_scalar_from_backward_is_not_rounded_to_the_gradients_dtype():
    """As bf16 these scalars would be off by 2.0e-3 and 1.1e-3."""
    case = close_student(torch.bfloat16)
    truth = oracle(case, "forward_kl")
    for scale in (1 / 3, 0.7):
        hidden, weight = case.leaves()
        sums = fused_linear_divergence(
            hidden, weight, case.teacher, case.token_weight, shard=VocabShard(0, 4096, 4096)
        )
        (scale * sums.total).backward()
        for found, true in ((hidden.grad, truth.grad_hidden), (weight.grad, truth.grad_weight)):
            factor = float((found.double() * true).sum() / (true * true).sum())
            assert factor == pytest.approx(scale, rel=4e-4)
