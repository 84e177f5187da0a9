# SPDX-License-Identifier: Apache-2.0
"""The grid [tokens, vocabulary] is never made, and the GEMM work is what the docstring says."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.loss import TopK, VocabShard, dense_divergence, forward_chunked_divergence, fused_linear_divergence
from megatron_kd.loss.arguments import default_strip_tokens
from megatron_kd.loss.errors import require_on_device
from megatron_kd.loss.matmul import add_weight_gradient, hidden_gradient, logits_into, operand_dtype

N, H, V, K, STRIP = 2048, 8, 1000, 10, 64


class LargestTensor(TorchDispatchMode):
    """Counts elements of whatever any operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


class OperatorNames(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def inputs():
    """Arguments of a call that uses everything: labels, CE, a temperature."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=random, requires_grad=True)
    weight = torch.randn(V, H, generator=random, requires_grad=True)
    ids = torch.rand(N, V, generator=random).argsort(1)[:, :K].contiguous()
    logp = torch.randn(N, K + 1, generator=random).log_softmax(1)
    options = {"labels": ids[:, 0], "ce_weight": 0.5, "temperature": 2.0, "strip_tokens": STRIP}
    return (hidden, weight, TopK(ids, logp[:, :-1], logp[:, -1]), torch.ones(N)), options


def largest(function, **options):
    """Elements of the largest tensor within forward and backward."""
    arguments, others = inputs()
    with LargestTensor() as seen:
        function(*arguments, **others, **options).total.backward()
    return seen.elements


@pytest.mark.parametrize("mode", ("forward", "recompute"))
def test_no_tensor_is_larger_than_a_strip_of_logits(mode):
    assert largest(fused_linear_divergence, gradient=mode) == STRIP * V


def test_the_baselines_do_hold_the_grid():
    """So the measure above can tell."""
    assert largest(dense_divergence) >= N * V
    assert largest(forward_chunked_divergence) == N * V


def test_the_default_strip_fits_its_budget():
    """GPT-OSS: 896 tokens of 201,088 columns at TP = 1; never fewer than 128."""
    assert default_strip_tokens(VocabShard(0, 201_088, 201_088), torch.float32) == 896
    assert default_strip_tokens(VocabShard(0, 507, 507), torch.float32) == 361_856
    assert default_strip_tokens(VocabShard(0, 10**8, 10**8), torch.float32) == 128


def test_recompute_keeps_two_numbers_a_token_and_forward_the_gradients():
    """Bytes that autograd holds between forward and backward, beyond the arguments."""
    arguments, _ = inputs()
    given = {part.data_ptr() for part in arguments[:2]}

    def held(mode):
        total = fused_linear_divergence(*arguments, gradient=mode, strip_tokens=STRIP).total
        return sum(part.nbytes for part in total.grad_fn.saved_tensors if part.data_ptr() not in given)

    assert held("recompute") == N * 8
    assert held("forward") == N * H * 4 + V * H * 4


@pytest.mark.parametrize(("mode", "gemms"), [("forward", 3), ("recompute", 4)])
def test_gemm_work(mode, gemms):
    arguments, options = inputs()
    with FlopCounterMode(display=False) as counter:
        fused_linear_divergence(*arguments, **options, gradient=mode).total.backward()
    assert counter.get_total_flops() == gemms * 2 * N * H * V


@pytest.mark.parametrize("distinct", (True, False))
def test_distinct_ids_are_not_sorted(distinct):
    arguments, options = inputs()
    with OperatorNames() as seen:
        fused_linear_divergence(*arguments, **options, distinct=distinct).total.backward()
    assert any("sort" in name for name in seen.names) == (not distinct)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("mode", ("forward", "recompute"))
def test_no_value_is_looked_at_by_the_host(mode, dtype):
    """Fake tensors have shapes but no values: to read one, which on a GPU would be to wait for it, raises."""
    with FakeTensorMode():
        hidden = torch.empty(300, 64, dtype=dtype, requires_grad=True)
        weight = torch.empty(1024, 64, dtype=dtype, requires_grad=True)
        weight.main_grad = torch.empty(1024, 64)
        ids, rows = torch.empty(300, 10, dtype=torch.int32), torch.empty(300)
        teacher = TopK(ids, ids.float(), rows)
        options = {"labels": ids[:, 0], "ce_weight": 0.5, "temperature": 2.0, "shard": VocabShard(0, 1024, 1000)}
        sums = fused_linear_divergence(hidden, weight, teacher, rows, **options, gradient=mode, strip_tokens=128)
        sums.total.backward()
        assert hidden.grad.dtype == dtype and sums.total.dtype == torch.float32
        with pytest.raises(DataDependentOutputException):
            sums.total.item()


def test_products_on_cuda_keep_bf16_operands_and_float32_results():
    """The operators chosen for fake CUDA tensors: no operand is widened, nothing but the logit gradient is rounded."""
    with FakeTensorMode(), OperatorNames() as seen:
        hidden, weight = (torch.empty(rows, 64, dtype=torch.bfloat16, device="cuda") for rows in (128, 1000))
        logits = torch.empty(128, 1024, device="cuda")[:, :1000]
        logits_into(logits, hidden, weight, torch.float32)
        grad = logits.view(operand_dtype(logits, weight))[:, :1000]
        assert hidden_gradient(grad, weight).dtype == torch.bfloat16
        add_weight_gradient(torch.empty(1000, 64, device="cuda"), grad, hidden, first=True)
        require_on_device((logits == 0).all(), "not looked at")
    products = [name for name in seen.names if "mm" in name or "to_copy" in name or "assert" in name]
    assert products == [
        "aten.mm.dtype_out",
        "aten.mm.default",
        "aten.addmm.dtype_out",
        "aten._assert_async.msg",
    ]
