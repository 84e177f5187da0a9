# SPDX-License-Identifier: Apache-2.0
"""Tokens that the host knows to be masked are left out before the products: work, values, gradients, real ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.loss import LossArgumentError, TopK, VocabShard, fused_linear_divergence
from tests.loss.checks import run, worst_difference
from tests.loss.oracle import make_case, oracle, poison_masked

MODES = ("forward", "recompute")
STEPS, BATCH = 32, 2


def half_prompt(tokens=STEPS * BATCH):
    """Each of two samples starts with its prompt, on which there is rubbish; and three more tokens are masked."""
    case = make_case(tokens=tokens)
    case.token_weight[: tokens // 2] = 0
    case.token_weight[[-1, -5, -6]] = 0
    return poison_masked(case)


@pytest.mark.parametrize(("mode", "products"), [("forward", 3), ("recompute", 4)])
def test_half_a_batch_costs_half(mode, products):
    case = half_prompt()
    keep = torch.arange(64) >= 32
    with FlopCounterMode(display=False) as counter:
        run(partial(fused_linear_divergence, gradient=mode, strip_tokens=7, keep=keep), case, "forward_kl")
    assert counter.get_total_flops() == products * 2 * 32 * 8 * 37


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strip_tokens", (1, 7, None))
def test_what_is_left_out_has_no_part(mode, strip_tokens):
    case = half_prompt()
    function = partial(fused_linear_divergence, gradient=mode, strip_tokens=strip_tokens, keep=case.token_weight != 0)
    for name in ("forward_kl", "jsd"):
        found = run(function, case, name, ce_weight=0.5)
        assert worst_difference(found, oracle(case, name, ce_weight=0.5)) < 1e-11


@pytest.mark.parametrize("mode", MODES)
def test_nothing_kept(mode):
    case = make_case()
    case.token_weight.zero_()
    keep = torch.zeros(13, dtype=torch.bool)
    found = run(partial(fused_linear_divergence, gradient=mode, keep=keep), case, "forward_kl", ce_weight=0.5)
    assert all(not part.any() for part in vars(found).values())


def test_a_token_with_weight_cannot_be_left_out():
    case = make_case()
    for keep, message in (
        (torch.zeros(13, dtype=torch.bool), "keep: expected True for every token with weight"),
        (torch.ones(13), "keep: expected torch.bool, found torch.float32"),
        (torch.ones(12, dtype=torch.bool), "keep: expected shape"),
    ):
        with pytest.raises(LossArgumentError, match=message):
            run(partial(fused_linear_divergence, keep=keep), case, "forward_kl")


def test_capture_in_a_cuda_graph_is_refused(monkeypatch):
    """Fake CUDA tensors: there is a device to ask, and the answer is given here."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        hidden, weight = torch.empty(2, 8, device="cuda"), torch.empty(9, 8, device="cuda")
        with pytest.raises(LossArgumentError, match="CUDA graph: expected none around the loss"):
            fused_linear_divergence(hidden, weight, TopK(hidden, hidden, hidden[:, 0]), hidden[:, 0])


def rank_main(rank, world, folder):
    """Both modes, with and without sequence parallelism, against the oracle; a rank whose rows are all left out."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    case = half_prompt()
    truth = oracle(case, "forward_kl", ce_weight=0.5)
    shard = VocabShard(20 * rank, 20, 37, dist.group.WORLD)
    fold = lambda part: part.unflatten(0, (STEPS, BATCH))  # noqa: E731
    for mode in MODES:
        for parallel in (False, True):
            hidden, true_hidden = fold(case.hidden), fold(truth.grad_hidden)
            if parallel:
                hidden, true_hidden = hidden.chunk(world)[rank], true_hidden.chunk(world)[rank]
            hidden = hidden.clone().requires_grad_()
            weight = case.weight[shard.start :][:20].clone().requires_grad_()
            sums = fused_linear_divergence(
                hidden,
                weight,
                TopK(*map(fold, case.teacher)),
                fold(case.token_weight),
                labels=fold(case.labels),
                ce_weight=0.5,
                shard=shard,
                sequence_parallel=parallel,
                gradient=mode,
                strip_tokens=10,
                keep=fold(case.token_weight != 0),
            )
            sums.total.backward()
            found = torch.cat([sums.total.detach()[None], hidden.grad.flatten(), weight.grad.flatten()])
            true_weight = truth.grad_weight[shard.start :][:20]
            true = torch.cat([truth.total[None], true_hidden.flatten(), true_weight.flatten()])
            torch.testing.assert_close(found, true, rtol=0, atol=1e-11)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.start_processes(rank_main, (2, str(tmp_path)), nprocs=2, start_method="spawn")
