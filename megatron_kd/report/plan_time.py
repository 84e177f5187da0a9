# SPDX-License-Identifier: Apache-2.0
"""FLOPs, step time, MFU and the teacher's cache by a roofline: pure arithmetic, modelled, not measured.

The model, stated. A rank's products run at a share of the GPU's peak (EFFICIENCY), what lies between them at the
memory's bandwidth, and messages at the link's: inside a node NVLink, otherwise the network. Messages of tensor,
context and expert parallelism wait for nothing and are waited for; gradients and weights of data parallelism are
hidden behind the last micro-batch's backward if the recipe overlaps them. A pipeline adds its bubble. The efficiencies
are those that well-tuned kernels reach in public measurements on Hopper; no figure of ours is fitted to them.
"""

from dataclasses import replace

from megatron_kd.cache.layout import BLOCK_ROWS, RowFormat, id_hi_bits
from megatron_kd.report.plan_memory import LOSSES, layer_bytes, rank_parameters
from megatron_kd.report.plan_shape import Machine, Model, Run

EFFICIENCY = {"products": 0.75, "attention": 0.6, "experts": 0.55, "memory": 0.8, "links": 0.75}
"""Share of the peak that each kind of work gets."""
TRAFFIC = 6
"""Passes over a byte that a layer keeps: written and read in forward, read in backward, and so its gradient."""
LOSS_PRODUCTS = {"dense": 3, "forward_chunked": 3, "fused": 3, "fused, recompute": 4}
LOSS_PASSES = {"dense": 32, "forward_chunked": 16, "fused": 4, "fused, recompute": 5}
"""Passes over a rank's float32 logits, or as many bytes."""


def attention_context(window: int | None, length: int) -> float:
    """Positions that a token of a causal sequence sees on average."""
    if window is None or window >= length:
        return length / 2
    return window - window * (window - 1) / (2 * length)


def token_flops(model: Model, length: int) -> dict[str, float]:
    """FLOPs of one token's forward, by kind, over the whole model: layers' products, attention, experts, head."""
    queries, keys = model.heads * model.head_size, model.groups * model.head_size
    up = 2 if model.gated else 1
    moe = sum(model.moe)
    projections = model.layers * 2 * model.hidden * (queries + keys)
    mlps = (model.layers - moe) * model.ffn + moe * model.shared_ffn
    return {
        "products": 2 * (projections + (up + 1) * model.hidden * mlps),
        "attention": 2 * sum(2 * queries * attention_context(window, length) for window in model.windows),
        "experts": 2 * moe * model.top_experts * (up + 1) * model.hidden * model.expert_ffn,
        "head": 2 * model.hidden * model.padded_vocabulary,
    }


def step_flops(run: Run) -> float:
    """Model FLOPs of a step, forward and backward, as MFU counts them: nothing computed twice."""
    return 3 * run.tokens_per_step * sum(token_flops(run.model, run.training.seq_length).values())


def step_seconds(run: Run, machine: Machine, loss: str) -> dict[str, float]:
    """Seconds of a step on the slowest rank by what takes them; their sum is the step.

    Args:
        run: The run.
        machine: The machine.
        loss: A name of LOSSES.
    """
    layout, training = run.layout, run.training
    memory = machine.bandwidth * EFFICIENCY["memory"]
    layers = _layer_seconds(run, machine, passes=4 if training.recompute == "full" else 3)
    one = sum(layers.values())
    count = run.micro_batches
    found = {kind: seconds * count for kind, seconds in layers.items()}
    # The dense loss gathers the whole grid on every rank.
    whole = layout.tensor if loss == "dense" else 1
    found["loss"] = count * _head_seconds(run, machine, LOSS_PRODUCTS[loss], LOSS_PASSES[loss] * whole)
    if run.loss.online:
        found["teacher"] = count * teacher_seconds(run, machine)
    found["pipeline bubble"] = one * (layout.pipeline - 1) / layout.virtual
    found["data-parallel messages"] = _data_messages(run, machine, hidden=0.6 * one)
    dense, experts = rank_parameters(run.model, layout, 0)
    shards = layout.data * layout.context if training.distributed_optimizer else 1
    state = 2 * (training.optimizer_bytes + training.gradient_bytes)
    found["optimizer"] = state * (dense / shards + experts / max(1, layout.expert_data)) / memory
    return found


def teacher_seconds(run: Run, machine: Machine) -> float:
    """A teacher beside the student, a micro-batch: its forward, and its top K by one product and two passes."""
    beside = replace(run, model=run.teacher or run.model)
    return sum(_layer_seconds(beside, machine, passes=1).values()) + _head_seconds(beside, machine, 1, 2)


def _layer_seconds(run: Run, machine: Machine, passes: int) -> dict[str, float]:
    """A micro-batch through a rank's layers: 1 pass is forward, 3 with backward, 4 if all is computed twice."""
    layout = run.layout
    flops = token_flops(run.model, run.training.seq_length)
    share = run.tokens / (layout.tensor * layout.pipeline)
    found = {
        kind: passes * flops[kind] * share / (machine.flops * EFFICIENCY[kind])
        for kind in ("products", "attention", "experts")
    }
    everything = replace(run, training=replace(run.training, recompute=None))
    traffic = TRAFFIC * sum(layer_bytes(everything, layer) for layer in range(run.model.layers)) / layout.pipeline
    found["between products"] = passes / 3 * traffic / (machine.bandwidth * EFFICIENCY["memory"])
    found["messages in layers"] = run.model.layers / layout.pipeline * _layer_messages(run, machine) * passes / 3
    return found


def _head_seconds(run: Run, machine: Machine, products: int, passes: int) -> float:
    """A micro-batch through the head: products with its weight, and passes over a rank's float32 logits."""
    tokens = run.tokens / run.layout.tensor
    flops = products * token_flops(run.model, run.training.seq_length)["head"] * tokens
    grid = 4 * tokens * run.model.padded_vocabulary
    return flops / (machine.flops * EFFICIENCY["products"]) + passes * grid / (
        machine.bandwidth * EFFICIENCY["memory"]
    )


def _link(machine: Machine, first: int, last: int) -> float:
    """Bytes/s among ranks `first` ... `last` of neighbours; over the network as soon as they leave a node."""
    inside = last <= machine.gpus_per_node
    return (machine.nvlink if inside else machine.network) * EFFICIENCY["links"] if first < last else float("inf")


def _layer_messages(run: Run, machine: Machine) -> float:
    """Seconds a layer and micro-batch of messages that are waited for, forward and backward."""
    layout, model = run.layout, run.model
    tensor, context, expert = layout.tensor, layout.context, layout.expert
    whole = run.training.weight_bytes * run.tokens * model.hidden
    seconds = 0.0
    if tensor > 1 and not run.training.overlap_tensor:
        # Two gathers and two scatters forward, the same backward, and one gather again for each weight's gradient.
        seconds += 10 * whole * (tensor - 1) / tensor / _link(machine, 1, tensor)
    if context > 1:
        keys = 2 * model.groups * model.head_size * run.training.weight_bytes * run.tokens / tensor
        seconds += 3 * keys * (context - 1) / _link(machine, 1, tensor * context)
    if expert > 1 and any(model.moe):
        routed = model.top_experts * whole / (tensor if layout.sequence_parallel else 1)
        crossing = max(0.0, 1 - machine.gpus_per_node / expert)
        link = _link(machine, 1, min(expert, machine.gpus_per_node))
        sent = 4 * routed * (expert - 1) / expert * sum(model.moe) / model.layers
        seconds += sent * (1 - crossing) / link + sent * crossing / (machine.network * EFFICIENCY["links"])
    return seconds


def _data_messages(run: Run, machine: Machine, *, hidden: float) -> float:
    """Seconds of summing gradients and gathering weights that are not hidden behind `hidden` seconds of backward."""
    layout, training = run.layout, run.training
    dense, experts = rank_parameters(run.model, layout, 0)
    bytes_each = training.gradient_bytes + training.weight_bytes
    copies = layout.data * layout.context
    seconds = 0.0
    if copies > 1:
        link = _link(machine, 1, layout.tensor * copies)
        seconds += bytes_each * dense * (copies - 1) / copies / link
    if experts and layout.expert_data > 1:
        link = _link(machine, 1, layout.expert * layout.expert_tensor * layout.expert_data)
        seconds += bytes_each * experts * (layout.expert_data - 1) / layout.expert_data / link
    return max(0.0, seconds - hidden) if training.overlap_gradients else seconds


def step_summary(run: Run, machine: Machine) -> dict[str, dict[str, float]]:
    """By way to compute the loss: seconds a step, tokens/s, model TFLOP/s and MFU a GPU, and the seconds by part."""
    flops = step_flops(run)
    found = {}
    for name in LOSSES:
        parts = step_seconds(run, machine, name)
        seconds = sum(parts.values())
        rate = flops / seconds / run.layout.gpus
        found[name] = {
            "seconds": seconds,
            "tokens_per_second": run.tokens_per_step / seconds,
            "tflops_per_gpu": rate / 1e12,
            "mfu": rate / machine.flops,
            "parts": parts,
        }
    return found


def row_bytes(vocabulary: int, top_k: int) -> float:
    """Bytes of one token in a cache with the raw codec, its share of a block's checksum included."""
    planes = RowFormat(top_k, id_hi_bits=id_hi_bits(vocabulary)).data_planes(1)
    return sum(plane.row_bytes for plane in planes) + 8 / BLOCK_ROWS


def cache_figures(run: Run, machine: Machine, seconds: float) -> dict[str, float]:
    """The cache that serves the whole run, if no token of it is seen twice.

    Args:
        run: The run.
        machine: Builds it, too.
        seconds: Of a step.

    Returns:
        `bytes_per_token`, `tokens`, `bytes`; `build_gpu_hours`, the teacher's forward alone over the run's length of
        text; `build_hours` on the run's GPUs; `read_bytes_per_second` of the whole job, in which every
        tensor-parallel rank of the last stage reads for itself.
    """
    teacher = run.teacher or run.model
    each = row_bytes(run.model.vocabulary, run.loss.top_k)
    tokens = run.training.steps * run.tokens_per_step
    flops = token_flops(teacher, run.training.seq_length)
    shares = EFFICIENCY | {"head": EFFICIENCY["products"]}
    gpu_seconds = tokens * sum(count / (machine.flops * shares[kind]) for kind, count in flops.items())
    return {
        "bytes_per_token": each,
        "tokens": tokens,
        "bytes": each * tokens,
        "build_gpu_hours": gpu_seconds / 3600,
        "build_hours": gpu_seconds / 3600 / run.layout.gpus,
        "read_bytes_per_second": each * run.tokens_per_step / seconds * run.layout.tensor,
    }
