# SPDX-License-Identifier: Apache-2.0
"""A teacher must predict its own corpus better than chance before a single row is stored.

In: a loaded teacher and the units. Out: its mean loss on a sample of them, or `ImplausibleTeacher`. Costs a forward
pass over at most 16 units of at most 512 tokens. Catches what loads without complaint: zero, transposed or shuffled
weights, the wrong tokenizer.
"""

import math

import numpy as np

from megatron_kd.cache.corpus import UnitSource
from megatron_kd.cache.errors import IdentityMismatch
from megatron_kd.cache.manifest import differences
from megatron_kd.teacher.errors import ImplausibleTeacher
from megatron_kd.teacher.protocol import Teacher

_UNITS, _TOKENS = 16, 512
_LARGEST_SHARE = 0.9


def check_teacher(teacher: Teacher, units: UnitSource, *, accept_loss: bool = False) -> float:
    """Refuse a teacher that cannot be the corpus's.

    Args:
        teacher: the teacher.
        units: what it would annotate.
        accept_loss: go on although it predicts no better than chance.

    Returns:
        Mean loss in nats over the sample.

    Raises:
        ImplausibleTeacher: weights all zero; always the same prediction; loss at or above 0.9 ln(vocabulary).
        IdentityMismatch: the corpus was made with another tokenizer.
    """
    made_with = units.identity().get("tokenizer")
    if made_with and teacher.tokenizer and (wrong := differences(teacher.tokenizer, made_with, "tokenizer")):
        lines = "\n".join(
            f"  {name}: the teacher has {found!r}, the corpus {wanted!r}" for name, found, wanted in wrong
        )
        raise IdentityMismatch(f"the corpus was made with another tokenizer than {teacher.name} has:\n{lines}")
    _check_weights(teacher)
    loss, top_ids, count = _sample_loss(teacher, units)
    if accept_loss or not count:
        return loss
    remedy = (
        "Check the checkpoint and that the corpus has the teacher's tokenizer; --accept-teacher-loss builds anyway"
    )
    if count >= 32 and len(top_ids) == 1:
        raise ImplausibleTeacher(
            f"{teacher.name} predicts token {top_ids.pop()} at each of {count} positions. {remedy}"
        )
    chance = math.log(teacher.vocab_real)
    if not loss < _LARGEST_SHARE * chance:
        raise ImplausibleTeacher(
            f"{teacher.name} has a loss of {loss:.2f} nats on the corpus; guessing among {teacher.vocab_real} ids "
            f"gives {chance:.2f}, and less than {_LARGEST_SHARE * chance:.2f} is expected. {remedy}"
        )
    return loss


def _check_weights(teacher: Teacher) -> None:
    for name, parameter in teacher.named_parameters():
        if parameter.ndim > 1 and "bias" not in name and not parameter.any():
            raise ImplausibleTeacher(
                f"{teacher.name}: all of {name} is zero: the checkpoint is damaged or was converted wrongly"
            )


def _sample_loss(teacher: Teacher, units: UnitSource) -> tuple[float, set[int], int]:
    """Mean loss over units spread over the corpus, the ids predicted as most likely, the number of predictions."""
    useful = np.flatnonzero(units.lengths > 1)
    chosen = useful[np.linspace(0, len(useful) - 1, min(_UNITS, len(useful))).astype(int)] if len(useful) else useful
    total, count, top_ids = 0.0, 0, set()
    for unit in chosen:
        limit = min(_TOKENS, teacher.max_context or _TOKENS) + 1
        tokens = units.tokens(int(unit))[:limit].astype(np.int64)
        if tokens.max() >= teacher.vocab_real or tokens.min() < 0:
            raise IdentityMismatch(
                f"{units.kind} {unit} has token id {tokens.max()}, {teacher.name} knows ids below "
                f"{teacher.vocab_real}: the corpus was made with another tokenizer"
            )
        rows = teacher.rows([tokens[:-1]], top_k=1, labels=[tokens[1:]])
        total -= float(rows.label_logprobs.double().sum())
        count += len(tokens) - 1
        top_ids.update(rows.ids[:, 0].tolist())
    return (total / count if count else math.nan), top_ids, count
