# SPDX-License-Identifier: Apache-2.0
"""The fused divergence and both baselines on one rank, against the float64 oracle and finite differences."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_kd.loss import (
    TopK,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear_divergence,
    mixture,
)
from tests.loss.checks import run, worst_difference
from tests.loss.oracle import NAMES, Truth, chi_squared, make_case, oracle, poison_masked, ragged, top_k

IMPLEMENTATIONS = {
    "forward": partial(fused_linear_divergence, strip_tokens=5),
    "recompute": partial(fused_linear_divergence, strip_tokens=5, gradient="recompute"),
    "dense": dense_divergence,
    "forward_chunked": partial(forward_chunked_divergence, strip_tokens=4),
}
FUSED = ("forward", "recompute")


@pytest.mark.parametrize("temperature", (1.0, 2.0))
@pytest.mark.parametrize("ce_weight", (0.0, 0.5))
@pytest.mark.parametrize("name", (*NAMES, "jsd(0.3)"))
def test_values_and_gradients_equal_the_oracle(name, ce_weight, temperature):
    """Real vocabulary 507 padded to 512 with NaN rows, masked tokens full of rubbish, uneven last strip."""
    case = poison_masked(make_case(tokens=13, total=507, padded=512, k=20, temperature=temperature))
    truth = oracle(case, name, ce_weight=ce_weight, kd_weight=0.7)
    for implementation in IMPLEMENTATIONS.values():
        found = run(implementation, case, name, ce_weight=ce_weight, kd_weight=0.7, scale=-1.75)
        assert worst_difference(found, truth) < 1e-10
        assert torch.equal(found.grad_weight[507:], torch.zeros(5, 8, dtype=torch.float64))
        assert torch.equal(found.grad_hidden[3::5], torch.zeros(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_to_vouch_for_distinct_ids_changes_no_bit(implementation):
    case = ragged(poison_masked(make_case(k=20)))
    found = run(partial(IMPLEMENTATIONS[implementation], distinct=True), case, "jsd", ce_weight=0.5)
    searched = run(IMPLEMENTATIONS[implementation], case, "jsd", ce_weight=0.5)
    assert torch.equal(found.grad_hidden, searched.grad_hidden) and torch.equal(
        found.grad_weight, searched.grad_weight
    )
    assert (
        torch.equal(found.total, searched.total)
        and worst_difference(found, oracle(case, "jsd", ce_weight=0.5)) < 1e-10
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", (1.0, 3.0))
def test_a_function_of_the_user_and_mixtures(implementation, temperature):
    case = make_case(temperature=temperature)
    found = run(IMPLEMENTATIONS[implementation], case, chi_squared, ce_weight=0.5)
    assert worst_difference(found, oracle(case, "chi_squared", ce_weight=0.5)) < 1e-10

    mixed = run(IMPLEMENTATIONS[implementation], case, mixture(reverse_kl=0.25, tvd=2.0))
    parts = [vars(oracle(case, name)) for name in ("reverse_kl", "tvd")]
    truth = Truth(**{key: 0.25 * parts[0][key] + 2.0 * parts[1][key] for key in parts[0]})
    truth.ce, truth.weight = oracle(case, "tvd").ce, case.token_weight.sum()
    assert worst_difference(mixed, truth) < 1e-10


def corner_cases():
    """Name, case, and divergences that make no sense there."""
    base = make_case(k=6)
    yield "ragged K", ragged(base)
    yield "ragged K at T = 2", ragged(make_case(k=6, temperature=2.0))
    yield "one token", make_case(tokens=1)
    yield "all tokens masked", poison_masked(replace(base, token_weight=torch.zeros_like(base.token_weight)))
    yield "negative weights", replace(base, token_weight=-base.token_weight)
    yield "K = 1", make_case(k=1)
    yield "K = V", make_case(k=37, total=37)
    yield "K = V at T = 2", make_case(k=37, total=37, temperature=2.0)
    yield "K = V, no padding", make_case(k=37, total=37, padded=37)
    ids, logprobs, _ = base.teacher
    logprobs = logprobs.log_softmax(1)
    yield "mass exactly 1", replace(base, teacher=TopK(ids, logprobs, torch.full_like(logprobs[:, 0], -math.inf)))
    repeated = ids.clone()
    repeated[:, 4] = repeated[:, 1]
    repeated[::2, 5] = repeated[::2, 1]
    yield "repeated ids", replace(base, teacher=base.teacher._replace(ids=repeated))
    yield (
        "labels are repeated ids",
        replace(base, teacher=base.teacher._replace(ids=repeated), labels=repeated[:, 1].contiguous()),
    )
    yield "int32 ids", replace(base, teacher=base.teacher._replace(ids=ids.int()))


@pytest.mark.parametrize("corner", [pytest.param(case, id=name) for name, case in corner_cases()])
def test_corners(corner):
    for name, ce_weight in product(NAMES, (0.0, 0.5)):
        truth = oracle(corner, name, ce_weight=ce_weight)
        for key, implementation in IMPLEMENTATIONS.items():
            found = run(implementation, corner, name, ce_weight=ce_weight)
            assert worst_difference(found, truth) < 1e-10 * max(1, float(truth.total.abs())), (key, name, ce_weight)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_logits_of_ten_thousand(dtype):
    """Student and teacher sure of themselves, and of different tokens."""
    case = make_case(spread=3000.0, dtype=torch.float64)
    far = 3000 * torch.randn(13, 37, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    case = replace(case, teacher=top_k(far, 5))
    assert float((case.hidden @ case.weight[:37].T).abs().max()) > 1e4
    cast = replace(
        case,
        hidden=case.hidden.to(dtype),
        weight=case.weight.to(dtype),
        teacher=TopK(case.teacher.ids, case.teacher.logprobs.to(dtype), case.teacher.log_tail.to(dtype)),
    )
    # A float32 logit of 1e4 is off by 1e-3, and so is a probability, relatively.
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for name, implementation in product(NAMES, IMPLEMENTATIONS.values()):
        found, truth = run(implementation, cast, name, ce_weight=0.5), oracle(cast, name, ce_weight=0.5)
        assert float((found.total.double() - truth.total).abs()) <= tolerance * float(truth.total.abs()) * 10
        for grad in ("grad_hidden", "grad_weight"):
            error = (getattr(found, grad).double() - getattr(truth, grad)).abs().max()
            assert float(error) <= tolerance * float(case.weight[:37].abs().max()) * 100, (name, grad)


@pytest.mark.parametrize("mode", FUSED)
@pytest.mark.parametrize("temperature", (1.0, 2.0))
def test_finite_differences_of_the_value_equal_the_gradient(mode, temperature):
    """T^2, weights, cross entropy and masks are in value and gradient alike."""
    case = make_case(temperature=temperature)
    direction = torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for name, weights in product(NAMES, ((1.0, 0.0), (0.3, 0.5))):
        options = dict(zip(("kd_weight", "ce_weight"), weights, strict=True))

        def value(step, name=name, options=options):
            moved = replace(case, hidden=case.hidden + step * direction)
            return float(run(IMPLEMENTATIONS[mode], moved, name, **options).total)

        slope = (value(1e-5) - value(-1e-5)) / 2e-5
        grad = float((run(IMPLEMENTATIONS[mode], case, name, **options).grad_hidden * direction).sum())
        assert grad == pytest.approx(slope, rel=1e-6, abs=1e-7), (name, options)


@pytest.mark.parametrize("mode", FUSED)
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(mode, name):
    case = make_case(tokens=4, hidden=3, total=9, padded=10, k=3, temperature=2.0)
    weight = case.weight.nan_to_num(0.5)

    def total(hidden, weight):
        return fused_linear_divergence(
            hidden,
            weight,
            case.teacher,
            case.token_weight,
            divergence=name,
            labels=case.labels,
            ce_weight=0.5,
            temperature=2.0,
            shard=VocabShard(0, 10, 9),
            gradient=mode,
            strip_tokens=3,
        ).total

    assert torch.autograd.gradcheck(total, (case.hidden.requires_grad_(), weight.requires_grad_()))


def test_temperature_squared_keeps_the_gradient_of_a_soft_teacher_in_size():
    """T^2 KL_T tends to half the squared distance of centred logits over V: value and gradient settle as T grows."""
    sizes = []
    for T in (32.0, 64.0):
        case = make_case(k=37, total=37, temperature=T)
        found = run(IMPLEMENTATIONS["forward"], case, "forward_kl")
        sizes.append((float(found.total), float(found.grad_hidden.norm())))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    assert sizes[0][1] > 0.01


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_argument_is_modified(implementation):
    case = ragged(make_case(dtype=torch.float32, temperature=2.0))
    arguments = (case.hidden, case.weight, *case.teacher, case.token_weight, case.labels)
    before = [part.clone() for part in arguments]
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    sums = IMPLEMENTATIONS[implementation](
        hidden,
        weight,
        case.teacher,
        case.token_weight,
        labels=case.labels,
        ce_weight=0.5,
        temperature=2.0,
        shard=VocabShard(0, 40, 37),
    )
    sums.total.backward()
    for old, new in zip(before, arguments, strict=True):
        assert torch.equal(old.nan_to_num(), new.detach().nan_to_num())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequence_and_batch_axes_are_rows(implementation):
    case = make_case(tokens=12)
    flat = run(IMPLEMENTATIONS[implementation], case, "jsd", ce_weight=0.5)
    folded = replace(
        case,
        hidden=case.hidden.unflatten(0, (4, 3)),
        teacher=TopK(*(part.unflatten(0, (4, 3)) for part in case.teacher)),
        token_weight=case.token_weight.reshape(3, 4).T.contiguous().T.reshape(4, 3),
        labels=case.labels.reshape(4, 3),
    )
    found = run(IMPLEMENTATIONS[implementation], folded, "jsd", ce_weight=0.5)
    assert found.grad_hidden.shape == (4, 3, 8)
    found.grad_hidden = found.grad_hidden.flatten(0, 1)
    assert worst_difference(found, flat) == 0


@pytest.mark.parametrize("mode", FUSED)
def test_what_needs_no_gradient_gets_none(mode):
    case = make_case()
    full = run(IMPLEMENTATIONS[mode], case, "forward_kl")
    options = {"shard": VocabShard(0, 40, 37)}
    rows = (case.teacher, case.token_weight)

    hidden, weight = case.leaves()
    IMPLEMENTATIONS[mode](hidden, weight.detach(), *rows, **options).total.backward()
    assert torch.equal(hidden.grad, full.grad_hidden)
    IMPLEMENTATIONS[mode](hidden.detach(), weight, *rows, **options).total.backward()
    assert torch.equal(weight.grad, full.grad_weight)
    assert not IMPLEMENTATIONS[mode](hidden.detach(), weight.detach(), *rows, **options).total.requires_grad
    with torch.no_grad():
        sums = IMPLEMENTATIONS[mode](hidden, weight, *rows, **options)
    assert not sums.total.requires_grad
    assert torch.equal(sums.total, full.total)


@pytest.mark.parametrize("mode", FUSED)
def test_backward_twice_and_activation_recomputation(mode):
    case = make_case()
    once = run(IMPLEMENTATIONS[mode], case, "reverse_kl")
    rows = (case.teacher, case.token_weight)
    call = partial(IMPLEMENTATIONS[mode], divergence="reverse_kl", shard=VocabShard(0, 40, 37))

    hidden, weight = case.leaves()
    total = call(hidden, weight, *rows).total
    total.backward(retain_graph=True)
    total.backward()
    assert torch.equal(hidden.grad, 2 * once.grad_hidden)
    assert torch.equal(weight.grad, 2 * once.grad_weight)

    hidden, weight = case.leaves()
    checkpoint(lambda h, w: call(h, w, *rows).total, hidden, weight, use_reentrant=False).backward()
    assert torch.equal(hidden.grad, once.grad_hidden)
    assert torch.equal(weight.grad, once.grad_weight)


def test_the_other_sums_carry_no_gradient():
    case = make_case()
    hidden, weight = case.leaves()
    sums = fused_linear_divergence(
        hidden, weight, case.teacher, case.token_weight, labels=case.labels, shard=VocabShard(0, 40, 37)
    )
    assert [part.requires_grad for part in sums] == [True, False, False, False]
    assert float(sums.ce) == pytest.approx(float(oracle(case, "forward_kl").ce), rel=1e-12)


@pytest.mark.parametrize("mode", FUSED)
def test_strip_size_changes_nothing_but_rounding(mode):
    case = make_case(tokens=64, dtype=torch.float32)
    truth = oracle(case, "forward_kl", ce_weight=0.5)
    for strip_tokens in (1, 7, 64, None):
        function = partial(fused_linear_divergence, gradient=mode, strip_tokens=strip_tokens)
        found = run(function, case, "forward_kl", ce_weight=0.5)
        again = run(function, case, "forward_kl", ce_weight=0.5)
        assert worst_difference(found, truth) < 2e-5
        assert all(torch.equal(a, b) for a, b in zip(vars(found).values(), vars(again).values(), strict=True))


def test_autocast_around_the_call_changes_nothing():
    case = make_case(dtype=torch.float32)
    plain = run(IMPLEMENTATIONS["forward"], case, "forward_kl")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(IMPLEMENTATIONS["forward"], case, "forward_kl")
    assert worst_difference(cast, plain) == 0
