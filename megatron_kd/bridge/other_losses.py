# SPDX-License-Identifier: Apache-2.0
"""Distillation losses of other libraries, made ready for the bench of megatron_kd.loss. They must be installed.

Each function takes a BenchShape and returns a Method, or raises ImportError; see megatron_kd/loss/bench_methods.py.
"""

import torch

from megatron_kd.loss.bench_methods import BenchInputs, BenchShape, Method, full_kl


def megatron_topk(shape: BenchShape) -> Method:
    """Megatron's own offline distillation: topk_kl_div behind an ordinary output layer, with its ghost token.

    Source: megatron-core 0.19, megatron/training/distillation/cached_logits_loss.py.
    """
    try:
        from megatron.training.distillation.cached_logits_loss import topk_kl_div
    except ImportError as error:
        raise ImportError(f"needs megatron-core 0.19 with megatron.training.distillation: {error}") from error

    def loss(inputs: BenchInputs) -> torch.Tensor:
        logits = torch.nn.functional.linear(inputs.hidden[:, None], inputs.weight)  # [S, B = 1, V]
        ids, logprobs, _ = inputs.teacher
        kl = topk_kl_div(logits, logprobs[:, None], ids[:, None], 1, 0, None, add_ghost_token=True)
        return (kl[0] * inputs.token_weight).sum()

    half = shape.torch_dtype.itemsize < 4
    return Method(loss, note=f"logits in {shape.dtype}, as its output layer makes them" if half else "")


def liger(shape: BenchShape) -> Method:
    """Liger's chunked fused linear distillation loss at beta = 0, forward KL; another problem, with a dense teacher.

    It needs the teacher's hidden states and head, projects both models (a fourth product), and keeps the weight
    gradient in the dtype of the weight. Its defaults otherwise: chunks of 1,024 tokens, torch.compile.
    """
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError as error:
        raise ImportError(f"needs liger-kernel: {error}") from error

    function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
    labels = torch.zeros(shape.tokens, dtype=torch.int64, device=shape.device)  # it counts them

    def loss(inputs: BenchInputs) -> torch.Tensor:
        teacher = inputs.teacher_hidden, inputs.weight.detach()
        return function(inputs.hidden, inputs.weight, *teacher, labels[: len(inputs.hidden)])

    return Method(loss, full_kl, "full-vocabulary KL from a dense teacher, which it projects as well")
