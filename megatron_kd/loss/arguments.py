# SPDX-License-Identifier: Apache-2.0
"""What a caller hands to a loss and gets back, and the checks on it. No tensor is copied, no device waited for.

Legend: N tokens of the call, R rows of `hidden` on this rank (N, or N / TP under sequence parallelism), H hidden size,
K teacher entries, S positions, B samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_kd.loss.divergence import Divergence, find_divergence
from megatron_kd.loss.errors import require, require_on_device
from megatron_kd.loss.vocab_parallel import VocabShard

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOGITS_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
GRADIENT_MODES = ("forward", "recompute")
QUANTIZED_CLASSES = {"QuantizedTensor", "QuantizedTensorBase", "Float8Tensor", "MXFP8Tensor"}

STRIP_BYTES = 700 << 20
"""Budget of one strip of logits on one rank, in `compute_dtype`: of GPT-OSS's 201,088 columns 896 tokens at TP = 1,
7,296 at TP = 8. Larger strips add to the weight gradient less often: 8 bytes of traffic per weight and strip."""


class TopK(NamedTuple):
    """The teacher's distribution at the loss's temperature, per token.

    An entry with id -1 or log-probability -inf is absent (ragged K): its column belongs to the tail. An id that a row
    repeats counts once, with the sum of its probabilities; a caller whose rows cannot repeat one says so with
    `distinct`, which spares the search.
    """

    ids: torch.Tensor
    """[N, K] or [S, B, K], integer: columns of the real vocabulary."""
    logprobs: torch.Tensor
    """[N, K] or [S, B, K], float: natural logarithms."""
    log_tail: torch.Tensor
    """[N] or [S, B], float: log of the mass of all other columns; -inf where the entries hold all of it."""


class LossSums(NamedTuple):
    """Sums over the tokens of one call: 0-dim, float32 (float64 for float64 input). `total` alone has a gradient."""

    total: torch.Tensor
    """kd_weight * kd + ce_weight * ce."""
    kd: torch.Tensor
    """T^2 times the divergence, weighted by token_weight."""
    ce: torch.Tensor
    """Cross entropy at temperature 1, weighted by token_weight; 0 without labels."""
    weight: torch.Tensor
    """Sum of token_weight, for the caller to divide by."""


@dataclass(frozen=True)
class LossCall:
    """One checked call without its two matrices, the tensors flattened to rows."""

    teacher: TopK
    """[N, K], [N, K], [N]."""
    token_weight: torch.Tensor
    """[N]."""
    labels: torch.Tensor | None
    """[N]."""
    keep: torch.Tensor | None
    """[N] bool on the host, the same on every rank: tokens that are computed. None: all."""
    distinct: bool
    """Whether the caller vouches that no row of the teacher repeats an id."""
    divergence: Divergence
    kd_weight: float
    ce_weight: float
    temperature: float
    shard: VocabShard
    sequence_parallel: bool
    gradient: str
    strip_rows: int
    """Rows of `hidden` in a strip, the same on every rank."""
    logits_dtype: torch.dtype
    """As asked for, but not below the dtype of hidden."""
    compute_dtype: torch.dtype
    """float32, or float64 if asked for by the inputs or by logits_dtype."""

    @property
    def two_temperatures(self) -> bool:
        """Whether the cross entropy needs statistics of its own."""
        return self.labels is not None and self.temperature != 1

    @property
    def row_ranks(self) -> int:
        """Ranks over which the rows of hidden are split: TP under sequence parallelism, else 1."""
        return self.shard.world_size if self.sequence_parallel else 1


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopK,
    token_weight: torch.Tensor,
    *,
    divergence: str | Callable,
    labels: torch.Tensor | None,
    kd_weight: float,
    ce_weight: float,
    temperature: float,
    shard: VocabShard | None,
    sequence_parallel: bool,
    gradient: str,
    strip_tokens: int | None,
    logits_dtype: torch.dtype,
    keep: torch.Tensor | None = None,
    distinct: bool = False,
) -> LossCall:
    """Check the arguments of a loss against each other and flatten them.

    Raises:
        LossArgumentError: Names the argument, what was expected and what was found. What depends on values (a label or
            a teacher id outside the vocabulary) is raised at once on CPU and asserted on the device elsewhere.
    """
    require(
        not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()),
        "CUDA graph: expected none around the loss, found a stream that is capturing; a replay would repeat "
        "the strips and choices of the first batch. Leave the last layer's loss out of the graph.",
    )
    require(temperature > 0, f"temperature: expected > 0, found {temperature}.")
    require(gradient in GRADIENT_MODES, f"gradient: expected one of {GRADIENT_MODES}, found {gradient!r}.")
    require(logits_dtype in LOGITS_DTYPES, f"logits_dtype: expected one of {LOGITS_DTYPES}, found {logits_dtype}.")
    require(strip_tokens is None or strip_tokens > 0, f"strip_tokens: expected > 0 or None, found {strip_tokens}.")
    require(
        labels is not None or not ce_weight,
        f"labels: expected the next tokens, since ce_weight is {ce_weight}; found None.",
    )
    _check_matrices(hidden, weight)
    shard = _check_shard(shard, weight, sequence_parallel)
    ranks = shard.world_size if sequence_parallel else 1
    leading = (hidden.shape[0] * ranks, *hidden.shape[1:-1])
    teacher = _check_teacher(teacher, leading, hidden.device)
    _check_rows("token_weight", token_weight, leading, hidden.device)
    token_weight = token_weight.reshape(-1)
    if labels is not None:
        _check_rows("labels", labels, leading, hidden.device, integer=True)
        labels = labels.reshape(-1)
    _check_values(teacher.ids, labels, token_weight, shard.total)
    if keep is not None:
        _check_rows("keep", keep, leading, torch.device("cpu"))
        require(keep.dtype == torch.bool, f"keep: expected torch.bool, found {keep.dtype}.")
        keep = keep.reshape(-1)
        left_out = ~keep.to(hidden.device, non_blocking=True)
        require_on_device(
            (token_weight.masked_fill(~left_out, 0) == 0).all(),
            "keep: expected True for every token with weight, found one left out.",
        )
    compute_dtype = torch.promote_types(torch.promote_types(hidden.dtype, logits_dtype), torch.float32)
    strip_tokens = strip_tokens or default_strip_tokens(shard, compute_dtype)
    return LossCall(
        teacher=teacher,
        token_weight=token_weight,
        labels=labels,
        keep=keep,
        distinct=distinct,
        divergence=find_divergence(divergence),
        kd_weight=float(kd_weight),
        ce_weight=float(ce_weight),
        temperature=float(temperature),
        shard=shard,
        sequence_parallel=sequence_parallel,
        gradient=gradient,
        strip_rows=-(-strip_tokens // ranks),
        logits_dtype=torch.promote_types(hidden.dtype, logits_dtype),
        compute_dtype=compute_dtype,
    )


def default_strip_tokens(shard: VocabShard, dtype: torch.dtype) -> int:
    """Tokens whose logits on one rank fit STRIP_BYTES, rounded down to 128: STRIP_BYTES / (bytes * total / TP).

    It uses what all ranks share, not the rank's own columns, so that all ranks walk the same strips.
    """
    columns = -(-shard.total // shard.world_size)
    return max(128, STRIP_BYTES // (dtype.itemsize * columns) // 128 * 128)


def _check_matrices(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    require(hidden.dim() in (2, 3), f"hidden: expected [N, H] or [S, B, H], found {list(hidden.shape)}.")
    require(
        weight.dim() == 2 and weight.shape[1] == hidden.shape[-1],
        f"weight: expected [columns, {hidden.shape[-1]}] for hidden {list(hidden.shape)}, found {list(weight.shape)}.",
    )
    quantized = any(base.__name__ in QUANTIZED_CLASSES for base in type(weight).__mro__)
    require(
        not quantized and hidden.dtype in FLOATS,
        f"weight: expected an ordinary tensor of {FLOATS}, found {type(weight).__name__} of {weight.dtype}; "
        "keep the output layer out of FP8.",
    )
    require(
        weight.dtype == hidden.dtype, f"weight: expected the dtype of hidden, {hidden.dtype}, found {weight.dtype}."
    )
    require(
        weight.device == hidden.device, f"weight: expected on {hidden.device} like hidden, found on {weight.device}."
    )


def _check_shard(shard: VocabShard | None, weight: torch.Tensor, sequence_parallel: bool) -> VocabShard:
    if shard is None:
        require(not sequence_parallel, "shard: expected one with a group under sequence_parallel, found None.")
        return VocabShard(0, weight.shape[0], weight.shape[0])
    require(
        shard.size == weight.shape[0],
        f"shard.size: expected the {weight.shape[0]} rows of weight on this rank, found {shard.size}.",
    )
    require(shard.start >= 0, f"shard.start: expected >= 0, found {shard.start}.")
    require(shard.total > 0, f"shard.total: expected the real vocabulary size, found {shard.total}.")
    alone = shard.world_size == 1
    require(
        not alone or (shard.start == 0 and shard.size >= shard.total),
        f"shard: expected all {shard.total} columns on a single rank, found {shard.size} from {shard.start}; "
        "give the tensor-parallel group.",
    )
    return shard


def _check_teacher(teacher: TopK, leading: tuple[int, ...], device: torch.device) -> TopK:
    ids, logprobs, log_tail = teacher
    require(ids.dim() > 0 and ids.shape[-1] > 0, f"teacher.ids: expected K >= 1 entries, found {list(ids.shape)}.")
    columns = ids.shape[-1]
    _check_rows("teacher.ids", ids, (*leading, columns), device, integer=True)
    _check_rows("teacher.logprobs", logprobs, (*leading, columns), device, integer=False)
    _check_rows("teacher.log_tail", log_tail, leading, device, integer=False)
    return TopK(ids.reshape(-1, columns), logprobs.reshape(-1, columns), log_tail.reshape(-1))


def _check_rows(
    name: str, rows: torch.Tensor, shape: tuple[int, ...], device: torch.device, integer: bool | None = None
) -> None:
    require(
        tuple(rows.shape) == tuple(shape),
        f"{name}: expected shape {list(shape)} (the whole sequence, also under sequence parallelism), "
        f"found {list(rows.shape)}.",
    )
    require(rows.device == device, f"{name}: expected on {device}, found on {rows.device}.")
    kind = "an integer" if integer else "a float"
    found = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    require(integer is None or found == integer, f"{name}: expected {kind} dtype, found {rows.dtype}.")


def _check_values(ids: torch.Tensor, labels: torch.Tensor | None, token_weight: torch.Tensor, total: int) -> None:
    masked = token_weight == 0
    require_on_device(
        ((ids < total).all(-1) | masked).all(),
        f"teacher.ids: expected below the real vocabulary, {total}, found a larger one on a token with weight; "
        "was the cache built with another vocabulary?",
    )
    if labels is not None:
        require_on_device(
            (((labels >= 0) & (labels < total)) | masked).all(),
            f"labels: expected within [0, {total}) on tokens with weight, found another value; "
            "give ignored tokens (such as -100) the token_weight 0.",
        )
