# SPDX-License-Identifier: Apache-2.0
"""What the row kernels and their eager twins make of given rows, in a process of its own; and the truth in float64.

Triton decides at its first import whether kernels run on a GPU or in its CPU interpreter, so pytest's own process
cannot do both.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from megatron_kd.loss import fused_linear_divergence, row_kernels
from megatron_kd.loss.row_kernels import RowGradient
from tests.loss.checks import run
from tests.loss.oracle import Truth, make_case, oracle, poison_masked, ragged

DTYPES = (torch.float32, torch.bfloat16)
KERNELS = ("triton", "eager")
MARK = 12345.0
"""Stands in the padding of each row of logits."""


@dataclass
class Rows:
    """Arguments of both passes. Row 0 is a masked token; the last has an entry or label with nearly all the mass."""

    name: str
    buffer: torch.Tensor
    """[n, V + padding]."""
    V: int
    columns: torch.Tensor
    label_column: torch.Tensor | None
    gradient: RowGradient
    temperature: float

    def logits(self, device="cpu"):
        """A fresh copy of the buffer, and the logits in it."""
        buffer = self.buffer.clone().to(device)
        return buffer, buffer[:, : self.V]


@dataclass
class Passes:
    """What came out for one Rows."""

    owned: torch.Tensor
    tails: torch.Tensor
    after_statistics: torch.Tensor
    """The whole buffer."""
    grads: dict[tuple[torch.dtype, bool], torch.Tensor]
    """By dtype, and by whether the statistics had taken the entries before."""
    paddings: list[torch.Tensor]
    same_memory: bool


@dataclass
class Call:
    """One call of the whole loss, with kernels by name, beside its truth."""

    name: str
    found: dict[str, Truth]
    truth: Truth


SHAPES = {
    "two tiles and a rest": {"n": 5, "V": 5001, "K": 7},
    "whole tiles": {"n": 3, "V": 4096, "K": 100, "padding": 0},
    "K over one look-up": {"n": 4, "V": 300, "K": 200},
    "K = V, no tail": {"n": 3, "V": 37, "K": 37, "absent": 0.0},
    "K = 1, one token": {"n": 1, "V": 130, "K": 1, "absent": 0.0},
    "one column": {"n": 3, "V": 1, "K": 1},
    "nothing here": {"n": 3, "V": 50, "K": 4, "absent": 1.0},
    "logits of 1e4": {"n": 4, "V": 2100, "K": 20, "spread": 1e4},
}
PARTS = {  # label, its gradient, temperature: whatever a loss asks for
    "plain": (False, False, 1.0),
    "plain, T = 2": (False, False, 2.0),
    "label": (True, True, 1.0),
    "label, T = 2": (True, True, 2.0),
    "label without gradient, T = 2": (True, False, 2.0),
}


def all_rows():
    """Every shape with everything a loss asks for."""
    for (shape, sizes), (parts, (label, with_gradient, T)) in product(SHAPES.items(), PARTS.items()):
        yield make_rows(f"{shape}: {parts}", label=label, with_gradient=with_gradient, temperature=T, **sizes)


def make_rows(name, *, n, V, K, label, with_gradient, temperature, absent=0.3, spread=3.0, padding=7):
    """Random logits; distinct columns, some absent; labels among them, elsewhere, and on another rank."""
    random = torch.Generator().manual_seed(n * V + K)
    buffer = torch.full((n, V + padding), MARK)
    z = spread * (2 * torch.rand(n, V, generator=random) - 1)
    columns = torch.rand(n, V, generator=random).argsort(1)[:, :K].contiguous()
    free = torch.rand(n, V, generator=random).scatter(1, columns, -1.0).argmax(1)
    columns[torch.rand(n, K, generator=random) < absent] = -1
    labels = torch.where(torch.arange(n) % 2 == 0, columns[:, K // 2], free)
    labels[n // 2] = -1
    if n > 1:
        z[-1, free[-1]] += 20
        labels[-1] = free[-1]
        z[0], columns[0], labels[0] = 0, -1, -1
    buffer[:, :V] = z
    factor, ce = torch.randn(2, n, generator=random)
    factor[0], ce[0] = (0, 0) if n > 1 else (1, 1)
    log_tail = torch.stack([rest.logsumexp(0) for rest in tails_of(z / temperature, columns)])
    gradient = RowGradient(factor, log_tail.float(), torch.randn(n, K, generator=random))
    if with_gradient and temperature == 1:
        gradient = gradient._replace(label=-factor)
    elif with_gradient:
        gradient = gradient._replace(label=-ce, ce=ce, log_total=z.double().logsumexp(1).float())
    return Rows(name, buffer, V, columns, labels if label else None, gradient, temperature)


def tails_of(z, columns):
    """The tail of each row in float64, one vector a row."""
    for row, entries in zip(z.double(), columns.tolist(), strict=True):
        yield row[[v not in entries for v in range(len(row))]]


def statistics_by_definition(rows):
    """owned, log-sum-exps of the tail [n, 2] at T and at 1, and the buffer afterwards; float64, row by row."""
    z, T = rows.buffer[:, : rows.V], rows.temperature
    after = rows.buffer.clone()
    owned = []
    for r, columns in enumerate(rows.columns.tolist()):
        wanted = columns + ([] if rows.label_column is None else [int(rows.label_column[r])])
        owned.append([float(z[r, c]) if c >= 0 else 0.0 for c in wanted])
        after[r, [c for c in columns if c >= 0]] = -torch.inf
    tails = [[(rest / T).logsumexp(0), rest.logsumexp(0)] for rest in tails_of(z, rows.columns)]
    return torch.tensor(owned, dtype=torch.float64), torch.tensor(tails, dtype=torch.float64), after


def gradient_by_definition(rows):
    """The gradient [n, V] in float64, and the sum of the absolute values of what each of its numbers is made of."""
    grads, sizes = [], []
    for r, columns in enumerate(rows.columns.tolist()):
        part = RowGradient(*(None if field is None else field[r].double() for field in rows.gradient))
        z = rows.buffer[r, : rows.V].double()
        terms = [part.tail * (z / rows.temperature - part.log_tail).exp()]
        if part.ce is not None:
            terms.append(part.ce * (z - part.log_total).exp())
        label = -1 if part.label is None else int(rows.label_column[r])
        if label >= 0:
            terms.append(torch.zeros_like(z))
            terms[-1][label] = part.label
        for k, column in enumerate(columns):
            if column >= 0:
                for term in terms:
                    term[column] = 0
                terms[0][column] = part.entries[k]
        grads.append(sum(terms))
        sizes.append(sum(term.abs() for term in terms))
    return torch.stack(grads), torch.stack(sizes)


def both_passes(rows, device):
    """Run statistics and gradient with the kernels chosen at the moment."""

    def there(part):
        return None if part is None else part.to(device)

    columns, label, T = there(rows.columns), there(rows.label_column), rows.temperature
    coefficients = RowGradient(*map(there, rows.gradient))
    coefficients = coefficients._replace(entries=coefficients.entries.T.contiguous().T)  # as autograd may leave it
    columns = columns.T.contiguous().T
    after, logits = rows.logits(device)
    owned, tails = row_kernels.row_statistics(logits, columns, label, T, at_one=label is not None and T != 1)
    grads, paddings, same_memory = {}, [], True
    for dtype, taken in product(DTYPES, (False, True)):
        buffer, logits = rows.logits(device)
        if taken:
            row_kernels.row_statistics(logits, columns, label, T, at_one=False)
        grad = row_kernels.row_gradient_(logits, columns, label, coefficients, T, dtype)
        grads[dtype, taken] = grad.cpu()
        paddings.append(buffer[:, rows.V :].cpu())
        step = buffer.stride(0) * (buffer.itemsize // dtype.itemsize)
        same_memory &= grad.data_ptr() == buffer.data_ptr() and grad.stride() == (step, 1) and grad.dtype == dtype
    return Passes(owned.cpu(), tails.cpu(), after.cpu(), grads, paddings, same_memory)


def calls(device):
    """Whole losses: labels, masked tokens full of rubbish, ragged K, NaN in the padding."""
    for mode, T, ce_weight, name in product(("forward", "recompute"), (1.0, 2.0), (0.0, 0.5), ("forward_kl", "jsd")):
        for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
            case = poison_masked(ragged(make_case(tokens=7, total=507, padded=512, k=20, temperature=T, dtype=dtype)))
            truth = oracle(case, name, ce_weight=ce_weight)
            case.hidden, case.weight = case.hidden.to(device), case.weight.to(device)
            case.token_weight, case.labels = case.token_weight.to(device), case.labels.to(device)
            case.teacher = case.teacher._make(part.to(device) for part in case.teacher)
            function = partial(fused_linear_divergence, strip_tokens=3, gradient=mode)
            found = {}
            for kernels in KERNELS:
                row_kernels.set_kernels(kernels)
                result = run(function, case, name, ce_weight=ce_weight)
                found[kernels] = Truth(**{key: part.cpu() for key, part in vars(result).items()})
            yield Call(f"{mode}, T = {T}, ce {ce_weight}, {name}, {dtype}", found, truth)


def in_own_process(device):
    """{kernels: [Passes]} for all_rows(), and the calls."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "results"
        environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
        command = [sys.executable, "-m", "tests.loss.kernel_cases", device, str(file)]
        subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).parents[2], env=environment)
        return pickle.loads(file.read_bytes())


def main(device, file):
    """What in_own_process starts."""
    passes = {}
    for kernels in KERNELS:
        row_kernels.set_kernels(kernels)
        passes[kernels] = [both_passes(rows, device) for rows in all_rows()]
    Path(file).write_bytes(pickle.dumps((passes, list(calls(device)))))


if __name__ == "__main__":
    from tests.loss import kernel_cases  # its classes are pickled under that name

    kernel_cases.main(*sys.argv[1:])
