# SPDX-License-Identifier: Apache-2.0
"""A plan: does a run fit a machine, how long does a step take, what does its cache take, and what could be changed.

In: a `Run` and a `Machine`. Out: one dictionary of plain values, as plan.json holds it, and its tables for a terminal.
Every figure but the counts of parameters is modelled: see plan_memory.py and plan_time.py. Costs milliseconds; the
search for the fewest nodes up to a second.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from megatron_kd.report.plan_memory import (
    ALLOWANCE,
    PARTS,
    by_loss,
    losses_of,
    rank_memory,
    stage_memory,
    total_parameters,
    unmodelled,
)
from megatron_kd.report.plan_shape import GB, Loss, Machine, Run
from megatron_kd.report.plan_time import EFFICIENCY, cache_figures, step_flops, step_summary, teacher_seconds
from megatron_kd.report.table import format_table

MODELLED = "modelled"
MOST_GPUS = 1024


def own_loss(run: Run) -> str:
    """The name in LOSSES of the way the run computes its loss."""
    return "fused, recompute" if run.loss.method == "fused" and run.loss.gradient == "recompute" else run.loss.method


def room(machine: Machine) -> float:
    """Bytes of a GPU that a plan may fill."""
    return machine.memory * (1 - ALLOWANCE)


def fits(run: Run, machine: Machine, loss: Loss | None = None) -> bool:
    """Whether the fullest rank does."""
    return sum(rank_memory(run, loss).values()) <= room(machine)


def smallest_nodes(run: Run, machine: Machine, loss: Loss | None = None) -> int | None:
    """The fewest nodes on which the run fits at its own parallel sizes; only data parallelism grows.

    None: on none up to MOST_GPUS GPUs, since what data parallelism does not divide is too large already.
    """
    for gpus in range(run.layout.least_gpus, MOST_GPUS + 1, run.layout.least_gpus):
        tried = replace(run, layout=replace(run.layout, gpus=gpus))
        if run.training.global_batch % (run.training.micro_batch * tried.layout.data):
            continue
        if fits(tried, machine, loss):
            return -(-gpus // machine.gpus_per_node)
    return None


def smallest_at_any_layout(run: Run, machine: Machine, loss: Loss | None = None) -> tuple[int, Run] | None:
    """The fewest nodes at any tensor, pipeline, context and expert parallelism that the model allows, without
    recomputation beyond the recipe's; and the layout, the one with the least pipeline, then context, then tensor.
    """
    for nodes in (1, 2, 4, 8, 16, 32):
        for tried in _layouts(run, nodes * machine.gpus_per_node, machine.gpus_per_node):
            if fits(tried, machine, loss):
                return nodes, tried
    return None


def _layouts(run: Run, gpus: int, gpus_per_node: int) -> Iterator[Run]:
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= gpus]
    model = run.model
    models = [model, run.teacher or model] if run.loss.online else [model]
    for pipeline in (size for size in sizes if model.layers % size == 0 and not (run.loss.online and size > 1)):
        for context in (size for size in sizes if size <= gpus_per_node):
            for tensor in (
                size for size in sizes if size <= gpus_per_node and all(m.groups % size == 0 for m in models)
            ):
                ways = tensor * pipeline * context
                if gpus % ways or run.training.global_batch % (run.training.micro_batch * (gpus // ways)):
                    continue
                experts = [size for size in sizes if model.experts and all(m.experts % size == 0 for m in models)]
                expert = max((size for size in experts if (gpus // pipeline) % size == 0 and size <= 8), default=1)
                layout = replace(
                    run.layout,
                    gpus=gpus,
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual=1,
                    context=context,
                    expert=expert,
                    expert_tensor=1,
                    sequence_parallel=tensor > 1,
                    first_stage_layers=None,
                    last_stage_layers=None,
                )
                yield replace(run, layout=layout)


def changes(run: Run, machine: Machine) -> list[dict[str, Any]]:
    """What one change to the recipe would make of the fullest rank, the cheapest first: `change`, `bytes`, `fits`."""
    found = []
    before = sum(rank_memory(run).values())
    for text, tried in _single_changes(run):
        total = sum(rank_memory(tried).values())
        if total < 0.98 * before:
            found.append({"change": text, "bytes": total, "fits": total <= room(machine)})
    return found


def _single_changes(run: Run) -> Iterator[tuple[str, Run]]:
    layout, training, model = run.layout, run.training, run.model

    def laid(**sizes: Any) -> Run:
        return replace(run, layout=replace(layout, **sizes))

    if run.loss.online:
        yield (
            "a cache of the teacher (kd.cache) instead of kd.teacher",
            replace(run, loss=replace(run.loss, online=False)),
        )
    if run.loss.method != "fused":
        yield "kd.loss=fused", replace(run, loss=replace(run.loss, method="fused"))
    if run.loss.method != "fused" or run.loss.gradient != "recompute":
        yield (
            "kd.loss=fused kd.gradient=recompute",
            replace(run, loss=replace(run.loss, method="fused", gradient="recompute")),
        )
    if not training.distributed_optimizer:
        yield (
            "ddp.use_distributed_optimizer=true optimizer.use_distributed_optimizer=true",
            replace(run, training=replace(training, distributed_optimizer=True)),
        )
    if training.micro_batch > 1:
        yield (
            f"train.micro_batch_size={training.micro_batch // 2}",
            replace(run, training=replace(training, micro_batch=training.micro_batch // 2)),
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "model.sequence_parallel=true", laid(sequence_parallel=True)
    if (
        layout.tensor < 8
        and model.groups % (2 * layout.tensor) == 0
        and layout.gpus % (2 * layout.least_gpus_dense) == 0
    ):
        yield (
            f"model.tensor_model_parallel_size={2 * layout.tensor} model.sequence_parallel=true",
            laid(tensor=2 * layout.tensor, sequence_parallel=True),
        )
    if layout.gpus % (2 * layout.least_gpus_dense) == 0:
        yield f"model.context_parallel_size={2 * layout.context}", laid(context=2 * layout.context)
        split = model.layers % (2 * layout.pipeline * layout.virtual) == 0 and layout.expert_data % 2 == 0
        if split and not run.loss.online:
            yield f"model.pipeline_model_parallel_size={2 * layout.pipeline}", laid(pipeline=2 * layout.pipeline)
    if model.experts and model.experts % (2 * layout.expert) == 0 and layout.expert_data % 2 == 0:
        yield f"model.expert_model_parallel_size={2 * layout.expert}", laid(expert=2 * layout.expert)
    if training.recompute != "full":
        again = replace(training, recompute="full", recompute_method="uniform", recompute_layers=1)
        yield (
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1 "
            "(a third more work in the layers)",
            replace(run, training=again),
        )
    doubled = replace(layout, gpus=2 * layout.gpus)
    if training.distributed_optimizer and training.global_batch % (training.micro_batch * doubled.data) == 0:
        yield f"{doubled.gpus} GPUs instead of {layout.gpus}", replace(run, layout=doubled)


def make_plan(run: Run, machine: Machine) -> dict[str, Any]:
    """Everything a plan says, as plain values. Bytes are bytes, times seconds; `kind` says that they are modelled."""
    own, last = own_loss(run), run.layout.pipeline - 1
    memory = by_loss(run)
    steps = step_summary(run, machine)
    totals = {name: sum(parts.values()) for name, parts in memory.items()}
    anywhere = smallest_at_any_layout(run, machine)
    return {
        "kind": MODELLED,
        "run": asdict(run),
        "machine": asdict(machine),
        "parameters": total_parameters(run.model),
        "loss": own,
        "fits": totals[own] <= room(machine),
        "room": room(machine),
        "memory": memory,
        "last_stage": {name: stage_memory(run, last, loss) for name, loss in losses_of(run).items()},
        "step_flops": step_flops(run),
        "step": steps,
        "cache": cache_figures(run, machine, steps[own]["seconds"]),
        "beside": beside(run, machine),
        "smallest_nodes": {name: smallest_nodes(run, machine, loss) for name, loss in losses_of(run).items()},
        "smallest_at_any_layout": anywhere and {"nodes": anywhere[0], "layout": asdict(anywhere[1].layout)},
        "changes": changes(run, machine),
        "assumptions": assumptions(run),
    }


def beside(run: Run, machine: Machine) -> dict[str, Any] | None:
    """What the teacher that builds the cache would take beside the student instead: `bytes` more on each rank,
    `seconds` more a step, `fits`. None where none is named, where it runs there already, and in a pipeline.
    """
    if run.teacher is None or run.loss.online or run.layout.pipeline > 1:
        return None
    tried = replace(run, loss=replace(run.loss, online=True))
    return {
        "bytes": rank_memory(tried)["teacher"],
        "seconds": run.micro_batches * teacher_seconds(run, machine),
        "fits": fits(tried, machine),
    }


def assumptions(run: Run) -> list[str]:
    """What a reader has to know about the figures."""
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in EFFICIENCY.items())
    teacher = run.teacher.name if run.teacher else f"{run.model.name} (no --teacher was named)"
    return [
        "All figures are modelled from the configuration; none is measured.",
        f"{ALLOWANCE:.0%} of a GPU's memory is left free for CUDA, NCCL, fragments and kernels' own scratch.",
        "Activations: flash attention, experts evenly loaded.",
        f"Time: a roofline at shares of the peak: {shares}.",
        "MFU counts each product once, also where it is computed again.",
        f"The teacher, {teacher}, runs beside the student on the same ranks; the figures of a cache say what one "
        "would take instead."
        if run.loss.online
        else f"Cache: raw codec, every token of the run once; its teacher is {teacher}.",
        *unmodelled(run),
    ]


def title(plan: dict[str, Any]) -> str:
    """Model, batch, machine and layout, in two lines."""
    run, machine = plan["run"], plan["machine"]
    layout, training = run["layout"], run["training"]
    nodes = -(-layout["gpus"] // machine["gpus_per_node"])
    return (
        f"{run['model']['name']}, {plan['parameters'] / 1e9:.1f} billion parameters, "
        f"{training['seq_length']:,} tokens x {training['micro_batch']}, {training['global_batch']} a step\n"
        f"{layout['gpus']} {machine['name']} on {nodes} node{'s' * (nodes > 1)}: {layout_text(layout)}; "
        f"data {data_parallel(layout)}"
    )


def plan_text(plan: dict[str, Any]) -> str:
    """The plan for a terminal."""
    machine, own = plan["machine"], plan["loss"]
    total = sum(plan["memory"][own].values())
    verdict = "FITS" if plan["fits"] else "DOES NOT FIT"
    lines = [
        title(plan),
        "",
        f"{verdict} ({MODELLED}): {total / GB:.1f} GB on the fullest rank, of {plan['room'] / GB:.1f} GB that a plan "
        f"may fill of {machine['memory'] / GB:.0f}",
        "",
        f"Memory of the fullest rank, GB, {MODELLED}",
        format_table(memory_head(plan), memory_rows(plan)),
        "",
        f"A step, {MODELLED}: {plan['step_flops'] / 1e15:.3g} PFLOP",
        format_table(STEP_HEAD, step_rows(plan)),
        "",
        f"Cache{' instead' if plan['run']['loss']['online'] else ''}, {MODELLED}: {cache_text(plan['cache'])}",
        *([f"Without a cache, {MODELLED}: {beside_text(plan['beside'])}"] if plan["beside"] else []),
        f"Fewest nodes, {MODELLED}: {nodes_text(plan)}",
    ]
    if plan["changes"]:
        lines += ["", f"{'Could be changed' if plan['fits'] else 'What to change'}, {MODELLED}:"]
        lines += [
            f"  {one['bytes'] / GB:6.1f} GB, {'fits' if one['fits'] else 'does not fit'}: {one['change']}"
            for one in plan["changes"]
        ]
    return "\n".join([*lines, "", *plan["assumptions"]])


STEP_HEAD = ["loss", "seconds", "tokens/s", "TFLOP/s/GPU", "MFU", "in the loss"]
"""Headings of `step_rows`."""


def memory_head(plan: dict[str, Any]) -> list[str]:
    """Headings of `memory_rows`; with a pipeline the loss's own stage, which is seldom the fullest, has a column."""
    last = ["last stage", "its loss"] if plan["run"]["layout"]["pipeline"] > 1 else []
    return ["loss", *parts_of(plan), "total", *last, "fits", "fewest nodes"]


def memory_rows(plan: dict[str, Any]) -> list[list[str]]:
    """A line a way to compute the loss, in GB; the run's own is marked."""
    rows = []
    for name, parts in plan["memory"].items():
        total, nodes, last = sum(parts.values()), plan["smallest_nodes"][name], plan["last_stage"][name]
        figures = [*(parts[part] for part in parts_of(plan)), total]
        if plan["run"]["layout"]["pipeline"] > 1:
            figures += [sum(last.values()), last["loss"]]
        fit = "yes" if total <= plan["room"] else "no"
        mark = name + (" *" if name == plan["loss"] else "")
        rows.append([mark, *(f"{figure / GB:.1f}" for figure in figures), fit, str(nodes or "none")])
    return rows


def step_rows(plan: dict[str, Any]) -> list[list[str]]:
    """A line a way to compute the loss."""
    return [
        [
            name + (" *" if name == plan["loss"] else ""),
            f"{step['seconds']:.2f}",
            f"{step['tokens_per_second']:,.0f}",
            f"{step['tflops_per_gpu']:.0f}",
            f"{step['mfu']:.1%}",
            f"{step['parts']['loss'] / step['seconds']:.1%}",
        ]
        for name, step in plan["step"].items()
    ]


def cache_text(cache: dict[str, float]) -> str:
    """The cache in words."""
    return (
        f"{cache['bytes'] / 1e12:.3g} TB, {cache['tokens'] / 1e9:.3g} billion tokens at "
        f"{cache['bytes_per_token']:.0f} bytes; built in {cache['build_gpu_hours']:,.1f} GPU hours, "
        f"{cache['build_hours']:.1f} hours on these GPUs; read at {cache['read_bytes_per_second'] / 1e6:,.1f} MB/s "
        "while training"
    )


def beside_text(found: dict[str, Any]) -> str:
    """What `beside` found, in words."""
    return (
        f"the teacher beside the student (kd.teacher) would take {found['bytes'] / GB:.1f} GB more on each rank, "
        f"which {'fits' if found['fits'] else 'does not fit'}, and {found['seconds']:.2f} s more a step"
    )


def parts_of(plan: dict[str, Any]) -> list[str]:
    """The parts of its memory, in the order of PARTS."""
    return [part for part in PARTS if part in plan["memory"][plan["loss"]]]


def nodes_text(plan: dict[str, Any]) -> str:
    """The fewest nodes in words."""
    nodes, anywhere = plan["smallest_nodes"][plan["loss"]], plan["smallest_at_any_layout"]
    own = f"{nodes} at this layout" if nodes else "none at this layout"
    if not anywhere:
        return f"{own}; none of up to 32 at another without further recomputation"
    return f"{own}; {anywhere['nodes']} at the best found ({layout_text(anywhere['layout'])})"


def layout_text(layout: dict[str, Any]) -> str:
    """Parallel sizes in Megatron's short names."""
    sizes = {
        "TP": "tensor",
        "PP": "pipeline",
        "VPP": "virtual",
        "CP": "context",
        "EP": "expert",
        "ETP": "expert_tensor",
    }
    found = [f"{short}={layout[name]}" for short, name in sizes.items() if layout[name] > 1]
    return " ".join(found + ["SP"] * layout["sequence_parallel"]) or "no model parallelism"


def data_parallel(layout: dict[str, Any]) -> int:
    """Data-parallel ranks."""
    return layout["gpus"] // (layout["tensor"] * layout["pipeline"] * layout["context"])


def csv_rows(plan: dict[str, Any]) -> Iterator[list[Any]]:
    """`loss, figure, value, unit, kind` of every modelled figure by way to compute the loss, and of the cache."""
    yield ["loss", "figure", "value", "unit", "kind"]
    for name, parts in plan["memory"].items():
        for part, value in {**parts, "total": sum(parts.values())}.items():
            yield [name, f"memory: {part}", round(value), "byte", MODELLED]
    for name, step in plan["step"].items():
        units = {"seconds": "s", "tokens_per_second": "token/s", "tflops_per_gpu": "TFLOP/s", "mfu": "1"}
        for key, unit in units.items():
            yield [name, key, step[key], unit, MODELLED]
        for part, seconds in step["parts"].items():
            yield [name, f"step: {part}", seconds, "s", MODELLED]
    for key, value in plan["cache"].items():
        yield ["", f"cache: {key}", value, "", MODELLED]
