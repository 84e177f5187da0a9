# SPDX-License-Identifier: Apache-2.0
"""What the bench compares: the inputs of a shape, and the ways to compute a distillation loss from them.

A method is named by a word of METHODS, or by "module:function", so anyone's own loss can be measured. The function
takes a BenchShape and returns a Method; it raises ImportError if the library it needs is absent. Each method is judged
against the float64 value of its own problem, which is one of two:

- `sparse_kl`, forward KL over the K + 1 buckets of a sparse teacher, the mean over the tokens;
- `full_kl`, forward KL over the whole vocabulary, from the teacher's hidden states: another, larger problem.

Legend: N tokens, H hidden size, V columns, K teacher entries.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_kd.loss.arguments import TopK, default_strip_tokens
from megatron_kd.loss.errors import require
from megatron_kd.loss.fused_linear import fused_linear_divergence
from megatron_kd.loss.fused_topk import fused_linear_topk
from megatron_kd.loss.reference import dense_divergence, forward_chunked_divergence
from megatron_kd.loss.vocab_parallel import VocabShard

METHODS = {
    "fused": "megatron_kd.loss.bench_methods:fused",
    "fused-recompute": "megatron_kd.loss.bench_methods:fused_recompute",
    "forward-chunked": "megatron_kd.loss.bench_methods:forward_chunked",
    "dense": "megatron_kd.loss.bench_methods:dense",
    "dense-compiled": "megatron_kd.loss.bench_methods:dense_compiled",
    "megatron-topk": "megatron_kd.bridge.other_losses:megatron_topk",
    "liger": "megatron_kd.bridge.other_losses:liger",
}


@dataclass(frozen=True)
class BenchShape:
    """Size of one call of the loss on one rank, and where it runs."""

    tokens: int
    hidden: int
    columns: int
    """Of this rank: the vocabulary, or a share of it. The rank is measured as if they were all there are."""
    top_k: int
    dtype: str
    """Of hidden and weight: float32, bfloat16, float16, float64."""
    device: str
    """cpu, cuda or cuda:N."""
    strip_tokens: int | None = None
    """Tokens projected at a time; None: as the loss chooses."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    @property
    def strip(self) -> int:
        """Tokens of a strip, chosen or given."""
        dtype = torch.promote_types(self.torch_dtype, torch.float32)
        chosen = self.strip_tokens or default_strip_tokens(VocabShard(0, self.columns, self.columns), dtype)
        return min(chosen, self.tokens)

    @property
    def gemm_flops(self) -> int:
        """Of one product of hidden and weight."""
        return 2 * self.tokens * self.hidden * self.columns


@dataclass
class BenchInputs:
    """Arguments of one call. `hidden` and `weight` are leaves that get gradients."""

    hidden: torch.Tensor
    """[N, H]"""
    weight: torch.Tensor
    """[V, H]: the student's head, and the teacher's as well."""
    teacher: TopK
    """[N, K] int64, [N, K] float32, [N] float32."""
    teacher_hidden: torch.Tensor
    """[N, H]: what a loss with a dense teacher projects."""
    token_weight: torch.Tensor
    """[N]: 1 / N, so that a loss is the mean over the tokens."""

    def first(self, tokens: int) -> "BenchInputs":
        """The first tokens alone, as leaves of their own; the weight is shared."""
        return BenchInputs(
            hidden=self.hidden.detach()[:tokens].clone().requires_grad_(),
            weight=self.weight,
            teacher=TopK(*(part[:tokens] for part in self.teacher)),
            teacher_hidden=self.teacher_hidden[:tokens],
            token_weight=torch.full_like(self.token_weight[:tokens], 1 / tokens),
        )

    def double(self) -> "BenchInputs":
        """The same values in float64, hidden and weight as leaves of their own."""
        return BenchInputs(
            hidden=self.hidden.detach().double().requires_grad_(),
            weight=self.weight.detach().double().requires_grad_(),
            teacher=TopK(self.teacher.ids, self.teacher.logprobs.double(), self.teacher.log_tail.double()),
            teacher_hidden=self.teacher_hidden.double(),
            token_weight=torch.full_like(self.token_weight, 1 / len(self.token_weight), dtype=torch.float64),
        )


def make_inputs(shape: BenchShape, seed: int = 0) -> BenchInputs:
    """A teacher that is sure of some tokens, and a student near it: logits of spread 3, which differ by 0.3.

    The teacher has the student's head and hidden states of its own.
    """
    random = torch.Generator(shape.device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random, device=shape.device)

    weight = (normal(shape.columns, shape.hidden) / shape.hidden**0.5).to(shape.torch_dtype)
    hidden = 3 * normal(shape.tokens, shape.hidden)
    teacher_hidden = (hidden + 0.3 * normal(shape.tokens, shape.hidden)).to(shape.torch_dtype)
    rows = fused_linear_topk(teacher_hidden, weight, top_k=shape.top_k)
    return BenchInputs(
        hidden=hidden.to(shape.torch_dtype).requires_grad_(),
        weight=weight.requires_grad_(),
        teacher=TopK(rows.ids, rows.logprobs.float(), rows.log_tail.float()),
        teacher_hidden=teacher_hidden,
        token_weight=torch.full((shape.tokens,), 1 / shape.tokens, device=shape.device),
    )


def sparse_kl(inputs: BenchInputs) -> torch.Tensor:
    """Forward KL over the K + 1 buckets by ordinary autograd. Holds some six grids [N, V]."""
    ids, logprobs, log_tail = inputs.teacher
    logits = (inputs.hidden @ inputs.weight.T).to(logprobs.dtype)
    entries = logits.gather(1, ids)
    tail = logits.scatter(1, ids, -torch.inf).logsumexp(1)
    log_total = torch.logaddexp(tail, entries.logsumexp(1))
    kl = (logprobs.exp() * (logprobs - entries + log_total[:, None])).sum(1)
    kl = kl + log_tail.exp() * (log_tail - tail + log_total)
    return (inputs.token_weight * kl).sum()


def full_kl(inputs: BenchInputs) -> torch.Tensor:
    """Forward KL over the whole vocabulary by ordinary autograd, the teacher projected as well."""
    teacher = (inputs.teacher_hidden @ inputs.weight.detach().T).log_softmax(1)
    student = (inputs.hidden @ inputs.weight.T).log_softmax(1)
    return (inputs.token_weight * (teacher.exp() * (teacher - student)).sum(1)).sum()


class Method(NamedTuple):
    """One way to compute a loss."""

    loss: Callable[[BenchInputs], torch.Tensor]
    """Of the inputs as they are, 0-dim, with gradients for hidden and weight."""
    exact: Callable[[BenchInputs], torch.Tensor] = sparse_kl
    """Its value by definition; called with float64 inputs."""
    note: str = ""
    """What a reader of the table has to know."""


def fused(shape: BenchShape) -> Method:
    """Ours, gradients in forward."""
    return Method(lambda inputs: _ours(fused_linear_divergence, inputs, shape, gradient="forward"))


def fused_recompute(shape: BenchShape) -> Method:
    """Ours, projecting again in backward."""
    return Method(lambda inputs: _ours(fused_linear_divergence, inputs, shape, gradient="recompute"))


def forward_chunked(shape: BenchShape) -> Method:
    """The middle baseline."""
    return Method(lambda inputs: _ours(forward_chunked_divergence, inputs, shape))


def dense(shape: BenchShape) -> Method:
    """The baseline that holds the grid."""
    return Method(lambda inputs: _ours(dense_divergence, inputs, shape))


def _ours(function: Callable, inputs: BenchInputs, shape: BenchShape, **options: str) -> torch.Tensor:
    arguments = inputs.hidden, inputs.weight, inputs.teacher, inputs.token_weight
    return function(*arguments, strip_tokens=shape.strip, distinct=True, **options).total


def dense_compiled(shape: BenchShape) -> Method:
    """The formula as one would write it, given to torch.compile."""
    compiled = torch.compile(_sparse_kl_of_tensors)

    def loss(inputs: BenchInputs) -> torch.Tensor:
        return compiled(inputs.hidden, inputs.weight, *inputs.teacher, inputs.token_weight)

    note = "" if shape.dtype in ("float32", "float64") else f"rounds its logits to {shape.dtype}"
    return Method(loss, note=note)


def _sparse_kl_of_tensors(hidden, weight, ids, logprobs, log_tail, token_weight):
    return sparse_kl(BenchInputs(hidden, weight, TopK(ids, logprobs, log_tail), hidden, token_weight))


def load_method(name: str, shape: BenchShape) -> Method:
    """The method of a name in METHODS or of "module:function", made ready for a shape.

    Raises:
        ImportError: If it needs a library that is not there.
    """
    module, _, function = METHODS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), function)(shape)


def check_shape(shape: BenchShape) -> BenchShape:
    """The shape itself.

    Raises:
        LossArgumentError: If nothing can be measured on it.
    """
    for name in ("tokens", "hidden", "columns", "top_k"):
        require(getattr(shape, name) > 0, f"{name}: expected at least 1, found {getattr(shape, name)}.")
    require(
        shape.top_k < shape.columns,
        f"top_k: expected fewer than the {shape.columns:,} columns of a rank, found {shape.top_k:,}.",
    )
    cuda = torch.device(shape.device).type == "cuda"
    require(
        not cuda or torch.cuda.is_available(),
        f"device: expected a CUDA device for {shape.device!r}, found none; use --device cpu or --preset cpu.",
    )
    return shape
