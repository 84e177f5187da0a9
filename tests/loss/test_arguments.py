# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments are refused with what was expected and what was found."""

import pytest
import torch

from megatron_kd.loss import (
    LossArgumentError,
    TopK,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear_divergence,
)
from tests.loss.oracle import make_case

CASE = make_case(dtype=torch.float32)
IDS, LOGPROBS, LOG_TAIL = CASE.teacher
GOOD = {
    "hidden": CASE.hidden,
    "weight": CASE.weight,
    "teacher": CASE.teacher,
    "token_weight": CASE.token_weight,
    "labels": CASE.labels,
    "shard": VocabShard(0, 40, 37),
}


class Float8Tensor(torch.Tensor):
    """Stands for Transformer Engine's quantised weight, which calls itself bfloat16."""


def with_label(value):
    labels = CASE.labels.clone()
    labels[0] = value
    return labels


def with_id(value):
    ids = IDS.clone()
    ids[0, 0] = value
    return CASE.teacher._replace(ids=ids)


BAD = {
    "hidden of one axis": ({"hidden": torch.zeros(8)}, r"hidden: expected \[N, H\] or \[S, B, H\], found \[8\]"),
    "hidden of other width": ({"weight": torch.zeros(40, 9)}, r"weight: expected \[columns, 8\].*found \[40, 9\]"),
    "other dtype": (
        {"weight": CASE.weight.double()},
        "expected the dtype of hidden, torch.float32, found torch.float64",
    ),
    "integer matrices": (
        {"hidden": torch.zeros(13, 8, dtype=torch.int), "weight": torch.zeros(40, 8, dtype=torch.int)},
        "expected an ordinary tensor",
    ),
    "fp8 head": (
        {"weight": CASE.weight.as_subclass(Float8Tensor)},
        "found Float8Tensor.*keep the output layer out of FP8",
    ),
    "another device": ({"weight": CASE.weight.to("meta")}, "weight: expected on cpu like hidden, found on meta"),
    "rows of teacher": (
        {"teacher": TopK(IDS[:12], LOGPROBS[:12], LOG_TAIL[:12])},
        r"teacher.ids: expected shape \[13, 5\].*found \[12, 5\]",
    ),
    "K of logprobs": (
        {"teacher": TopK(IDS, LOGPROBS[:, :4], LOG_TAIL)},
        r"teacher.logprobs: expected.*found \[13, 4\]",
    ),
    "K of 0": ({"teacher": TopK(IDS[:, :0], LOGPROBS[:, :0], LOG_TAIL)}, "expected K >= 1"),
    "tail with an axis": ({"teacher": TopK(IDS, LOGPROBS, LOG_TAIL[:, None])}, "teacher.log_tail: expected shape"),
    "float ids": ({"teacher": TopK(IDS.float(), LOGPROBS, LOG_TAIL)}, "teacher.ids: expected an integer dtype"),
    "integer logprobs": ({"teacher": TopK(IDS, IDS, LOG_TAIL)}, "teacher.logprobs: expected a float dtype"),
    "id beyond the vocabulary": ({"teacher": with_id(37)}, "teacher.ids: expected below the real vocabulary, 37"),
    "token weights": ({"token_weight": CASE.token_weight[:12]}, "token_weight: expected shape"),
    "no labels": ({"labels": None, "ce_weight": 0.5}, "labels: expected the next tokens, since ce_weight is 0.5"),
    "rows of labels": ({"labels": CASE.labels[:12]}, "labels: expected shape"),
    "label in the padding": ({"labels": with_label(37)}, r"labels: expected within \[0, 37\) on tokens with weight"),
    "ignored label with weight": ({"labels": with_label(-100)}, r"labels: .*token_weight 0"),
    "temperature": ({"temperature": 0.0}, "temperature: expected > 0, found 0.0"),
    "gradient": ({"gradient": "backward"}, "gradient: expected one of .*found 'backward'"),
    "strip": ({"strip_tokens": 0}, "strip_tokens: expected > 0"),
    "logits": ({"logits_dtype": torch.float16}, "logits_dtype: expected one of"),
    "divergence": ({"divergence": "reverse-kl"}, "Did you mean 'reverse_kl'"),
    "size of the shard": ({"shard": VocabShard(0, 39, 37)}, "shard.size: expected the 40 rows.*found 39"),
    "start of the shard": ({"shard": VocabShard(-1, 40, 37)}, "shard.start: expected >= 0"),
    "columns missing": ({"shard": VocabShard(0, 40, 80)}, "all 80 columns on a single rank.*tensor-parallel group"),
    "sequence parallel without a group": ({"shard": None, "sequence_parallel": True}, "expected one with a group"),
}


@pytest.mark.parametrize("function", (fused_linear_divergence, dense_divergence, forward_chunked_divergence))
@pytest.mark.parametrize("name", BAD)
def test_refused(name, function):
    changed, message = BAD[name]
    with pytest.raises(LossArgumentError, match=message):
        function(**(GOOD | changed))


def test_rubbish_on_masked_tokens_is_not_refused():
    ids, labels = IDS.clone(), CASE.labels.clone()
    ids[3], labels[3] = 10**6, -100
    assert float(CASE.token_weight[3]) == 0
    sums = fused_linear_divergence(**(GOOD | {"teacher": CASE.teacher._replace(ids=ids), "labels": labels}))
    assert float(sums.total) == float(fused_linear_divergence(**GOOD).total)
