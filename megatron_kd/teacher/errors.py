# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a teacher."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_kd.errors import UserError


class TeacherError(UserError):
    """The teacher cannot be loaded, or cannot be cached as asked."""


class ImplausibleTeacher(TeacherError):
    """The teacher loads and runs, but what it predicts is no language model's."""


@contextmanager
def implausible_if_not_finite(name: str, dtype: str) -> Iterator[None]:
    """Say which teacher it was whose logits are not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise ImplausibleTeacher(f"{name} in {dtype}: {error}. Try float32") from error
