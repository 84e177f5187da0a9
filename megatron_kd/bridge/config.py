# SPDX-License-Identifier: Apache-2.0
"""What a run is: a stock Bridge container and, beside it, how to distil.

In: nothing but values. Out: `KDConfigContainer`, which Bridge trains, saves into a checkpoint's `run_config.yaml` and
reads back like any of its own, because `cfg.model` stays a stock provider and what is ours lives in `cfg.kd`.
Costs nothing beyond importing Bridge.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from megatron_kd.errors import UserError

register_allowed_target_prefix("megatron_kd.")


class ConfigError(UserError):
    """A setting that cannot be used: unknown, of the wrong type, contradictory or not supported."""


@dataclass(kw_only=True)
class KDConfig:
    """How the student learns from the teacher's cache."""

    cache: str | list[str] | None = None
    """Folder of the teacher's cache, or several that together cover the corpus."""

    divergence: str = "forward_kl"
    """What is minimised: a name of `megatron_kd.loss.DIVERGENCES`, or `package.module:function` for your own, called
    with the student's and the teacher's log-probabilities [n, K+1] and returning [n]."""

    top_k: int | None = None
    """Teacher tokens used per position; the mass of the others joins the tail. None: as many as the cache holds."""

    temperature: float = 1.0
    """Softens both distributions. The KD term carries the usual T^2. If not 1, the cache must hold its tail plane."""

    kd_weight: float = 1.0
    """Weight of the divergence in the total loss."""

    ce_weight: float = 0.0
    """Weight of the cross entropy on the hard label in the total loss."""

    loss: Literal["fused", "dense", "forward_chunked"] = "fused"
    """`fused` never holds the [tokens, vocabulary] grid; the other two are the baselines it is compared with."""

    gradient: Literal["forward", "recompute"] = "forward"
    """`forward`: gradients while the logits of a strip exist, 3 GEMMs. `recompute`: 4 GEMMs, least memory."""

    strip_tokens: int | None = None
    """Tokens projected at a time. None: chosen by the loss."""

    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of a strip's logits. bfloat16 costs 7 to 48 % of the KD gradient's accuracy."""

    read_ahead: int = 2
    """Micro-batches whose teacher rows are read before they are asked for."""

    check_blocks: Literal["always", "sample"] = "always"
    """Which of the cache's block checksums are verified while reading."""

    def finalize(self) -> None:
        """Checks every value; Bridge's own validation calls this too.

        Raises:
            ConfigError: names the key, what it may be and what it is.
        """
        for name, positive in (("top_k", True), ("strip_tokens", True), ("temperature", True), ("read_ahead", False)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
                raise ConfigError(f"kd.{name} must be {'above' if positive else 'at least'} 0, found {value!r}.")
        for name in ("kd_weight", "ce_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"kd.{name} must be a finite number, at least 0, found {value!r}.")
        if self.kd_weight == 0 and self.ce_weight == 0:
            raise ConfigError(
                "kd.kd_weight and kd.ce_weight are both 0, so there is nothing to minimise. Set one of them."
            )
        if not self.cache:
            raise ConfigError(
                "kd.cache is not set: name the folder that `megatron-kd cache build` wrote, or set `kd: null` "
                "to train with Megatron's default loss."
            )
        resolve_divergence(self.divergence)


def resolve_divergence(divergence: str) -> str | Callable:
    """Turns `kd.divergence` into what the loss takes: a known name as it is, `package.module:function` as a function.

    Raises:
        ConfigError: the name is not known, or the function cannot be imported.
    """
    from megatron_kd.loss import DIVERGENCES

    if divergence in DIVERGENCES:
        return divergence
    if ":" not in divergence:
        known = ", ".join(sorted(DIVERGENCES))
        raise ConfigError(f"kd.divergence={divergence!r} is not known. Known: {known}; or package.module:function.")
    return import_function(divergence, "kd.divergence")


def import_function(path: str, what: str) -> Callable:
    """Imports `package.module:function`, named in errors as `what`."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}={path!r} cannot be imported: {error}. Expected package.module:function.") from error
    if not callable(function):
        raise ConfigError(f"{what}={path!r} is a {type(function).__name__}, expected a function.")
    return function


@dataclass(kw_only=True)
class KDConfigContainer(ConfigContainer):
    """A stock Bridge container plus `kd`."""

    kd: KDConfig | None = None
    """How to distil. None: Megatron's default loss, for comparison."""

    @classmethod
    def wrap(cls, container: ConfigContainer, kd: KDConfig | None = None) -> Self:
        """A stock container's every field, the same objects, and `kd`."""
        if isinstance(container, cls):
            return container
        wrapped = cls(
            **{field.name: getattr(container, field.name) for field in dataclasses.fields(container) if field.init},
            kd=kd,
        )
        # What a recipe left on the instance outside the fields (Bridge keeps data_parallel_size so) comes along.
        vars(wrapped).update({name: value for name, value in vars(container).items() if name not in vars(wrapped)})
        return wrapped

    def validate(self) -> None:
        """Bridge's validation, after our own of `kd`."""
        if self.kd is not None:
            self.kd.finalize()
        super().validate()
