# SPDX-License-Identifier: Apache-2.0
"""One method of a comparison inside a rank: its configuration, the run, its result as a file.

In: what was asked on the command line. Out: `result.json` in the run's folder, by the last rank. Each rank builds the
same configuration for itself.
"""

from pathlib import Path
from typing import Any, NamedTuple

from megatron_kd import dryrun
from megatron_kd.bridge.commands import Request
from megatron_kd.compare.methods import Run
from megatron_kd.compare.results import RESULT, write_json


class Where(NamedTuple):
    """On what the ranks run."""

    cpu: bool
    """CPU ranks over gloo."""
    shrink: bool
    """The model made tiny, with made-up teacher rows, as `train --dry-run` does."""
    ranks: int | None = None
    """Their number; None for a shrunk run: as few as it needs."""


def ranks_needed(request: Request, where: Where) -> int:
    """Ranks of a run on CPU ranks when their number was not given."""
    from megatron_kd.bridge.preflight import smallest_world_size

    cfg, _ = _configuration(request, Run("megatron"), where, None)
    return smallest_world_size(cfg)


def run_on_rank(request: Request, run: Run, folder: Path, teacher: str | None, where: Where) -> None:
    """Train and measure one method.

    Raises:
        UserError: it cannot run.
    """
    from megatron_kd.bridge.compared import measuring, run_method
    from megatron_kd.bridge.config import check_before_start, load_config
    from megatron_kd.bridge.settings import SYNTHETIC

    folder.mkdir(parents=True, exist_ok=True)
    base, _ = load_config(**request._asdict())
    cfg, values = _configuration(request, run, where, folder)
    if not where.cpu:
        check_before_start(cfg, values, world_size=where.ranks)
    found = run_method(
        cfg,
        None if where.shrink else values,
        method=run.method,
        measure=None if where.shrink else measuring(base.kd),
        teacher=SYNTHETIC if where.shrink else teacher,
        prepare_teacher=dryrun.prepare_model if where.cpu else None,
    )
    if found is not None:
        write_json(folder / RESULT, {"name": run.name, "method": run.method, "overrides": run.overrides, **found})


def _configuration(request: Request, run: Run, where: Where, folder: Path | None) -> tuple[Any, Any]:
    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.rehearsal import without_cache

    overrides = (*request.overrides, *run.overrides)
    cfg, values = load_config(**request._replace(overrides=overrides)._asdict(), run_dir=folder)
    changes = []
    if where.shrink:
        cfg.tokenizer.use_tokenizer_vocab_size = False
        changes += [*without_cache(cfg), *dryrun.shrink(cfg, world_size=where.ranks)]
    if where.cpu:
        changes += dryrun.prepare(cfg)
    for change in changes:
        values.forget(change.key)
    return cfg, values
