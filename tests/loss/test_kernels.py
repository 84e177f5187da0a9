# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels and their eager twins against float64: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_kd.loss import LossArgumentError, row_kernels
from megatron_kd.loss.row_kernels import BLOCK_ELEMENTS, RowGradient, row_gradient_, row_statistics, set_kernels
from tests.loss.checks import relative
from tests.loss.kernel_cases import (
    DTYPES,
    KERNELS,
    MARK,
    all_rows,
    gradient_by_definition,
    in_own_process,
    statistics_by_definition,
)

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(scope="module", params=["cpu", GPU])
def results(request):
    return request.param, *in_own_process(request.param)


@pytest.fixture(autouse=True)
def restore_choice():
    yield
    set_kernels(None)


def float32_error(rows):
    """Relative error of an exponential of float32 numbers: some units of what is subtracted, and the exponential's."""
    largest = float(rows.buffer[:, : rows.V].abs().max()) + 10
    return 1e-6 + 4 * 2**-24 * largest


@pytest.mark.parametrize("kernels", KERNELS)
def test_statistics(results, kernels):
    """Log-sum-exps as defined; logits of entries and label bit for bit; -inf at the entries and nowhere else."""
    _, passes, _ = results
    for rows, found in zip(all_rows(), passes[kernels], strict=True):
        owned, tails, after = statistics_by_definition(rows)
        tails = tails[:, : found.tails.shape[1]]
        assert torch.equal(found.owned.double(), owned), rows.name
        assert torch.equal(found.after_statistics, after), rows.name
        assert torch.equal(found.tails == -torch.inf, tails == -torch.inf), rows.name
        assert torch.allclose(found.tails.double(), tails, rtol=3e-7, atol=1e-6), rows.name
        assert (found.tails.shape[1] == 2) == (rows.label_column is not None and rows.temperature != 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_gradient(results, kernels, dtype):
    """As defined, each number rounded once, whether or not the statistics took the entries before.

    In the last row the label's gradient is nearly the opposite of the tail's there: had one been rounded to bf16
    before the other came to it, the error would be a hundred times what is allowed. Triton's interpreter cuts a bf16
    off where a GPU rounds (test_compile.py), so its last digit counts twice.
    """
    device, passes, _ = results
    rounding = 0.0 if dtype == torch.float32 else 2**-8
    if kernels == "triton" and device == "cpu":
        rounding *= 2
    for rows, found in zip(all_rows(), passes[kernels], strict=True):
        truth, size = gradient_by_definition(rows)
        allowed = float32_error(rows) * size + rounding * truth.abs() + 1e-37
        for taken in (False, True):
            error = (found.grads[dtype, taken].double() - truth).abs()
            assert bool((error <= allowed).all()), (rows.name, taken, float((error / allowed).max()))


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_gradient_lies_over_its_own_rows_and_nothing_else_is_touched(results, kernels):
    _, passes, _ = results
    for rows, found in zip(all_rows(), passes[kernels], strict=True):
        assert found.same_memory, rows.name
        assert all(bool((padding == MARK).all()) for padding in found.paddings), rows.name


def test_the_whole_loss(results):
    """Sums and gradients against the oracle; both forms of the passes."""
    _, _, calls = results
    for call in calls:
        exact = "float32" in call.name
        for kernels, found in call.found.items():
            where = (call.name, kernels)
            for key in ("total", "kd", "ce", "weight"):
                expected = pytest.approx(float(getattr(call.truth, key)), rel=1e-5 if exact else 2e-3)
                assert float(getattr(found, key)) == expected, where
            for key in ("grad_hidden", "grad_weight"):
                error = relative(getattr(found, key), getattr(call.truth, key))
                assert error < (2e-6 if exact else 4e-3), (*where, error)


class NewMemory(TorchDispatchMode):
    """The largest tensor in bytes that operators make, beside the ones in the memory of `known`."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() != self.known:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_eager_forms_have_no_second_buffer(dtype):
    n, V, K = 256, 50_000, 10
    logits, columns, row = torch.randn(n, V), torch.arange(K).expand(n, K), torch.rand(n)
    gradient = RowGradient(row, row + 10, torch.rand(n, K), row, row, row + 10)
    with NewMemory(logits) as made:
        row_statistics(logits, columns, columns[:, 0], 2.0, at_one=True)
        row_gradient_(logits, columns, columns[:, 0], gradient, 2.0, dtype)
    assert 0 < made.bytes <= 4 * BLOCK_ELEMENTS["cpu"] < n * V * 4 / 10


class Operators(TorchDispatchMode):
    """Names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def passes_over(device, dtype=torch.float32):
    """Which of our operators the two passes are, for logits on a fake device; and the gradient."""
    with FakeTensorMode(), Operators() as seen:
        logits = torch.empty(4, 1024, device=device, dtype=dtype)
        columns, row = torch.empty(4, 10, dtype=torch.int64, device=device), torch.empty(4, device=device, dtype=dtype)
        owned, tails = row_statistics(logits, columns, columns[:, 0], 2.0, at_one=True)
        gradient = RowGradient(row, tails[:, 0], owned[:, :10], row, row, tails[:, 1])
        grad = row_gradient_(logits, columns, columns[:, 0], gradient, 2.0, torch.bfloat16)
    assert (tuple(owned.shape), tuple(tails.shape), tuple(grad.shape)) == ((4, 11), (4, 2), (4, 1024))
    return {name for name in seen.names if name.startswith("megatron_kd")}, grad


OURS = {"megatron_kd.row_statistics.default", "megatron_kd.row_gradient.default"}


def test_cuda_gets_the_kernels_by_itself_and_either_form_can_be_forced(monkeypatch):
    """On fake tensors: the operators that would be launched."""
    names, grad = passes_over("cuda")
    assert names == OURS
    assert grad.dtype == torch.bfloat16 and grad.stride() == (2048, 1)
    assert passes_over("meta")[0] == OURS  # stands for CUDA where bytes are counted
    assert passes_over("cuda", torch.float64)[0] == set()
    assert passes_over("cpu")[0] == set()
    monkeypatch.setenv("MEGATRON_KD_KERNELS", "eager")
    assert passes_over("cuda")[0] == set()
    set_kernels("triton")
    assert passes_over("cuda")[0] == OURS
    set_kernels("eager")
    monkeypatch.setenv("MEGATRON_KD_KERNELS", "triton")
    assert passes_over("cuda")[0] == set()


def test_a_form_that_cannot_run_is_refused(monkeypatch):
    with pytest.raises(LossArgumentError, match="expected one of .*found 'cuda'"):
        set_kernels("cuda")
    set_kernels("triton")
    with pytest.raises(LossArgumentError, match="expected logits on CUDA, found them on cpu.*TRITON_INTERPRET=1"):
        passes_over("cpu")
    with pytest.raises(LossArgumentError, match="expected float32 logits, found torch.float64; use 'eager'"):
        passes_over("cuda", torch.float64)
    monkeypatch.setattr(row_kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LossArgumentError, match="expected the package triton, found none"):
        passes_over("cuda")
    set_kernels(None)
    assert passes_over("cuda")[0] == set()
    monkeypatch.setenv("MEGATRON_KD_KERNELS", "tritn")
    with pytest.raises(LossArgumentError, match="MEGATRON_KD_KERNELS: expected one of .*found 'tritn'"):
        passes_over("cuda")
