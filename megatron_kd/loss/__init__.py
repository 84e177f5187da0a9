# SPDX-License-Identifier: Apache-2.0
"""Divergences of a student from a sparse teacher, and a teacher's top K, from hidden states. Needs torch alone."""

from megatron_kd.loss.arguments import LossSums, TopK
from megatron_kd.loss.divergence import DIVERGENCES, jsd, mixture
from megatron_kd.loss.errors import LossArgumentError
from megatron_kd.loss.fused_linear import fused_linear_divergence
from megatron_kd.loss.fused_topk import TeacherRows, fused_linear_topk
from megatron_kd.loss.reference import dense_divergence, forward_chunked_divergence
from megatron_kd.loss.row_kernels import set_kernels
from megatron_kd.loss.vocab_parallel import VocabShard

__all__ = [
    "DIVERGENCES",
    "LossArgumentError",
    "LossSums",
    "TeacherRows",
    "TopK",
    "VocabShard",
    "dense_divergence",
    "forward_chunked_divergence",
    "fused_linear_divergence",
    "fused_linear_topk",
    "jsd",
    "mixture",
    "set_kernels",
]
