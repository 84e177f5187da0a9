# SPDX-License-Identifier: Apache-2.0
"""What every error of ours that a user can mend has in common. Importing it costs nothing."""


class UserError(Exception):
    """What was asked cannot be done. The message names the thing, the expected, the found and the remedy.

    The command line prints such an error as one message, without a traceback, and exits with 2.
    """


class ConfigError(UserError):
    """A setting that cannot be used: unknown, of the wrong type, contradictory or not supported."""
