# SPDX-License-Identifier: Apache-2.0
"""The teacher's top K, strip by strip, against a dense fp64 log-softmax. Over ranks: test_tensor_parallel.py."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_kd.loss import LossArgumentError, VocabShard, fused_linear_topk, fused_topk
from megatron_kd.loss.fused_topk import ranked_top_k
from megatron_kd.report.memory import LiveBytes


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


def problem(n, hidden, rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, hidden, generator=generator, dtype=torch.float64).to(dtype),
        (torch.randn(rows, hidden, generator=generator, dtype=torch.float64) * 0.7).to(dtype),
    )


def dense(hidden, weight, vocab_real, top_k, temperatures, bias=0.0):
    """fp64, whole grid, sorted in numpy by (value descending, id ascending)."""
    logits = (hidden.double() @ weight.double().T + bias)[:, :vocab_real]
    logp = logits.log_softmax(-1).numpy()
    ids = np.lexsort((np.broadcast_to(np.arange(vocab_real), logp.shape), -logp), axis=-1)
    ranked = np.take_along_axis(logp, ids, -1)
    rest = ranked[:, top_k:]
    with np.errstate(divide="ignore"):
        tails = [np.log(np.exp(rest / t).sum(-1)) for t in (1.0, *temperatures)]
    return ids[:, :top_k], ranked[:, :top_k], tails[0], np.stack(tails[1:], -1), logp


@pytest.mark.parametrize("strip_tokens", [1, 7, 64, None])
@pytest.mark.parametrize("top_k,vocab_real,rows", [(10, 507, 512), (1, 507, 507), (507, 507, 512)])
def test_equal_to_the_dense_log_softmax_in_fp64(strip_tokens, top_k, vocab_real, rows):
    hidden, weight = problem(37, 16, rows)
    bias = torch.linspace(-1, 1, rows, dtype=torch.float64)
    bias[vocab_real:] = 50  # padding would win every place
    labels = torch.arange(37) * 13 % vocab_real
    labels[5] = -1
    got = fused_linear_topk(
        hidden,
        weight,
        shard=VocabShard(0, rows, vocab_real),
        top_k=top_k,
        temperatures=(2.0, 0.5),
        strip_tokens=strip_tokens,
        bias=bias,
        labels=labels,
    )
    ids, logprobs, log_tail, tail_T, logp = dense(hidden, weight, vocab_real, top_k, (2.0, 0.5), bias)
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-12)
    np.testing.assert_allclose(got.log_tail, log_tail, atol=1e-12)
    np.testing.assert_allclose(got.tail_T, tail_T, atol=1e-12)
    own = logp[np.arange(37), labels.clamp(min=0)]
    own[5] = 0
    np.testing.assert_allclose(got.label_logprobs, own, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_lose_nothing_but_their_own_rounding(dtype):
    """Products of the given values are taken and summed in fp32, however narrow the inputs are."""
    hidden, weight = problem(64, 64, 40_000, dtype)
    got = fused_linear_topk(hidden, weight, top_k=50, temperatures=(2.0,))
    _, logprobs, log_tail, tail_T, logp = dense(hidden, weight, 40_000, 50, (2.0,))
    np.testing.assert_allclose(got.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(got.log_tail, log_tail, atol=2e-5)
    np.testing.assert_allclose(got.tail_T, tail_T, atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(logp, got.ids.numpy(), -1), logprobs, atol=2e-5)


def test_the_tail_is_summed_and_not_derived():
    """With mass 1 - 1e-12 in the top entry, 1 - sum in fp32 is 0 or noise; the sum over the tail is right to 1e-5."""
    weight = torch.zeros(1000, 4)
    weight[7] = 1.0
    hidden = torch.full((3, 4), 9.0)
    got = fused_linear_topk(hidden, weight, top_k=5)
    expected = np.log(995) - np.log(np.exp(36.0) + 999)
    np.testing.assert_allclose(got.log_tail, expected, rtol=1e-6)


def test_ties_are_broken_by_id_inside_and_at_the_cut():
    """Logits of three values only, so that every row ties in the middle of its top K and across the cut."""
    logits = torch.randint(0, 3, (200, 97), generator=torch.Generator().manual_seed(0)).float()
    logits[0] = -torch.inf
    logits[0, 50] = 1.0  # fewer finite entries than K
    for top_k in (1, 5, 40, 96, 97):
        values, ids = ranked_top_k(logits.clone(), top_k)
        expected = np.lexsort((np.broadcast_to(np.arange(97), logits.shape), -logits.numpy()), axis=-1)[:, :top_k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(logits.numpy(), expected, -1))


def test_no_argument_is_modified():
    hidden, weight = problem(9, 8, 40, torch.float32)
    before = hidden.clone(), weight.clone()
    fused_linear_topk(hidden, weight, shard=VocabShard(0, 40, 39), top_k=3, temperatures=(2.0,))
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])


@pytest.mark.parametrize("n,vocab,strip", [(512, 201_088, 16), (32_768, 3000, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_tensor_is_one_strip(n, vocab, strip, dtype):
    """GPT-OSS's vocabulary, and 32K positions: nothing larger than a strip or the weight is ever made."""
    if dtype == torch.bfloat16 and n > 1000:
        n = 4096  # the same code path; the full length is covered in fp32
    hidden, weight = torch.randn(n, 8).to(dtype), torch.randn(vocab, 8).to(dtype)
    with LargestTensor() as largest:
        fused_linear_topk(
            hidden,
            weight,
            shard=VocabShard(0, vocab, vocab - 8),
            top_k=20,
            strip_tokens=strip,
            temperatures=(2.0,),
        )
    results = n * 20 * 8
    assert strip * (vocab - 8) * 4 <= largest.bytes <= max(strip * vocab * 4, weight.nbytes, results)
    assert largest.bytes < n * vocab * 4 / 10


def test_logits_that_are_nan_are_an_error():
    hidden, weight = problem(9, 8, 40, torch.float32)
    weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        fused_linear_topk(hidden, weight, top_k=3)
    with pytest.raises(LossArgumentError, match="top_k: expected 1 to 40, the real vocabulary, found 41"):
        fused_linear_topk(hidden, weight, top_k=41)


def test_sequence_and_batch_axes_are_rows():
    hidden, weight = problem(12, 8, 40)
    labels = torch.arange(12) % 40
    flat = fused_linear_topk(hidden, weight, top_k=3, labels=labels, strip_tokens=5)
    folded = fused_linear_topk(hidden.view(6, 2, 8), weight, top_k=3, labels=labels.view(6, 2), strip_tokens=5)
    assert all(torch.equal(one, other) for one, other in zip(flat, folded, strict=True))


def test_memory_at_full_scale():
    """32K tokens of GPT-OSS's head on one rank: at most 1.5 GiB beyond weight and hidden, counted on meta tensors."""
    hidden = torch.empty(1 << 15, 2880, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(201_088, 2880, dtype=torch.bfloat16, device="meta")
    with LiveBytes(hidden, weight) as counter, patch.object(fused_topk, "_some", lambda flags: False):
        fused_linear_topk(hidden, weight, top_k=100, temperatures=(2.0,))
    beyond = (counter.peak - hidden.nbytes - weight.nbytes) / (1 << 30)
    print(f"32K, top 100: {beyond:.3f} GiB beyond weight and hidden")
    assert beyond <= 1.5


@pytest.mark.parametrize("columns", (5_000, 5_007))
@pytest.mark.parametrize("levels", (3, 200, 10**6))
def test_rank_of_a_long_row_with_many_ties_by_value_then_id(levels, columns):
    random = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (11, columns), generator=random).float()
    logits[3] = -torch.inf
    logits[4, 5:] = -torch.inf
    values, ids = ranked_top_k(logits, 20)
    order = np.lexsort((np.broadcast_to(np.arange(columns), logits.shape), -logits.numpy()), axis=-1)[:, :20]
    assert np.array_equal(ids.numpy(), order)
    assert np.array_equal(values.numpy(), np.take_along_axis(logits.numpy(), order, 1))
