# SPDX-License-Identifier: Apache-2.0
"""Asking an object store, through multi-storage-client, until it answers.

In: a profile of multi-storage-client's configuration, and requests. Out: their answers. A request that fails is
repeated for a minute, unless its error says that this cannot help. Costs what the requests cost.

The profile's provider is used directly: the client around it may keep answers, right or wrong, in a cache of its own,
and cannot put an object on the condition that there is none.
"""

import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_kd.cache.errors import BadSetting, CorruptFile, StoreError
from megatron_kd.cache.files import node_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PATIENCE_S = 60.0
"""How long a request that fails is repeated."""
_PASSING = (408, 409, 429)
"""Statuses below 500 after which asking again can help."""
_SETTINGS = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "InvalidRegionError")
"""Errors of boto3 after which it cannot."""
_WRONG_BYTES = "FlexibleChecksumError"


class Client:
    """A profile's object store.

    Raises:
        BadSetting: multi-storage-client or the profile is missing.
    """

    def __init__(self, profile: str):
        self.profile = profile
        self._provider()

    def _provider(self) -> Any:
        """Each process has its own connections."""
        return _provider(self.profile, os.environ.get("MSC_CONFIG"), os.getpid())

    def ask(self, where: str, what: str, request: Callable[[Any], _T]) -> _T:
        """The answer to a request.

        Args:
            where: the object or place, in full.
            what: what it is if there is no answer, for the message: "cannot be read".
            request: does it with a `multistorageclient.types.StorageProvider`.

        Raises:
            FileNotFoundError, PreconditionFailedError: that is the answer.
            CorruptFile: its bytes were wrong twice, which boto3 can see where whole objects are read.
            StoreError: there was none, or a refusal.
        """
        from multistorageclient.types import PreconditionFailedError

        deadline, pause, attempts = None, 0.1, 0
        while True:
            attempts += 1
            try:
                return request(self._provider())
            except PreconditionFailedError:
                raise
            except Exception as error:  # of whichever store's own library
                if status(error) == (404, "NoSuchBucket"):
                    raise StoreError(f"{where}: there is no such bucket: {error}") from error
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "not in the store", where) from error
                if attempts > 1 and type(error.__cause__).__name__ == _WRONG_BYTES:
                    raise CorruptFile(f"{where} does not match the store's own checksum, twice") from error
                now = time.monotonic()
                deadline = deadline or now + PATIENCE_S
                if now + pause > deadline or _is_final(error):
                    raise StoreError(
                        f"{where} {what} on node {node_name()}: asked {attempts} times, the object store refused or "
                        f"did not answer: {error}. Check the store, and profile {self.profile!r} of "
                        "multi-storage-client (endpoint, credentials, permissions)"
                    ) from error
                if attempts == 1:
                    logger.warning("%s %s: %s; asking again for %.0f s", where, what, error, PATIENCE_S)
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


@functools.lru_cache
def _provider(profile: str, configuration: str | None, process: int) -> Any:
    """multi-storage-client's storage provider of a profile."""
    try:
        from multistorageclient import StorageClientConfig

        provider = StorageClientConfig.from_file(profile=profile).storage_provider
    except ImportError as error:
        raise BadSetting(
            f"msc://{profile} needs multi-storage-client, and for an S3 store boto3 ({error}): "
            "pip install 'megatron-kd[store]'"
        ) from error
    except Exception as error:
        raise BadSetting(
            f"msc://{profile}: {error}. Describe the profile in the file that MSC_CONFIG names, or in "
            "~/.config/msc/config.yaml"
        ) from error
    if provider is None:
        raise BadSetting(f"msc://{profile} is a profile of several stores; name one of a single store")
    return provider


def status(error: Exception) -> tuple[int | None, str | None]:
    """HTTP status and code of the store's answer, as boto3 notes them on the error or on what caused it."""
    for cause in (error, error.__cause__, error.__context__):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response.get("Error", {}).get("Code")
    return None, None


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    code = status(error)[0]
    if code is not None:
        return code == 501 or (400 <= code < 500 and code not in _PASSING)
    kinds = (NotImplementedError, PermissionError, TypeError, ValueError)
    return isinstance(error, kinds) or type(error.__cause__).__name__ in _SETTINGS
