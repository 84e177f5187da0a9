# SPDX-License-Identifier: Apache-2.0
"""What a producer of cache rows has to be, whether it is one process or many ranks that compute together.

In: token sequences. Out: teacher rows. The ranks of one replica hold parts of the model and make every call together;
replicas share out the tiles of a cache, and may have to run in step (experts of one layer lie on several replicas).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megatron_kd.loss import TeacherRows


class Teacher(Protocol):
    """A causal language model that can be asked for teacher rows."""

    name: str
    """For messages."""
    vocab_real: int
    """Ids that can occur: the tokenizer's largest id plus one."""
    vocab_padded: int
    """Rows of the output projection."""
    max_context: int | None
    """Tokens the model can attend to; None if its configuration does not say."""
    identity: dict[str, Any]
    """`repo`, `revision`, `weights`, `dtype`, `engine`, `version`."""
    tokenizer: dict[str, Any] | None
    """See `megatron_kd.cache.tokenizer_identity`; None if there is none."""
    writes: bool
    """Whether this process stores what its replica computes. The first process does."""
    replica: tuple[int, int]
    """(i, n): this process belongs to replica i of n."""
    alone: bool
    """Whether this process is all there is."""

    def rows(
        self,
        sequences: Sequence[np.ndarray],
        *,
        top_k: int,
        wanted: Sequence[np.ndarray] | None = None,
        temperatures: Sequence[float] = (),
        strip_tokens: int | None = None,
        labels: Sequence[np.ndarray] | None = None,
    ) -> TeacherRows:
        """Rows of positions of the sequences, one sequence after the other; the same on all ranks of a replica.

        Args:
            sequences: token ids; none sees another.
            top_k: entries a row.
            wanted: bool masks of the positions of each that get rows; the others are context only. Default all.
            temperatures: T of each column of `tail_T`.
            strip_tokens: tokens projected to the vocabulary at once.
            labels: ids, as many for each sequence as it has rows; negative means none.

        Raises:
            ImplausibleTeacher: its logits are NaN or infinite.
        """

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of this process."""

    def agree(self, value: Any) -> Any:
        """The first process's value, on all processes, which all call this."""

    def anyone(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all call this."""
