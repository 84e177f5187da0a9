# SPDX-License-Identifier: Apache-2.0
"""The two passes of row_kernels.py as Triton kernels, one program a row, each reading the row once.

In: float32 logits z [n, V] in rows of any distance. Arguments and results: those of row_statistics and row_gradient_
there, whose eager forms say in torch what the kernels compute.

Cost in bytes of memory a logit: statistics 4 read; gradient 4 read, and 2 (bf16) or 4 (float32) written. Entries add
2 * K sectors of 32 bytes a row, 0.8 % of a row of 201,088 at K = 100. Memory is the limit, not arithmetic: at 4.3 TB/s
an H200 hands the statistics 1.1e12 logits a second, with 1.25 exponentials each, 2.5 at two temperatures, and its 132
SMs do 16 a cycle each, 3.6e12 a second. Nothing waits for the host, and no atomic makes two runs differ.

How a bf16 row may be written over its own float32 row. Tile i is the columns [i B, (i + 1) B): it is read from bytes
[4 i B, 4 (i + 1) B) and written to bytes [2 i B, 2 (i + 1) B) of the row. What is written ends at 2 (i + 1) B <=
4 (i + 1) B, which is where the reads of tiles 0 ... i end, so no unread logit is lost, provided all threads of the
program have read tile i before one writes it. That is the barrier between load and store; the same barrier keeps a
fast warp, which can be one store ahead but not past the next barrier, from overtaking a slow one's loads. Programs do
not meet: each stays within its row. Entries and label are computed in float32 and stored once, after the dense pass
and behind a barrier, over whatever it left there.

Sizes: with 4 warps a tile of 2,048 logits is 16 a thread, loaded 16 bytes at a time, 8 KiB in flight a program. That
leaves room for at least 8 programs on an SM, so that 1,056 rows of a strip are on 132 SMs at once, with 64 KiB in
flight on each, where 4.3 TB/s at a latency of 0.7 us need 23. `python -m megatron_kd.loss.compile_kernels` prints
registers and spills. All this is arithmetic; times are for the bench.

Legend: n tokens of a strip, V real columns of this rank, K teacher entries.
"""

import torch
import triton
import triton.language as tl

STATISTICS = {"ENTRIES": 128, "LANES": 512, "DEPTH": 4, "num_warps": 4}
"""Entries looked up at a time; a tile is DEPTH logits for each of LANES running maxima and sums."""
GRADIENT = {"ENTRIES": 128, "TILE": 2048, "num_warps": 4}


@triton.jit
def row_statistics_kernel(
    logits,
    columns,
    label_column,
    owned,
    log_sums,
    logits_stride,
    V,
    K,
    inverse_temperature,
    HAS_LABEL: tl.constexpr,
    AT_ONE: tl.constexpr,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """owned [n, K + HAS_LABEL] and log_sums [n, 1 + AT_ONE] of logits [n, V], which get -inf at columns [n, K]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    columns += row * K
    owned += row * (K + HAS_LABEL)
    if HAS_LABEL:
        label_at = tl.load(label_column + row)
        tl.store(owned + K, tl.load(logits + label_at, mask=label_at >= 0, other=0.0))
    for start in range(0, K, ENTRIES):
        k = start + tl.arange(0, ENTRIES)
        column = tl.load(columns + k, mask=k < K, other=-1)
        tl.store(owned + k, tl.load(logits + column, mask=column >= 0, other=0.0), mask=k < K)
        tl.debug_barrier()  # another thread may read the same logit, as an entry or as the label
        tl.store(logits + column, float("-inf"), mask=column >= 0)
    tl.debug_barrier()

    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    total_at_one = tl.zeros([LANES], tl.float32)
    offsets = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = V // (LANES * DEPTH) * (LANES * DEPTH)
    for start in range(0, whole, LANES * DEPTH):  # without a mask, a load is 16 bytes a thread whatever V is
        z = tl.load(logits + start + offsets)
        peak, total, total_at_one = _take_in(z, peak, total, total_at_one, inverse_temperature, AT_ONE)
    if whole < V:
        z = tl.load(logits + whole + offsets, mask=whole + offsets < V, other=float("-inf"))
        peak, total, total_at_one = _take_in(z, peak, total, total_at_one, inverse_temperature, AT_ONE)

    top = _finite(tl.max(peak, 0))
    log_sums += row * (1 + AT_ONE)
    total = tl.sum(total * tl.exp((peak - top) * inverse_temperature), 0)
    tl.store(log_sums, top * inverse_temperature + tl.log(total))
    if AT_ONE:
        tl.store(log_sums + 1, top + tl.log(tl.sum(total_at_one * tl.exp(peak - top), 0)))


@triton.jit
def _take_in(z, peak, total, total_at_one, inverse_temperature, AT_ONE: tl.constexpr):
    """Online log-sum-exp: 1 + 1 / DEPTH exponentials a logit and temperature, as z / T and z share their maximum."""
    new = tl.maximum(peak, tl.max(z, 0))
    shift = _finite(new)
    total = total * tl.exp((peak - shift) * inverse_temperature)
    total += tl.sum(tl.exp((z - shift[None, :]) * inverse_temperature), 0)
    if AT_ONE:
        total_at_one = total_at_one * tl.exp(peak - shift) + tl.sum(tl.exp(z - shift[None, :]), 0)
    return new, total, total_at_one


@triton.jit
def _finite(shift):
    """A maximum or log-sum-exp of nothing, -inf, cannot be subtracted; with 0 in its place exp(-inf - 0) is 0."""
    return tl.where(shift == float("-inf"), 0.0, shift)


@triton.jit
def row_gradient_kernel(
    logits,
    grad,
    columns,
    label_column,
    entries,
    coefficients,
    logits_stride,
    grad_stride,
    V,
    K,
    inverse_temperature,
    HAS_LABEL: tl.constexpr,
    HAS_CE: tl.constexpr,
    NARROW: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """grad [n, V], over the memory of logits [n, V].

    Coefficients [n, 2 + HAS_LABEL + 2 * HAS_CE] are those of RowGradient: tail, log_tail, label, ce, log_total.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    grad += row * grad_stride
    columns += row * K
    entries += row * K
    coefficients += row * (2 + HAS_LABEL + 2 * HAS_CE)
    tail = tl.load(coefficients)
    shift = _finite(tl.load(coefficients + 1))
    ce = 0.0
    log_total = 0.0
    if HAS_CE:
        ce = tl.load(coefficients + 2 + HAS_LABEL)
        log_total = tl.load(coefficients + 3 + HAS_LABEL)
    if HAS_LABEL:
        label_at = tl.load(label_column + row)
        label = tl.load(logits + label_at, mask=label_at >= 0, other=float("-inf"))
        label = _dense(label, tail, shift, ce, log_total, inverse_temperature, HAS_CE) + tl.load(coefficients + 2)
        tl.debug_barrier()

    offsets = tl.arange(0, TILE)
    whole = V // TILE * TILE
    for start in range(0, whole, TILE):
        z = tl.load(logits + start + offsets)
        if NARROW:
            tl.debug_barrier()
        value = _dense(z, tail, shift, ce, log_total, inverse_temperature, HAS_CE)
        tl.store(grad + start + offsets, value.to(grad.dtype.element_ty))
    if whole < V:
        there = whole + offsets < V
        z = tl.load(logits + whole + offsets, mask=there, other=float("-inf"))
        if NARROW:
            tl.debug_barrier()
        value = _dense(z, tail, shift, ce, log_total, inverse_temperature, HAS_CE)
        tl.store(grad + whole + offsets, value.to(grad.dtype.element_ty), mask=there)

    tl.debug_barrier()
    if HAS_LABEL:
        tl.store(grad + label_at, label.to(grad.dtype.element_ty), mask=label_at >= 0)
        tl.debug_barrier()  # so that an entry that is the label has the last word
    for start in range(0, K, ENTRIES):
        k = start + tl.arange(0, ENTRIES)
        column = tl.load(columns + k, mask=k < K, other=-1)
        entry = tl.load(entries + k, mask=k < K, other=0.0)
        tl.store(grad + column, entry.to(grad.dtype.element_ty), mask=column >= 0)


@triton.jit
def _dense(z, tail, shift, ce, log_total, inverse_temperature, HAS_CE: tl.constexpr):
    value = tail * tl.exp(z * inverse_temperature - shift)
    if HAS_CE:
        value += ce * tl.exp(z - log_total)
    return value


INTERPRETED = not isinstance(row_statistics_kernel, triton.JITFunction)
"""Whether Triton was imported under TRITON_INTERPRET=1, so that the kernels run on CPU, in numpy."""


# As operators of torch, so that fake tensors and torch.compile know what they make without a look inside.
torch.library.define(
    "megatron_kd::row_statistics",
    "(Tensor(a!) logits, Tensor columns, Tensor? label_column, float temperature, bool at_one) -> (Tensor, Tensor)",
)
torch.library.define(
    "megatron_kd::row_gradient",
    "(Tensor(a!) logits, Tensor columns, Tensor? label_column, Tensor tail, Tensor log_tail, Tensor entries, "
    "Tensor? label, Tensor? ce, Tensor? log_total, float temperature, ScalarType dtype) -> ()",
)
row_statistics = torch.ops.megatron_kd.row_statistics
"""row_kernels.row_statistics for at least one float32 logit."""
row_gradient = torch.ops.megatron_kd.row_gradient
"""row_kernels.row_gradient_ likewise, with the fields of RowGradient one by one."""


@torch.library.register_fake("megatron_kd::row_statistics")
def _empty_statistics(logits, columns, label_column, temperature, at_one):
    owned = logits.new_empty(logits.shape[0], columns.shape[1] + (label_column is not None))
    return owned, logits.new_empty(logits.shape[0], 1 + at_one)


@torch.library.impl("megatron_kd::row_statistics", "default")
def _launch_statistics(logits, columns, label_column, temperature, at_one):
    owned, log_sums = _empty_statistics(logits, columns, label_column, temperature, at_one)
    if label_column is not None:
        label_column = label_column.contiguous()
    row_statistics_kernel[(len(logits),)](
        logits,
        columns.contiguous(),
        label_column,
        owned,
        log_sums,
        logits.stride(0),
        logits.shape[1],
        columns.shape[1],
        1 / temperature,
        HAS_LABEL=label_column is not None,
        AT_ONE=at_one,
        **STATISTICS,
    )
    return owned, log_sums


@torch.library.register_fake("megatron_kd::row_gradient")
def _nothing(*arguments):
    return None


@torch.library.impl("megatron_kd::row_gradient", "default")
def _launch_gradient(logits, columns, label_column, tail, log_tail, entries, label, ce, log_total, temperature, dtype):
    grad = logits.view(dtype)
    coefficients = [part for part in (tail, log_tail, label, ce, log_total) if part is not None]
    row_gradient_kernel[(len(logits),)](
        logits,
        grad,
        columns.contiguous(),
        None if label is None else label_column.contiguous(),
        entries.contiguous(),
        torch.stack(coefficients, dim=1),
        logits.stride(0),
        grad.stride(0),
        logits.shape[1],
        columns.shape[1],
        1 / temperature,
        HAS_LABEL=label is not None,
        HAS_CE=ce is not None,
        NARROW=dtype != logits.dtype,
        **GRADIENT,
    )
