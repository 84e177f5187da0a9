# SPDX-License-Identifier: Apache-2.0
"""torch.compile around the loss: what comes before and after is compiled, the loss runs as it is."""

import pytest
import torch

from megatron_kd.loss import fused_linear_divergence
from tests.loss.oracle import make_case


@pytest.mark.parametrize("mode", ("forward", "recompute"))
def test_a_compiled_caller_gets_the_same_bits_and_one_break(mode):
    case = make_case(total=40)
    leaves = [part.requires_grad_() for part in (case.hidden, case.weight)]

    def step(hidden, weight):
        states = torch.tanh(hidden) * 2
        sums = fused_linear_divergence(states, weight, case.teacher, case.token_weight, gradient=mode, strip_tokens=4)
        return (sums.total / sums.weight).sin()

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        found, plain = compiled(*leaves), step(*leaves)
        assert torch.equal(found, plain)
        for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(plain, leaves), strict=True):
            assert torch.equal(one, other)
    assert torch._dynamo.explain(step)(*leaves).graph_count == 2
