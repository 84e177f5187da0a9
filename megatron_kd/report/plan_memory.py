# SPDX-License-Identifier: Apache-2.0
"""Bytes of a run on one rank of each pipeline stage, by part: pure arithmetic, modelled.

In: a `Run`. Out: weights, gradients, optimizer, activations, loss. Parameters are exact (tests compare them with the
models that Megatron builds). The loss's formulas are exact counts of its tensors. Activations are a stated sum of what
the layers of Transformer Engine keep for backward, with flash attention and evenly routed tokens. Left out, and
allowed for by ALLOWANCE: CUDA's context, NCCL's buffers, fragments, what one kernel needs for itself.
"""

from dataclasses import replace

from megatron_kd.report.plan_shape import Layout, Loss, Model, Run

ALLOWANCE = 0.10
"""Share of a GPU's memory that a plan leaves free for what it does not count."""

PARTS = ("weights", "gradients", "optimizer", "activations", "loss", "teacher")
"""What fills a rank; the last only where the teacher runs beside the student."""
LOSSES = {
    "dense": Loss(method="dense"),
    "forward_chunked": Loss(method="forward_chunked"),
    "fused": Loss(method="fused"),
    "fused, recompute": Loss(method="fused", gradient="recompute"),
}
"""The ways to compute the loss that a plan compares, by the name it gives them."""

STRIP_BYTES = 700 << 20
"""Logits of a strip that the loss chooses by itself; a test compares it with megatron_kd.loss."""
_SCRATCH = 16 << 20
_SELECTIVE = {"core_attn", "layernorm", "moe_act", "mlp", "moe"}


def layer_indices(model: Model, layout: Layout, stage: int) -> list[int]:
    """Which layers a stage holds: contiguous, or with virtual stages one run of layers for each."""
    counts = layout.stages(model.layers)
    found, at = [], 0
    for _ in range(layout.virtual):
        for number, count in enumerate(counts):
            size = count // layout.virtual
            if number == stage:
                found += range(at, at + size)
            at += size
    return found


def rank_parameters(model: Model, layout: Layout, stage: int) -> tuple[int, int]:
    """Parameters on one rank of a stage: (all but the routed experts, routed experts)."""
    tensor, hidden = layout.tensor, model.hidden
    queries, keys = model.heads * model.head_size, model.groups * model.head_size
    norm = model.norm_vectors * hidden
    attention = (2 * hidden * (queries + keys) + (queries + 2 * keys) * model.qkv_bias) // tensor
    attention += hidden * model.bias + 2 * norm + 2 * model.norm_vectors * model.head_size * model.qk_norm
    attention += model.heads // tensor * model.sinks
    up = 2 if model.gated else 1

    def mlp(width: int, ways: int) -> int:
        return ((up + 1) * hidden * width + up * width * model.bias) // ways + hidden * model.bias

    router = model.experts * (hidden + model.bias)
    router += mlp(model.shared_ffn, tensor) if model.shared_ffn else 0
    dense = experts = 0
    for layer in layer_indices(model, layout, stage):
        has_experts = bool(model.moe) and model.moe[layer]
        dense += attention + (router if has_experts else mlp(model.ffn, tensor))
        experts += has_experts * (model.experts // layout.expert) * mlp(model.expert_ffn, layout.expert_tensor)
    first, last = stage == 0, stage == layout.pipeline - 1
    vocabulary = model.padded_vocabulary // tensor * hidden
    dense += vocabulary * (first + (last and not (model.tied and first)))
    return dense + norm * last + model.learned_positions * hidden * first, experts


def total_parameters(model: Model) -> int:
    """Of the whole model, once."""
    return sum(rank_parameters(model, Layout(gpus=1), 0))


def state_bytes(run: Run, stage: int) -> dict[str, float]:
    """Weights, gradients and optimizer of one rank of a stage."""
    training, layout = run.training, run.layout
    dense, experts = rank_parameters(run.model, layout, stage)
    shards = (layout.data * layout.context, layout.expert_data) if training.distributed_optimizer else (1, 1)
    return {
        "weights": training.weight_bytes * (dense + experts),
        "gradients": training.gradient_bytes * (dense + experts),
        "optimizer": training.optimizer_bytes * (dense / shards[0] + experts / shards[1]),
    }


def layer_bytes(run: Run, layer: int) -> float:
    """What one layer keeps of one micro-batch for its backward, in the dtype of the weights.

    The inputs and outputs of both norms; q, k, v and the output of attention; of an MLP both halves of the gated
    projection and their product; of experts also the routed tokens before and after. Selective recomputation leaves
    out what it computes again.
    """
    model, layout, training = run.model, run.layout, run.training
    along_sequence = layout.tensor if layout.sequence_parallel else 1
    again = set(training.recompute_modules) if training.recompute == "selective" else set()
    hidden = model.hidden / along_sequence
    elements = 4 * hidden - 2 * hidden * ("layernorm" in again)
    elements += 2 * (model.heads + model.groups) * model.head_size / layout.tensor
    up = 2 if model.gated else 1
    if model.moe and model.moe[layer]:
        routed = model.top_experts / along_sequence
        if "moe" not in again:
            elements += routed * 2 * model.hidden * layout.expert_tensor
            elements += routed * (up + ("moe_act" not in again)) * model.expert_ffn
            elements += (up + 1) * model.shared_ffn / layout.tensor
    elif "mlp" not in again:
        elements += (up + 1) * model.ffn / layout.tensor
    return training.weight_bytes * run.tokens * elements


def activation_bytes(run: Run, stage: int) -> float:
    """What the layers of a stage keep at the fullest moment.

    Pipelines: by Megatron's warm-up, the first stage has the most micro-batches under way; with virtual stages more.
    """
    layout, training = run.layout, run.training
    layers = layer_indices(run.model, layout, stage)
    each = [layer_bytes(run, layer) for layer in layers]
    tokens = run.tokens / (layout.tensor if layout.sequence_parallel else 1)
    input_bytes = training.weight_bytes * tokens * run.model.hidden
    if training.recompute == "full":
        size = training.recompute_layers
        if training.recompute_method == "block":
            again = size * layout.virtual
            kept, working = sum(each[again:]) + again * input_bytes, max(each, default=0)
        else:
            kept, working = len(each) / size * input_bytes, size * max(each, default=0)
    else:
        kept, working = sum(each), 0
    if layout.virtual > 1:
        chunks = 2 * (layout.pipeline - stage - 1) + (layout.virtual - 1) * layout.pipeline + 1
        under_way = min(chunks / layout.virtual, run.micro_batches)
    else:
        under_way = min(layout.pipeline - stage, run.micro_batches)
    last = stage == layout.pipeline - 1
    return under_way * kept + working + last * 2 * input_bytes  # the final norm's input, and the head's


def default_strip(columns: int) -> int:
    """Tokens of a strip where the user names none."""
    return max(128, STRIP_BYTES // (4 * columns) // 128 * 128)


def loss_bytes(run: Run, loss: Loss) -> float:
    """Peak of the loss on a rank of the last stage, beyond the head's weight, its main_grad and the hidden states.

    Counts of the tensors of megatron_kd.loss with labels, in float32, forward and backward. N tokens, V vocabulary, v
    columns of a rank, H hidden size, K teacher entries, c tokens of a strip:
        dense            29 N V + 4 v H + 4 N H + N (12 K + 27)
        forward-chunked  8 N v + 29 c v + 4 v H + 4 N H + N (8 K + 18) + c (12 K + 46)
        fused            4 c v + 4 v H + 2 N H / SP + N (8 K + 20), and of a strip's hidden states on their way
                         between ranks 12 c H; "recompute" adds to a float32 gradient in place, so without the 4 v H
    """
    model, layout = run.model, run.layout
    N, V, H, K = run.tokens, model.vocabulary, model.hidden, loss.top_k
    columns = -(-V // layout.tensor)
    v = model.padded_vocabulary // layout.tensor
    c = min(N, loss.strip_tokens or default_strip(columns))
    if loss.method == "dense":
        return 29 * N * V + 4 * v * H + 4 * N * H + N * (12 * K + 27)
    if loss.method == "forward_chunked":
        return 8 * N * v + 29 * c * v + 4 * v * H + 4 * N * H + N * (8 * K + 18) + c * (12 * K + 46)
    in_place = loss.gradient == "recompute" and run.training.gradient_bytes == 4
    travels = 12 * c * H if layout.tensor > 1 and c < N else 0
    own_rows = N / (layout.tensor if layout.sequence_parallel else 1)
    weight_gradient = 0 if in_place else 4 * v * H
    return 4 * c * v + weight_gradient + 2 * own_rows * H + N * (8 * K + 20) + travels + 13 * c * K + _SCRATCH


def teacher_bytes(run: Run) -> tuple[float, float]:
    """A teacher beside the student on one rank, at the student's layout, without a pipeline: (its weights, what its
    forward needs for a moment: one layer, and a strip of logits).
    """
    teacher = run.teacher or run.model
    beside = replace(run, model=teacher, training=replace(run.training, recompute=None))
    layout = run.layout
    columns = teacher.padded_vocabulary // layout.tensor
    strip = min(run.tokens, run.loss.strip_tokens or default_strip(columns))
    tokens = run.tokens / (layout.tensor if layout.sequence_parallel else 1)
    layer = max(layer_bytes(beside, layer) for layer in range(teacher.layers))
    forward = layer + 2 * run.training.weight_bytes * tokens * teacher.hidden + 4 * strip * columns
    return run.training.weight_bytes * sum(rank_parameters(teacher, layout, 0)), forward


def stage_memory(run: Run, stage: int, loss: Loss | None = None) -> dict[str, float]:
    """Bytes by part (PARTS) of one rank of a stage."""
    last, loss = stage == run.layout.pipeline - 1, loss or run.loss
    found = {
        **state_bytes(run, stage),
        "activations": activation_bytes(run, stage),
        "loss": loss_bytes(run, loss) if last else 0,
    }
    if loss.online:  # it sees a micro-batch before the student does, whose activations are not there yet
        weights, forward = teacher_bytes(run)
        found["teacher"] = weights + max(0, forward - found["activations"] - found["loss"])
    return found


def rank_memory(run: Run, loss: Loss | None = None) -> dict[str, float]:
    """Bytes by part on the fullest rank."""
    stages = (stage_memory(run, stage, loss) for stage in range(run.layout.pipeline))
    return max(stages, key=lambda parts: sum(parts.values()))


def losses_of(run: Run) -> dict[str, Loss]:
    """LOSSES with the run's own K and strip."""
    return {name: replace(run.loss, method=loss.method, gradient=loss.gradient) for name, loss in LOSSES.items()}


def by_loss(run: Run) -> dict[str, dict[str, float]]:
    """`rank_memory` for each way to compute the loss."""
    return {name: rank_memory(run, loss) for name, loss in losses_of(run).items()}


def unmodelled(run: Run) -> list[str]:
    """Recompute modules that the arithmetic does not know, so that it counts too much."""
    modules = run.training.recompute_modules if run.training.recompute == "selective" else ()
    return [f"recompute module {name!r} is counted as kept" for name in modules if name not in _SELECTIVE]
