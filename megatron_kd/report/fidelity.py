# SPDX-License-Identifier: Apache-2.0
"""How close a student is to its teacher, and how well it predicts text.

In: both models' logits over the whole vocabulary, some positions at a time, and the next tokens. Out: three figures:
the mean KL divergence to the teacher in nats, the share of positions whose most likely token is the teacher's, and the
perplexity. Sums are kept in fp64; the logits of one strip are all that is held.

Shapes: n positions, V vocabulary.
"""

from dataclasses import dataclass

import torch

NO_LABEL = -100  # torch's own ignore_index


@dataclass
class Fidelity:
    """Sums over the positions seen so far, and the figures that follow from them."""

    positions: int = 0
    kl_sum: float = 0.0
    agreements: int = 0
    labelled: int = 0
    nll_sum: float = 0.0

    def add(self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count n more positions.

        Args:
            student_logits: [n, V], any float type.
            teacher_logits: [n, V], over the same vocabulary.
            labels: [n] next tokens; `NO_LABEL` where the text ends, which the perplexity leaves out.
        """
        student, teacher = student_logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1)
        self.positions += len(labels)
        kl = torch.where(teacher.isneginf(), 0, teacher.exp() * (teacher - student))  # 0 log 0 = 0
        self.kl_sum += kl.sum(-1).sum(dtype=torch.float64).item()
        self.agreements += int((student_logits.argmax(-1) == teacher_logits.argmax(-1)).sum())
        has_label = labels != NO_LABEL
        self.labelled += int(has_label.sum())
        nll = -student[has_label].gather(-1, labels[has_label, None])
        self.nll_sum += nll.sum(dtype=torch.float64).item()

    @property
    def kl(self) -> float:
        """Mean over positions of KL(teacher || student) over the whole vocabulary, in nats."""
        return self.kl_sum / self.positions

    @property
    def agreement(self) -> float:
        """Share of positions at which both models' most likely token is the same."""
        return self.agreements / self.positions

    @property
    def perplexity(self) -> float:
        """exp of the student's mean negative log-likelihood of the next token."""
        return float(torch.tensor(self.nll_sum / self.labelled, dtype=torch.float64).exp())

    def figures(self) -> dict[str, float | int]:
        """The three figures and the number of positions, for a JSON file."""
        return {
            "kl": self.kl,
            "agreement": self.agreement,
            "perplexity": self.perplexity,
            "positions": self.positions,
        }
