# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from: a run and a machine as plain figures.

In: numbers, read from a recipe (megatron_kd.bridge.planning) or written down. Out: nothing but what follows from them
without a model of anything: ranks by axis, layers by stage, micro-batches a step. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from megatron_kd.errors import UserError

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and what it is tied to."""

    name: str
    memory: float
    """Bytes a GPU."""
    flops: float
    """Dense bf16 FLOP/s of a GPU, as its maker states them."""
    bandwidth: float
    """Bytes/s between a GPU and its memory."""
    nvlink: float
    """Bytes/s one way between GPUs of a node."""
    network: float
    """Bytes/s one way of a GPU to other nodes."""
    gpus_per_node: int = 8


# The makers' data sheets; dense rates, not those with sparsity; NVLink's two-way figure halved; 400 Gbit/s a GPU.
MACHINES = {
    "h200": Machine(name="H200", memory=141 * GB, flops=989e12, bandwidth=4.8e12, nvlink=450e9, network=50e9),
    "b200": Machine(name="B200", memory=180 * GB, flops=2250e12, bandwidth=8.0e12, nvlink=900e9, network=50e9),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT of Megatron's. Per-layer settings are tuples with one entry a layer."""

    name: str
    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_size: int
    ffn: int
    vocabulary: int
    padded_vocabulary: int
    """Rows of the embedding and of the head, over all tensor-parallel ranks."""
    windows: tuple[int | None, ...]
    """Positions a layer's attention sees; None: all before."""
    experts: int = 0
    moe: tuple[bool, ...] = ()
    """Which layers have experts."""
    top_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of the experts that every token passes."""
    tied: bool = False
    gated: bool = True
    bias: bool = False
    """Whether linear layers have one."""
    qkv_bias: bool = False
    norm_vectors: int = 1
    """Vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    qk_norm: bool = False
    sinks: bool = False
    learned_positions: int = 0

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """From plain values, with lists in place of tuples."""
        return cls(**found | {"windows": tuple(found["windows"]), "moe": tuple(found["moe"])})

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.windows)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the run is spread over GPUs, in Megatron's words."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def data(self) -> int:
        """Data-parallel ranks, context parallelism not counted."""
        return self.gpus // self.least_gpus_dense

    @property
    def least_gpus_dense(self) -> int:
        """GPUs of one replica of what is not an expert."""
        return self.tensor * self.pipeline * self.context

    @property
    def least_gpus(self) -> int:
        """The fewest that hold one replica of everything."""
        experts = self.expert * self.expert_tensor * self.pipeline
        least = self.least_gpus_dense
        while least % experts:
            least += self.least_gpus_dense
        return least

    @property
    def expert_data(self) -> int:
        """Replicas of an expert."""
        return self.gpus // (self.expert * self.expert_tensor * self.pipeline)

    def stages(self, layers: int) -> list[int]:
        """Layers of each pipeline stage.

        Raises:
            UserError: they do not divide.
        """
        ends = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: count for stage, count in ends.items() if count is not None}
        rest, open_stages = layers - sum(given.values()), self.pipeline - len(given)
        if rest % max(open_stages, 1) or (not open_stages and rest):
            raise UserError(f"{layers} layers do not divide over {self.pipeline} pipeline stages.")
        return [given.get(stage, rest // max(open_stages, 1)) for stage in range(self.pipeline)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batch, precision and what is kept."""

    seq_length: int
    micro_batch: int
    global_batch: int
    steps: int
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    """A parameter: the fp32 weight and Adam's two moments; 8 where the weights themselves are fp32."""
    distributed_optimizer: bool = True
    recompute: str | None = None
    """None, "selective" or "full"."""
    recompute_modules: tuple[str, ...] = ()
    recompute_method: str = "uniform"
    """With "full": of every group of `recompute_layers` layers the input alone is kept ("uniform"), or the first
    `recompute_layers` of each chunk are computed again ("block")."""
    recompute_layers: int = 1
    overlap_gradients: bool = False
    overlap_tensor: bool = False


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The settings of the distillation loss, and of the cache it reads."""

    method: str = "fused"
    gradient: str = "forward"
    top_k: int = 100
    strip_tokens: int | None = None
    online: bool = False
    """The teacher runs beside the student, at its layout, instead of being read from a cache."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as plain figures."""

    model: Model
    layout: Layout
    training: Training
    loss: Loss = field(default_factory=Loss)
    teacher: Model | None = None
    """None: the teacher of the cache is as large as the student."""

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """From what `dataclasses.asdict` makes of one, also after JSON."""
        training, teacher = found["training"], found.get("teacher")
        return cls(
            model=Model.of(found["model"]),
            layout=Layout(**found["layout"]),
            training=Training(**training | {"recompute_modules": tuple(training["recompute_modules"])}),
            loss=Loss(**found["loss"]),
            teacher=Model.of(teacher) if teacher else None,
        )

    @property
    def micro_batches(self) -> int:
        """Of one data-parallel rank in one step."""
        return max(1, self.training.global_batch // (self.training.micro_batch * self.layout.data))

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one context-parallel rank."""
        return self.training.micro_batch * self.training.seq_length // self.layout.context

    @property
    def tokens_per_step(self) -> int:
        """Of the whole job."""
        return self.training.global_batch * self.training.seq_length
