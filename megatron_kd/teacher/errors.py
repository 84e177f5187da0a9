# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a teacher."""

from megatron_kd.errors import UserError


class TeacherError(UserError):
    """The teacher cannot be loaded, or cannot be cached as asked."""


class ImplausibleTeacher(TeacherError):
    """The teacher loads and runs, but what it predicts is no language model's."""
