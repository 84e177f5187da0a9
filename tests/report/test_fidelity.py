# SPDX-License-Identifier: Apache-2.0
"""Fidelity against its definition in fp64 numpy."""

import math

import numpy as np
import pytest
import torch

from megatron_kd.report.fidelity import NO_LABEL, Fidelity


def definition(student: np.ndarray, teacher: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """KL, agreement and perplexity, one position after the other, from probabilities."""
    kl, same, nll = [], [], []
    for s, t, label in zip(student.astype(np.float64), teacher.astype(np.float64), labels, strict=True):
        q, p = (np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in (s, t))
        kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        same.append(np.argmax(s) == np.argmax(t))
        if label >= 0:
            nll.append(-math.log(q[label]))
    return {"kl": np.mean(kl), "agreement": np.mean(same), "perplexity": math.exp(np.mean(nll))}


def logits(seed: int, rows: int = 23, vocabulary: int = 101) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_figures_equal_their_definition_however_the_positions_are_cut():
    student, teacher = logits(0), logits(0) + logits(1) / 2
    labels = torch.randint(101, (23,), generator=torch.Generator().manual_seed(2))
    labels[[4, 22]] = NO_LABEL
    expected = definition(student.numpy(), teacher.numpy(), labels.numpy())
    assert 0.2 < expected["agreement"] < 1
    for strip in (1, 5, 23):
        fidelity = Fidelity()
        for rows in torch.arange(23).split(strip):
            fidelity.add(student[rows], teacher[rows], labels[rows])
        figures = fidelity.figures()
        assert figures.pop("positions") == 23
        assert figures == pytest.approx(expected, rel=1e-6)


def test_a_model_compared_with_itself():
    fidelity, same = Fidelity(), logits(3)
    fidelity.add(same, same, torch.zeros(23, dtype=torch.long))
    assert fidelity.kl == 0
    assert fidelity.agreement == 1


def test_a_uniform_student_has_the_vocabulary_as_its_perplexity():
    fidelity = Fidelity()
    fidelity.add(torch.zeros(4, 50), logits(5, 4, 50), torch.tensor([0, 1, 2, NO_LABEL]))
    assert fidelity.perplexity == pytest.approx(50, rel=1e-6)


def test_a_token_the_teacher_excludes_costs_nothing():
    student, teacher = logits(6), logits(7)
    teacher[:, 3] = -torch.inf
    fidelity = Fidelity()
    fidelity.add(student, teacher, torch.zeros(23, dtype=torch.long))
    q, p = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    kept = [column for column in range(101) if column != 3]
    expected = (p[:, kept].exp() * (p[:, kept] - q[:, kept])).sum(-1).mean().item()
    assert fidelity.kl == pytest.approx(expected, rel=1e-6)
