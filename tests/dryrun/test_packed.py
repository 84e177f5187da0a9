# SPDX-License-Identifier: Apache-2.0
"""Several sequences in one row: each is what it would be in a row of its own."""

import numpy as np
import pytest
import torch

from megatron_kd.dryrun import run_ranks
from tests.dryrun.packed import Packing, losses, losses_alone
from tests.dryrun.test_attention import CASES, D, G, N, assert_near, build, oracle

LENGTHS, PADDED = [7, 12, 2], [8, 12, 4]
PACKINGS = {
    "of full lengths": Packing([24, 40], [24, 40], 40),
    "one alone": Packing([64], [64], 64),
    "padded": Packing([21, 1, 37], [24, 4, 40], 40),
    "an empty one at the end": Packing([21, 30, 0], [24, 32, 8], 32),
    "a longest said to fill the row": Packing([24, 40], [24, 40], 64),
}


def inputs():
    """query, key, value [T, heads, D], sink [N], and the weight of each output; padding has noise in it."""
    generator = torch.Generator().manual_seed(6)
    total = sum(PADDED)
    shapes = [(total, N, D), (total, G, D), (total, G, D), (N,), (total, 1, N * D)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def spans():
    starts = np.cumsum([0, *PADDED[:-1]]).tolist()
    return [slice(start, start + length) for start, length in zip(starts, LENGTHS, strict=True)]


def chunks(rank: int, size: int) -> torch.Tensor:
    """By the rule that Transformer Engine documents: of each sequence, chunk r and the r-th from the end."""
    row = torch.arange(sum(PADDED))
    if size == 1:
        return row
    cut = [sequence.chunk(2 * size) for sequence in row.split(PADDED)]
    return torch.cat([torch.cat([pieces[rank], pieces[-1 - rank]]) for pieces in cut])


def attend(cp: int):
    """Outputs and gradients of this rank's positions in every case; the weight of padding is 0."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_kd.dryrun.layers import CpuAttention

    boundaries = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (LENGTHS, PADDED)]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries[0],
        cu_seqlens_kv=boundaries[0],
        cu_seqlens_q_padded=boundaries[1],
        cu_seqlens_kv_padded=boundaries[1],
    )
    found = {}
    for name, settings in CASES.items():
        module = build(CpuAttention, settings, cp)
        *qkv, sink, weight = inputs()
        mine = chunks(torch.distributed.get_rank(), cp)
        real = torch.zeros(sum(PADDED), dtype=torch.bool)
        for span in spans():
            real[span] = True
        leaves = [tensor[mine].clone().requires_grad_() for tensor in qkv]
        if isinstance(module.softmax_offset, torch.nn.Parameter):
            module.softmax_offset = torch.nn.Parameter(sink.clone())
            leaves.append(module.softmax_offset)
        output = module(*leaves[:3], None, packed_seq_params=packed)
        kept = (weight * real[:, None, None])[mine]
        gradients = torch.autograd.grad((output * kept).sum(), leaves)
        found[name] = [x.numpy() for x in ((output * real[mine][:, None, None]).detach(), *gradients)]
    return found


def expected(settings):
    """Each sequence by itself, query by query."""
    q, k, v, sink, weight = inputs()
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    kind = settings.get("softmax_type", "vanilla")
    offset = {"vanilla": None, "off-by-one": torch.zeros_like(sink), "learnable": sink.clone().requires_grad_()}[kind]
    leaves += [offset] if kind == "learnable" else []
    skipped = settings.get("window_attn_skip_freq") == 1
    window = settings["window_size"][0] if "window_size" in settings and not skipped else None
    output = torch.zeros(sum(PADDED), 1, N * D, dtype=torch.float64)
    for span in spans():
        alone = [tensor[span].unsqueeze(1) for tensor in leaves[:3]]
        output[span] = oracle(*alone, offset, window=window, scale=settings.get("softmax_scale", D**-0.5))
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)]


@pytest.mark.parametrize("cp", [1, 2])
def test_each_sequence_attends_to_itself_alone(cp):
    ranks = run_ranks(attend, cp, args=(cp,))
    order = torch.cat([chunks(rank, cp) for rank in range(cp)]).argsort()
    for name, settings in CASES.items():
        parts = [[torch.from_numpy(x) for x in of_ranks] for of_ranks in zip(*(r[name] for r in ranks), strict=True)]
        ours = [torch.cat(x)[order] for x in parts[:4]] + [sum(x) for x in parts[4:]]
        for mine, right in zip(ours, expected(settings), strict=True):
            assert_near(mine, right, 1e-12, name)


@pytest.fixture(scope="module")
def alone(gpt_oss):
    return run_ranks(losses_alone, 1, args=(gpt_oss, PACKINGS))[0]


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_documents_have_the_losses_and_gradients_of_rows_of_their_own(gpt_oss, alone, cp):
    """A window, sinks, YaRN positions and experts; the row is cut by Bridge's own code."""
    packed = run_ranks(losses, cp, args=(gpt_oss, PACKINGS), kwargs={"cp": cp})[0]
    for name, (sums, gradients) in packed.items():
        right_sums, right_gradients = alone[name]
        np.testing.assert_allclose(sums, right_sums, rtol=1e-5, err_msg=name)
        for parameter, gradient in gradients.items():
            np.testing.assert_allclose(gradient, right_gradients[parameter], atol=2e-4, rtol=0, err_msg=parameter)


def cut(lengths: list[int], total: int) -> str:
    from megatron_kd.dryrun.partition import BadPacking, packed_positions

    try:
        packed_positions(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), total, 2, 0)
    except BadPacking as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("lengths, total", [([8, 6], 14), ([8, 4], 16)])
def test_lengths_that_cannot_be_cut_are_refused(lengths, total):
    (text,) = run_ranks(cut, 1, args=(lengths, total))
    assert str(lengths) in text and "multiple of 4" in text
