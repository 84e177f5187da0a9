# SPDX-License-Identifier: Apache-2.0
"""Which releases are installed here. Imports nothing of them."""

import importlib.metadata
from collections.abc import Iterable


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages of that name, of those that are installed here."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
