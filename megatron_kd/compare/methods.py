# SPDX-License-Identifier: Apache-2.0
"""What is compared: the ways to train, and each as settings on top of a recipe's.

In: names, and a sweep in hydra's grammar. Out: the runs of a comparison, in order, and which cannot be had and why.
"""

import importlib.util
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_kd.errors import ConfigError

CACHE, TEACHER = "kd.cache=FOLDER", "--teacher FOLDER"
_PACKING = "dataset.enable_offline_packing"


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        says: What it is, for the help.
        overrides: Settings on top of the user's.
        needs: What the user has to give, CACHE or TEACHER; None where nothing.
        package: A module that must be importable.
        same: Whether it computes the same loss as the others that say so, and must train alike.
    """

    says: str
    overrides: tuple[str, ...] = ()
    needs: str | None = CACHE
    package: str | None = None
    same: bool = False


METHODS = {
    "megatron": Method("Megatron's default loss, without a teacher", ("kd=null",), needs=None),
    "online": Method("ours, the teacher beside the student", ("kd.cache=null",), needs=TEACHER),
    "modelopt": Method(
        "Megatron-Bridge's own distillation by ModelOpt, the whole vocabulary, the teacher beside the student",
        ("kd=null",),
        needs=TEACHER,
        package="modelopt",
    ),
    "dense": Method("from the cache, by autograd on the whole grid", ("kd.loss=dense",), same=True),
    "forward-chunked": Method(
        "from the cache, whole logits, compared in chunks", ("kd.loss=forward_chunked",), same=True
    ),
    "fused": Method("from the cache, strip by strip, gradients in forward", ("kd.loss=fused",), same=True),
    "fused-recompute": Method(
        "as fused, projecting again in backward, least memory", ("kd.loss=fused", "kd.gradient=recompute"), same=True
    ),
    "megatron-topk": Method(
        "from the cache, by Megatron's own loss on cached logits",
        ("kd.loss=megatron_topk",),
        package="megatron.training.distillation",
    ),
}


@dataclass(frozen=True)
class Run:
    """One run of a comparison."""

    method: str
    swept: tuple[str, ...] = ()
    """Settings of the sweep."""
    overrides: tuple[str, ...] = field(default=())
    """Settings on top of the user's, the swept ones among them."""

    @property
    def name(self) -> str:
        """The method and its swept settings, as a reader sees them."""
        return " ".join([self.method, *self.swept])

    @property
    def folder(self) -> str:
        """The name as a folder's."""
        return re.sub(r"[^\w.=-]+", "_", self.name)


def plan(
    names: Sequence[str] | None, sweep: Sequence[str], *, has_cache: bool, teacher: str | None
) -> tuple[list[Run], dict[str, str]]:
    """The runs, and the methods left out with the reason.

    Args:
        names: of METHODS; None: all, or with a sweep `fused` alone.
        sweep: arguments such as `kd.top_k=20,50`, of which is_sweep is true; every combination is run. Without
            distillation only that of the settings outside `kd`.
        has_cache: whether the recipe or the user names a cache.
        teacher: the teacher's folder or hub name.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names or ():
        if name not in METHODS:
            raise ConfigError(f"--methods {name}: unknown. Known: {', '.join(METHODS)}.")
    names = names or (["fused"] if sweep else list(METHODS))
    axes = [_values(argument) for argument in sweep]
    given = {None: True, CACHE: has_cache, TEACHER: teacher is not None}
    runs, left_out = [], {}
    for name in names:
        method = METHODS[name]
        if not given[method.needs]:
            left_out[name] = f"needs {method.needs}"
        elif method.package and importlib.util.find_spec(method.package.partition(".")[0]) is None:
            left_out[name] = f"needs {method.package}, which is not installed"
        else:
            own = (*method.overrides, f"kd.teacher={teacher}") if name == "online" else method.overrides
            # To a run without distillation the settings of `kd` make no difference.
            own_axes = [axis for axis in axes if "kd=null" not in own or not axis[0].startswith("kd.")]
            runs += [Run(name, swept, (*own, *_implied(swept), *swept)) for swept in itertools.product(*own_axes)]
    return runs, left_out


def _implied(swept: Sequence[str]) -> list[str]:
    """Bridge refuses what describes offline packing where that is off."""
    off = {f"{_PACKING}=false", f"{_PACKING}=False"}
    return ["dataset.offline_packing_specs=null"] if off.intersection(swept) else []


def is_sweep(argument: str) -> bool:
    """Whether `key=value` has several values, in hydra's grammar; a list is one.

    Raises:
        ConfigError: it is not that grammar, or a sweep of another kind than values with commas between them.
    """
    override = _parsed(argument)
    if override.is_sweep_override() and not override.is_choice_sweep():
        raise ConfigError(f"--sweep {argument}: expected values with commas between them.")
    return override.is_sweep_override()


def _values(argument: str) -> list[str]:
    """`key=a,b` as `key=a` and `key=b`."""
    override = _parsed(argument)
    return [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]


def _parsed(argument: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not needed to show help
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise ConfigError(f"--sweep {argument} is not key=value,value in hydra's grammar: {error}") from error
