# SPDX-License-Identifier: Apache-2.0
"""What a run is: a stock Bridge container and, beside it, how to distil.

In: nothing but values. Out: `KDConfigContainer`, which Bridge trains, saves into a checkpoint's `run_config.yaml` and
reads back like any of its own, because `cfg.model` stays a stock provider and what is ours lives in `cfg.kd`.
Costs nothing beyond importing Bridge.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from megatron.bridge.training.checkpointing import checkpoint_exists
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.instantiate_utils import (
    InstantiationException,
    instantiate,
    register_allowed_target_prefix,
)

from megatron_kd.bridge.conform import Mismatch, conform, describe
from megatron_kd.bridge.finalise import OverwrittenValue, check_final, finalise_preview
from megatron_kd.bridge.kd_values import check_bounds, check_teacher, check_together
from megatron_kd.bridge.overrides import UserValues, apply_settings, field_hints
from megatron_kd.bridge.preflight import check_before_start, refuse_unsupported
from megatron_kd.bridge.settings import Settings, read_arguments, read_yaml
from megatron_kd.bridge.targets import check_target
from megatron_kd.errors import ConfigError
from megatron_kd.loss import LossArgumentError
from megatron_kd.loss.divergence import find_divergence

__all__ = [
    "ConfigError",
    "KDConfig",
    "KDConfigContainer",
    "OverwrittenValue",
    "UserValues",
    "check_before_start",
    "check_final",
    "finalise_preview",
    "load_config",
    "refuse_unsupported",
    "resolve_divergence",
    "use_run_dir",
]

register_allowed_target_prefix("megatron_kd.")


@dataclass(kw_only=True)
class KDConfig:
    """How the student learns from its teacher: from a cache, or from the teacher itself."""

    cache: str | list[str] | None = None
    """Folder of the teacher's cache, or several that together cover the corpus: of a blend's parts, of a corpus and
    what was added to it later, of several teachers."""

    teacher: str | None = None
    """Instead of a cache: Hugging Face folder or hub name of the teacher, which runs beside the student on the same
    batch and at the same parallel layout, without a pipeline."""

    cache_weights: list[float] | None = None
    """One weight a cache, in the order of `cache`, where several teachers' caches are of one corpus: their
    distributions are mixed in these proportions. None: one teacher a corpus."""

    divergence: str = "forward_kl"
    """What is minimised: a name of `megatron_kd.loss.DIVERGENCES`, `jsd(0.3)`, or `package.module:function` for your
    own, called with the student's and the teacher's log-probabilities [n, K+1] and returning [n]."""

    top_k: int | None = None
    """Teacher tokens used per position; the mass of the others joins the tail. None: as many as the cache holds, or
    100 with `teacher`, for which a number as large as the vocabulary takes all of it."""

    temperature: float = 1.0
    """Softens both distributions. The KD term carries the usual T^2. If not 1, the cache must hold its tail plane."""

    kd_weight: float = 1.0
    """Weight of the divergence in the total loss."""

    ce_weight: float = 0.0
    """Weight of the cross entropy on the hard label in the total loss."""

    loss: Literal["fused", "dense", "forward_chunked", "megatron_topk"] = "fused"
    """`fused` never holds the [tokens, vocabulary] grid; `dense` and `forward_chunked` are the baselines it is
    compared with; `megatron_topk` is Megatron's own loss on cached logits, forward KL alone, for comparison."""

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

    bad_blocks: Literal["raise", "mask"] = "raise"
    """What a block that does not match its checksum, twice, does: end the run, or lose its tokens (weight 0 in the
    loss, cross entropy included; counted as `kd masked`, logged)."""

    bad_blocks_limit: float = 0.001
    """With `bad_blocks: mask`, the largest fraction of the caches' tokens that may lie in bad blocks."""

    context: Literal["any", "exact"] = "any"
    """What happens where a sample starts inside a document, so that the student sees less than the teacher saw: `any`
    distils all the same, `exact` leaves these tokens out (weight 0 in the loss, cross entropy included). Their share
    is logged as `kd cut`."""

    def finalize(self) -> None:
        """Checks every value; Bridge's own validation calls this too.

        Raises:
            ConfigError: names the key, what it may be and what it is.
        """
        for name, hint in field_hints(KDConfig).items():
            try:
                setattr(self, name, conform(getattr(self, name), hint))
            except Mismatch:
                raise ConfigError(f"kd.{name} expects {describe(hint)}, found {getattr(self, name)!r}.") from None
        check_bounds(vars(self))
        check_together(vars(self))
        check_teacher(vars(self))
        resolve_divergence(self.divergence)


def resolve_divergence(divergence: str) -> str | Callable:
    """Turns `kd.divergence` into what the loss takes: a known name as it is, `package.module:function` as a function.

    A function's package must be on Bridge's allow-list of targets, because the name may stand in a YAML file.

    Raises:
        ConfigError: the name is not known, or the function cannot be imported.
    """
    if ":" not in divergence:
        try:
            find_divergence(divergence)
        except LossArgumentError as error:
            raise ConfigError(f"kd.{error} A function is package.module:function.") from error
        return divergence
    check_target(divergence.replace(":", "."), f"kd.divergence={divergence!r}", called=False)
    try:
        return instantiate({"_target_": divergence.replace(":", "."), "_call_": False})
    except InstantiationException as error:
        raise ConfigError(f"kd.divergence={divergence!r} cannot be had: {error}") from error


@dataclass(kw_only=True)
class KDConfigContainer(ConfigContainer):
    """A stock Bridge container plus `kd`."""

    kd: KDConfig | None = None
    """How to distil. None: Megatron's default loss, for comparison."""

    @classmethod
    def wrap(cls, container: ConfigContainer, kd: KDConfig | None = None) -> Self:
        """A stock container's every field, the same objects, and `kd`; one of ours as it is, with `kd` if given."""
        if isinstance(container, cls):
            container.kd = kd or container.kd
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


def load_config(
    recipe: str | Callable[[], ConfigContainer] | ConfigContainer | None = None,
    *,
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    student: str | None = None,
) -> tuple[KDConfigContainer, UserValues]:
    """A run's configuration: the recipe, then the YAML file, then the `key=value` arguments; the later wins.

    Args:
        recipe: what `recipes.build_recipe` takes. None: the YAML's own top-level `recipe:`.
        config_file: sections of the container, nested as in `--print-config`; beside them `recipe:` and `student:`.
        overrides: arguments in hydra-core's grammar.
        run_dir: see `use_run_dir`.
        student: folder or hub name of the Hugging Face model the student starts from. None: the YAML's `student:`.

    Returns:
        The configuration, not yet finalised, and what the user set in it.

    Raises:
        ConfigError: what was asked cannot be used; the message has the full key, where it stands and the nearest key.
    """
    from megatron_kd.bridge.recipes import build_recipe  # whose recipes are made of this module's classes

    layers = [read_yaml(Path(config_file))] if config_file else []
    layers.append(read_arguments(overrides))
    asked_recipe, asked_student = (_take(layers, name) for name in ("recipe", "student"))
    _take(layers, "_target_")  # of a saved configuration: the container's own class
    if recipe is None:
        recipe = asked_recipe
        if recipe is None:
            raise ConfigError("no recipe: give --recipe NAME, or put `recipe: NAME` on top of the YAML file.")
        if ":" in recipe and not recipe.startswith("hf:"):
            raise ConfigError(f"recipe: {recipe} in a YAML file would import code. Give it as --recipe {recipe}.")
    cfg = KDConfigContainer.wrap(build_recipe(recipe, student or asked_student))
    use_run_dir(cfg, run_dir)
    return cfg, apply_settings(cfg, layers)


def _take(layers: Sequence[Settings], name: str) -> str | None:
    """Removes one of the top-level keys that are no sections; the last layer's counts."""
    given = [(layer.tree.pop(name), layer.source((name,))) for layer in layers if name in layer.tree]
    for value, source in given:
        if not isinstance(value, str):
            raise ConfigError(f"{source}: {name} expects text, found {value!r} ({type(value).__name__}).")
    return given[-1][0] if given else None


def use_run_dir(cfg: ConfigContainer, run_dir: Path | None) -> None:
    """Puts everything a run writes into one folder, and resumes only from a checkpoint in that same folder.

    Bridge's recipes all save into, and silently resume from, ./nemo_experiments/default. Without a folder that default
    is unset: nothing is loaded or written unless the configuration says where.
    """
    if run_dir is None:
        default = Path.cwd() / "nemo_experiments" / "default"
        for section, name in ((cfg.checkpoint, "save"), (cfg.checkpoint, "load"), (cfg.logger, "tensorboard_dir")):
            path = getattr(section, name)
            if path is not None and Path(path).is_relative_to(default):
                setattr(section, name, None)
        return
    run_dir = Path(run_dir).absolute()
    checkpoints = str(run_dir / "checkpoints")
    cfg.checkpoint.save = checkpoints
    cfg.checkpoint.load = checkpoints if checkpoint_exists(checkpoints) else None
    cfg.logger.tensorboard_dir = str(run_dir / "tensorboard")
    cfg.logger.wandb_save_dir = str(run_dir / "wandb")
    cfg.logger.save_config_filepath = str(run_dir / "config.yaml")
