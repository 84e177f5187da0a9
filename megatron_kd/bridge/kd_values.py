# SPDX-License-Identifier: Apache-2.0
"""What the values of the section `kd` may be, apart from their types. Imports nothing of Megatron and no torch.

In: values by name, of a configuration or as they were written. Out: nothing, or an error that names the key.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_kd.bridge.settings import SYNTHETIC
from megatron_kd.errors import ConfigError

CORPUS = ("data_path", "blend", "blend_per_split")
"""Settings of `dataset` that name corpora."""
_ABOVE_0 = ("top_k", "strip_tokens", "temperature")
_AT_LEAST_0 = ("read_ahead", "kd_weight", "ce_weight")


def check_bounds(kd: Mapping[str, Any]) -> None:
    """Every number on its own; what is absent, None or text is passed over.

    Raises:
        ConfigError: a value out of its bounds.
    """
    for name in (*_ABOVE_0, *_AT_LEAST_0):
        value = kd.get(name)
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name in _ABOVE_0):
            bound = "above" if name in _ABOVE_0 else "at least"
            raise ConfigError(f"kd.{name} must be a finite number, {bound} 0, found {value!r}.")
    limit = kd.get("bad_blocks_limit")
    if isinstance(limit, int | float) and not 0 <= limit <= 1:
        raise ConfigError(f"kd.bad_blocks_limit is a fraction from 0 to 1, found {limit!r}.")


def check_together(kd: Mapping[str, Any]) -> None:
    """All values, none left out: there is something to minimise, and not two teachers.

    Raises:
        ConfigError: otherwise.
    """
    if kd["kd_weight"] == 0 and kd["ce_weight"] == 0:
        raise ConfigError(
            "kd.kd_weight and kd.ce_weight are both 0, so there is nothing to minimise. Set one of them."
        )
    if kd["cache"] and kd["teacher"]:
        raise ConfigError(
            f"kd.cache={kd['cache']} and kd.teacher={kd['teacher']} exclude each other. Set one of them to null."
        )


def check_teacher(kd: Mapping[str, Any]) -> None:
    """A cache or a teacher is named.

    Raises:
        ConfigError: neither is.
    """
    if not kd.get("cache") and not kd.get("teacher"):
        raise ConfigError(
            "kd.cache is not set: name the folder that `megatron-kd cache build` wrote, or a teacher's folder as "
            "kd.teacher, or set `kd: null` to train with Megatron's default loss."
        )


def check_corpus(kd: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
    """A cache on disk comes with its corpus; without one Megatron would make up tokens.

    Args:
        kd: the section `kd`.
        dataset: the section `dataset`, of one of Megatron's pre-training data.

    Raises:
        ConfigError: no corpus is named.
    """
    cache = kd.get("cache")
    if not cache or cache == SYNTHETIC or any(dataset.get(name) for name in CORPUS):
        return
    raise ConfigError(
        f"dataset.data_path is not set, and kd.cache={cache} belongs to a corpus. Set it to the prefix of the corpus "
        "that the cache was built from: that of its .bin and .idx files, without the ending."
    )
