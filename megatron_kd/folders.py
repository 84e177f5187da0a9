# SPDX-License-Identifier: Apache-2.0
"""Folders that a command is to write into, made before the work starts rather than missed after it."""

import tempfile
from pathlib import Path

from megatron_kd.errors import UserError


def make_folder(path: Path, what: str) -> Path:
    """Makes the folder, if it is not there, and returns it.

    Args:
        path: The folder.
        what: What it is, as the user wrote it: "--out".

    Raises:
        UserError: it cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{what} {path} cannot be made: {error.strerror}. Name a folder that you may write to."
        ) from error
    return _writable(path, path, what)


def check_can_make(path: Path, what: str) -> None:
    """As far as it can be told without making it.

    Raises:
        UserError: what there is of the path is no folder, or cannot be written to.
    """
    there = path.absolute()
    while not there.exists():
        there = there.parent
    _writable(there, path, what)


def _writable(there: Path, path: Path, what: str) -> Path:
    if not there.is_dir():
        raise UserError(f"{what} {path} cannot be made: {there} is no folder.")
    try:
        with tempfile.TemporaryFile(dir=there):
            return path
    except OSError as error:
        raise UserError(
            f"{what} {path}: {there} cannot be written to: {error.strerror}. Name a folder that you may write to."
        ) from error
