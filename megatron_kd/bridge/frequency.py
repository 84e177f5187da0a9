# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens by how often a corpus has them, for figures that are told class by class.

In: open caches, which hold the tokens of their corpus. Out: the class of every token of the vocabulary. Costs a read
of SAMPLED_ROWS rows.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_kd.cache import CacheReader

SAMPLED_ROWS = 1 << 18
_SPAN = 4096
_BOUNDS = (1e-3, 1e-4, 1e-5)
CLASSES = ("1 in 1,000 or more", "1 in 10,000", "1 in 100,000", "rarer")
"""Shares of the corpus's tokens: at least the one named, and less than the one before."""


def frequency_classes(readers: Sequence[CacheReader], vocab_size: int) -> torch.Tensor:
    """The class of each token as a place in CLASSES, uint8 [vocab_size], from rows spread over the caches."""
    counts = np.zeros(vocab_size, np.int64)
    for reader in readers:
        number = min(-(-reader.n_rows // _SPAN), max(1, SAMPLED_ROWS // _SPAN // len(readers)))
        length = min(_SPAN, reader.n_rows // number)
        starts = np.linspace(0, reader.n_rows - length, number).astype(np.int64)
        tokens = reader.read(np.stack([starts, np.full(number, length)], axis=1), top_k=1).tokens
        counts += np.bincount(tokens[tokens < vocab_size], minlength=vocab_size)
    share = counts / max(1, counts.sum())
    return torch.from_numpy((share[:, None] < np.array(_BOUNDS)).sum(1).astype(np.uint8))
