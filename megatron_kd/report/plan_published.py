# SPDX-License-Identifier: Apache-2.0
"""The figures published for the method (arXiv 2608.03796) beside what the plan's arithmetic says of the same shapes.

In: nothing. Out: rows of what, published, modelled, deviation and why. Costs milliseconds. What was published leaves
layouts, recomputation and GPUs partly open; where a figure depends on them, the row says what was assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import wrap

from megatron_kd.report.plan import smallest_nodes
from megatron_kd.report.plan_memory import LOSSES, loss_bytes, rank_memory, total_parameters
from megatron_kd.report.plan_shape import GB, MACHINES, Layout, Loss, Model, Run, Training
from megatron_kd.report.plan_time import step_flops, step_summary
from megatron_kd.report.table import format_table

GIB = 1 << 30
_DENSE_WHY = (
    "ours is an oracle: it keeps 7 grids of the whole vocabulary in float32 (29 bytes a logit); 14 bytes a logit "
    "would be 85.9 GiB at 32K"
)


def gpt_oss(layers: int, experts: int, name: str) -> Model:
    """GPT-OSS as published: windows of 128 positions in every other layer."""
    return Model(
        name=name,
        hidden=2880,
        heads=64,
        groups=8,
        head_size=64,
        ffn=2880,
        vocabulary=201088,
        padded_vocabulary=201088,
        windows=tuple(None if layer % 2 else 128 for layer in range(layers)),
        experts=experts,
        moe=(True,) * layers,
        top_experts=4,
        expert_ffn=2880,
        bias=True,
        qkv_bias=True,
        sinks=True,
    )


def llama(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool, name: str) -> Model:
    """A Llama 3 with 8 key-value heads of 128."""
    return Model(
        name=name,
        hidden=hidden,
        heads=heads,
        groups=8,
        head_size=128,
        ffn=ffn,
        vocabulary=128256,
        padded_vocabulary=128256,
        windows=(None,) * layers,
        moe=(False,) * layers,
        tied=tied,
    )


GPT_OSS_20B, GPT_OSS_120B = gpt_oss(24, 32, "gpt-oss-20b"), gpt_oss(36, 128, "gpt-oss-120b")
LLAMA_8B = llama(32, 4096, 32, 14336, tied=False, name="Llama 3.1 8B")
LLAMA_3B = llama(28, 3072, 24, 8192, tied=True, name="Llama 3.2 3B")


@dataclass(frozen=True)
class Point:
    """One published figure and ours."""

    what: str
    published: float
    modelled: float | None
    """None: the arithmetic finds none."""
    unit: str
    why: str
    """Why they differ, or what was assumed."""

    @property
    def deviation(self) -> float | None:
        """Ours relative to theirs, minus 1."""
        return None if self.modelled is None else self.modelled / self.published - 1


def loss_alone(model: Model, tokens: int, loss: Loss) -> float:
    """Peak bytes of the loss on one GPU with all that it starts from: head, hidden states; its gradients included."""
    training = Training(seq_length=tokens, micro_batch=1, global_batch=1, steps=1)
    inputs = 2 * model.hidden * (tokens + model.padded_vocabulary)
    return inputs + loss_bytes(Run(model=model, layout=Layout(gpus=1), training=training), loss)


def published_points() -> list[Point]:
    """Every point, in the order of the announcement."""
    return [*_loss_at_four_samples(), *_llama(), *_long_context(), *_gpt_oss_20b()]


def _loss_at_four_samples() -> Iterator[Point]:
    tokens = 4 * 32768
    grid = 2 * tokens * GPT_OSS_120B.vocabulary
    yield Point("GPT-OSS 120B, 32K x 4: one teacher tensor in bf16", 50, grid / GB, "GB", "theirs is rounded")
    whole = "theirs is a whole iteration's peak at a layout that is not stated; ours the loss alone on one GPU"
    dense, fused = (loss_alone(GPT_OSS_120B, tokens, LOSSES[name]) / GB for name in ("dense", "fused"))
    yield Point("GPT-OSS 120B, 32K x 4: peak, dense", 250, dense, "GB", f"{whole}; {_DENSE_WHY}")
    yield Point("GPT-OSS 120B, 32K x 4: peak, fused", 128, fused, "GB", f"{whole}; what is theirs beyond is the model")


def _llama() -> Iterator[Point]:
    training = Training(
        seq_length=8192, micro_batch=1, global_batch=32, steps=1, recompute="full", distributed_optimizer=False
    )
    run = Run(model=LLAMA_3B, layout=Layout(gpus=1), training=training)
    kept = replace(run, training=replace(training, recompute=None))
    teacher = 2 * total_parameters(LLAMA_8B)
    for name, published, beside in (("dense", 102.8, teacher), ("fused", 58.3, 0)):
        again, whole = ((sum(rank_memory(one, LOSSES[name]).values()) + beside) / GB for one in (run, kept))
        why = (
            f"assumes full recomputation, which theirs does not state; without it {whole:.1f} GB. "
            "Megatron's fp32 gradients and Adam are 18 bytes a parameter"
        )
        what = "online, dense" if beside else "offline, fused"
        yield Point(f"8B to 3.2B at 8K, one H200: peak, {what}", published, again, "GB", why)


def _long_context() -> Iterator[Point]:
    for what, name, tokens, published, why in (
        ("32K", "dense", 1 << 15, 85.2, _DENSE_WHY),
        ("32K", "fused", 1 << 15, 5.45, "strips of 700 MB of logits, one buffer, rounded gradients in place"),
        (
            "256K",
            "forward_chunked",
            1 << 18,
            134.2,
            "ours keeps logits and their gradient in float32, 8 bytes a logit; theirs is 2.7, so bf16, which costs 7 "
            "to 48 % of the gradient's accuracy",
        ),
        ("256K", "fused", 1 << 18, 11.6, "grows with hidden states and teacher rows alone"),
    ):
        modelled = loss_alone(GPT_OSS_120B, tokens, LOSSES[name]) / GIB
        yield Point(f"Loss alone, {what}: {name}", published, modelled, "GiB", why)


def _gpt_oss_20b() -> Iterator[Point]:
    h200 = MACHINES["h200"]
    training = Training(seq_length=32768, micro_batch=1, global_batch=32, steps=1, overlap_gradients=True)
    one_node = Run(
        model=GPT_OSS_20B, layout=Layout(gpus=8, tensor=4, expert=8, sequence_parallel=True), training=training
    )
    wide = Layout(gpus=32, tensor=4, context=8, expert=8, sequence_parallel=True)
    four_nodes = replace(one_node, layout=wide, training=replace(training, global_batch=128))
    own = "TP=4, without context parallelism: our dense loss gathers the whole vocabulary on each rank, 192 GB at 32K"
    dense = smallest_nodes(one_node, h200, LOSSES["dense"])
    yield Point("GPT-OSS 20B at 32K: nodes, before", 4, dense, "nodes", f"{own}. With CP=8 one node holds it")
    fused = smallest_nodes(one_node, h200, LOSSES["fused"])
    yield Point("GPT-OSS 20B at 32K: nodes, fused", 1, fused, "nodes", "H200, TP=4, EP=8")
    batch = (
        "time x TFLOP/s x GPUs is 33.8 PFLOP on one node and four times that on four, so 32 and 128 samples a step "
        "are assumed, and H200s"
    )
    before, after = step_summary(four_nodes, h200)["dense"], step_summary(one_node, h200)["fused"]
    slow = "; theirs reach 7.5 % of an H200's peak, with a layout (and perhaps a teacher beside) that is not stated"
    yield Point("GPT-OSS 20B at 32K: step, four nodes", 57.0, before["seconds"], "s", batch + slow)
    yield Point(
        "GPT-OSS 20B at 32K: step, one node", 12.23, after["seconds"], "s", f"{batch}; a roofline has no stalls"
    )
    yield Point(
        "GPT-OSS 20B at 32K: work of a step, one node",
        345.7e12 * 12.23 * 8 / 1e15,
        step_flops(one_node) / 1e15,
        "PFLOP",
        "32 samples; windows and causal attention counted",
    )
    yield Point(
        "GPT-OSS 20B at 32K: rate, one node", 345.7, after["tflops_per_gpu"], "TFLOP/s/GPU", "as the step's time"
    )


def published_table() -> str:
    """The points side by side, and below it why they differ."""
    points = published_points()
    rows = [
        [
            f"{number}. {point.what}",
            f"{point.published:.4g} {point.unit}",
            "none" if point.modelled is None else f"{point.modelled:.4g} {point.unit}",
            "" if point.deviation is None else f"{point.deviation:+.0%}",
        ]
        for number, point in enumerate(points, start=1)
    ]
    notes = [
        "\n".join(wrap(f"{number}. {point.why}.", 110, subsequent_indent="   "))
        for number, point in enumerate(points, start=1)
    ]
    return "\n".join([format_table(["figure", "published", "modelled", "deviation"], rows), "", *notes])
