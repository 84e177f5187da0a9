# SPDX-License-Identifier: Apache-2.0
"""Megatron's rules for the weight's gradient, with the hook of its data-parallel wrapper spelled out as the judge."""

from types import SimpleNamespace

import pytest
import torch

from megatron_kd.loss import LossArgumentError, VocabShard, fused_linear_divergence, weight_grad
from tests.loss.checks import relative
from tests.loss.oracle import make_case, oracle

MODES = ("forward", "recompute")


def megatron_hook(parameter):
    """What megatron-core's DistributedDataParallel does with a parameter's gradient after each backward."""

    def hook(*_):
        assert parameter.grad is not None, "param.grad being None is not safe when overlap_grad_reduce is True"
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(hook)


def wrapped(case, dtype, main_dtype, **attributes):
    """hidden and weight as leaves, the weight as Megatron wraps it."""
    hidden, weight = (part.detach().to(dtype).requires_grad_() for part in case.leaves())
    weight.main_grad = torch.zeros_like(weight, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    for name, value in attributes.items():
        setattr(weight, name, value)
    megatron_hook(weight)
    return hidden, weight


def loss(case, hidden, weight, mode):
    return fused_linear_divergence(
        hidden,
        weight,
        case.teacher,
        case.token_weight,
        labels=case.labels,
        ce_weight=0.5,
        shard=VocabShard(0, 40, 37),
        gradient=mode,
        strip_tokens=4,
    ).total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "main_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1e-2),
    ],
)
def test_micro_batches_add_up_in_main_grad(mode, dtype, main_dtype, tolerance):
    """Three micro-batches, each with its own scale. The flag stays set from the first; the sum is right anyway."""
    cases = [make_case(seed=seed, dtype=dtype) for seed in range(3)]
    hidden, weight = wrapped(cases[0], dtype, main_dtype)
    truth = torch.zeros(40, 8, dtype=torch.float64)
    for case, scale in zip(cases, (1.0, 0.5, 3.0), strict=True):
        case.weight = weight.detach()
        (scale * loss(case, case.hidden.clone().requires_grad_(), weight, mode)).backward()
        truth += scale * oracle(case, "forward_kl", ce_weight=0.5).grad_weight
    assert weight.grad_added_to_main_grad and weight.grad is None
    assert weight.main_grad.dtype == main_dtype
    assert relative(weight.main_grad, truth) < tolerance


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_embedding_gets_both_gradients(mode):
    """One weight for embedding and head: autograd adds the embedding's gradient to the dummy, which must be zeros."""
    case = make_case()
    case.weight = case.weight.nan_to_num(0.0)
    _, weight = wrapped(case, torch.float64, torch.float64, zero_out_wgrad=True)
    tokens = torch.arange(13) % 37

    def total(weight, mode):
        return loss(case, torch.nn.functional.embedding(tokens, weight), weight, mode)

    for _ in range(2):
        total(weight, mode).backward()
    plain = case.weight.clone().requires_grad_()
    (2 * total(plain, "recompute")).backward()
    case.hidden = case.weight[tokens]
    truth = oracle(case, "forward_kl", ce_weight=0.5)
    by_hand = 2 * (truth.grad_weight + torch.zeros(40, 8, dtype=torch.float64).index_add(0, tokens, truth.grad_hidden))
    assert torch.allclose(weight.main_grad, by_hand, atol=1e-12)
    assert torch.allclose(plain.grad, by_hand, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_main_grad_without_the_flag_gets_the_gradient_and_autograd_none(mode):
    case = make_case()
    hidden, weight = case.leaves()
    weight.main_grad = torch.ones_like(weight)
    loss(case, hidden, weight, mode).backward()
    truth = oracle(case, "forward_kl", ce_weight=0.5)
    assert weight.grad is None
    assert torch.allclose(weight.main_grad, 1 + truth.grad_weight, atol=1e-12)
    assert torch.allclose(hidden.grad, truth.grad_hidden, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_plain_gradients_accumulate_as_any_other(mode):
    case = make_case()
    hidden, weight = case.leaves()
    for _ in range(3):
        loss(case, hidden, weight, mode).backward()
    assert torch.allclose(weight.grad, 3 * oracle(case, "forward_kl", ce_weight=0.5).grad_weight, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", (40, 39))
def test_a_plain_gradient_is_rounded_in_the_memory_of_its_float32_sum(mode, rows, monkeypatch):
    """In place, seven rows at a time, the same bits as into new memory; and no more memory is kept than it needs."""
    monkeypatch.setattr(weight_grad, "BLOCK", 7)
    case = make_case(dtype=torch.bfloat16)
    shard = VocabShard(0, rows, 37)
    arguments = (case.hidden, case.weight[:rows].clone().requires_grad_(), case.teacher, case.token_weight)
    total = 0.3 * fused_linear_divergence(*arguments, shard=shard, gradient=mode, strip_tokens=4).total
    (into_new,) = torch.autograd.grad(total, arguments[1], retain_graph=True)
    total.backward()
    in_place = arguments[1].grad
    assert torch.equal(in_place, into_new)
    assert relative(in_place[:37], 0.3 * oracle(case, "forward_kl").grad_weight[:37]) < 3e-3
    assert not in_place[37:].any()
    assert in_place.untyped_storage().nbytes() == 2 * 40 * 8


@pytest.mark.parametrize("mode", MODES)
def test_a_main_grad_of_another_shape_is_refused(mode):
    case = make_case()
    hidden, weight = case.leaves()
    weight.main_grad = torch.zeros(39, 8)
    with pytest.raises(LossArgumentError, match=r"main_grad: expected \[40, 8\] like weight, found \[39, 8\]"):
        loss(case, hidden, weight, mode).backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharded", (True, False))
def test_megatron_fsdp_hands_out_the_buffer(mode, sharded):
    """With sharded gradients the accessor gives fresh memory, here NaN, to be written; without, memory to add to."""
    case = make_case()
    hidden, weight = case.leaves()
    buffer = torch.full_like(weight, torch.nan if sharded else 1.0)
    weight.get_main_grad = lambda: buffer
    weight.__fsdp_param__, weight.grad_added_to_main_grad = True, False
    weight._gbuf = SimpleNamespace(is_data_distributed=sharded)
    loss(case, hidden, weight, mode).backward()
    truth = oracle(case, "forward_kl", ce_weight=0.5).grad_weight
    assert weight.grad_added_to_main_grad
    assert torch.allclose(buffer, truth if sharded else 1 + truth, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_that_nobody_reads_takes_no_memory(mode):
    """Megatron's hooks only want param.grad not to be None; whoever reads it all the same finds zeros."""
    case = make_case()
    hidden, weight = case.leaves()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    loss(case, hidden, weight, mode).backward()
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
    assert weight.grad._nnz() == 0
    assert not (torch.zeros_like(weight) + weight.grad).any()
