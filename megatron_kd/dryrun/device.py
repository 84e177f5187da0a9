# SPDX-License-Identifier: Apache-2.0
"""Makes this process believe that its CPU is a GPU, so that the stock Megatron-Bridge loop runs on it over gloo.

In: nothing but the call of `enable`. Out: patched `torch.cuda`, `torch.distributed` and Megatron names, for the life
of the process, and megatron.bridge imported (about 25 s, once). Cost afterwards: a few microseconds per torch call
for redirecting device arguments. Nothing is patched by importing this module.
"""

import builtins
import contextlib
import functools
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
PRETENDED_MEMORY_BYTES = 24 << 30

_enabled = False
_applied: list["Patch"] = []
_active_modes: list[TorchFunctionMode] = []


class Patch(NamedTuple):
    """One name that is replaced, and the reason."""

    owner: Any
    name: str
    replacement: Any
    why: str


def enable() -> None:
    """Patch this process for CPU ranks and import megatron.bridge. A second call does nothing.

    Must run before megatron.bridge is imported: without Transformer Engine that import fails otherwise.
    """
    global _enabled
    if _enabled:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled kernels would target the pretended GPU
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asserts it; it means nothing here
    _read_cuda_names_before_they_change()
    _apply(_torch_patches())
    mode = _DeviceArguments()
    mode.__enter__()
    _active_modes.append(mode)
    _import_megatron_bridge()
    _apply(_megatron_patches())
    _introduce_our_layers()
    _enabled = True
    logger.info(describe())


def is_enabled() -> bool:
    """Whether `enable` has patched this process."""
    return _enabled


def describe() -> str:
    """What `enable` has done to this process, a line for each reason."""
    names: dict[str, list[str]] = {}
    for patch in _applied:
        names.setdefault(patch.why, []).append(f"{_name_of(patch.owner)}.{patch.name}")
    lines = [f"  {', '.join(replaced)}: {why}" for why, replaced in names.items()]
    return "\n".join(["CPU rank. Device arguments go to the CPU; replaced, and why:", *lines])


def _apply(patches: list[Patch]) -> None:
    for patch in patches:
        setattr(patch.owner, patch.name, patch.replacement)
        _applied.append(patch)


def _name_of(owner: Any) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))


def _read_cuda_names_before_they_change() -> None:
    """Dynamo lists torch's callables once, by looking them up; plain Python replacements would confuse it."""
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()


# Device arguments


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True  # an index names a GPU
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _DeviceArguments(TorchFunctionMode):
    """Turns `device="cuda"` (or an index) into the CPU, in every torch function and tensor method."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if len(args) > 1 and getattr(func, "__name__", "") == "to" and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


# torch


class _Stream:
    """Work on a CPU rank is done when the call returns, so there is nothing to wait for."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: object) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """See `_Stream`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _returns(value: Any) -> Callable:
    return lambda *args, **kwargs: value


def _torch_patches() -> list[Patch]:
    return _cuda_query_patches() + _cuda_work_patches() + _random_patches() + _tensor_patches() + _gloo_patches()


def _cuda_query_patches() -> list[Patch]:
    properties = types.SimpleNamespace(
        total_memory=PRETENDED_MEMORY_BYTES, major=9, minor=0, name="cpu", multi_processor_count=1
    )
    why_zero = "the CPU has no device memory to report"
    answers = {
        "is_available": (True, "Megatron refuses to start without a GPU"),
        "device_count": (1, "one pretended device per rank"),
        "current_device": (CPU, "what Megatron allocates on"),
        "get_device_capability": ((9, 0), "recipes branch on the architecture; Hopper is the plain case"),
        "get_device_properties": (properties, "memory reports ask for it"),
        "get_device_name": ("cpu", "the log asks for it"),
        "mem_get_info": ((PRETENDED_MEMORY_BYTES,) * 2, "memory reports ask for it"),
        "is_current_stream_capturing": (False, "there are no CUDA graphs"),
        "memory_allocated": (0, why_zero),
        "max_memory_allocated": (0, why_zero),
        "memory_reserved": (0, why_zero),
        "max_memory_reserved": (0, why_zero),
        "memory_stats": ({}, why_zero),
    }
    return [Patch(torch.cuda, name, _returns(value), why) for name, (value, why) in answers.items()]


def _cuda_work_patches() -> list[Patch]:
    cuda, nothing = torch.cuda, _returns(None)
    idle = ["set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream", "reset_peak_memory_stats"]
    why_type = "Megatron compares tensor types with it"
    type_names = ["Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte"]
    return [
        *(Patch(cuda, name, nothing, "nothing runs asynchronously, nothing is cached") for name in idle),
        Patch(cuda.nvtx, "range_push", nothing, "no profiler ranges without the CUDA driver"),
        Patch(cuda.nvtx, "range_pop", nothing, "no profiler ranges without the CUDA driver"),
        Patch(cuda, "Stream", _Stream, "every call is finished when it returns"),
        Patch(cuda, "Event", _Event, "every call is finished when it returns"),
        Patch(cuda, "current_stream", lambda *args, **kwargs: _Stream(), "every call is finished when it returns"),
        Patch(cuda, "default_stream", lambda *args, **kwargs: _Stream(), "every call is finished when it returns"),
        Patch(cuda, "stream", lambda stream: contextlib.nullcontext(), "every call is finished when it returns"),
        *(Patch(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"), why_type) for name in type_names),
    ]


def _random_patches() -> list[Patch]:
    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    why = "the CPU generator stands for the GPU's"
    functions = {"get_rng_state": get_state, "set_rng_state": set_state, "manual_seed": seed, "manual_seed_all": seed}
    modules = (torch.cuda, torch.cuda.random)  # both names are in use
    patches = [Patch(module, name, new, why) for module in modules for name, new in functions.items()]
    return [*patches, Patch(torch.cuda, "initial_seed", torch.initial_seed, why)]


def _tensor_patches() -> list[Patch]:
    tensor_type = torch.Tensor.type

    def type_as_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        if not isinstance(answer, str) or ".cuda." in answer:  # a function mode calls the patched method once more
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return [
        Patch(torch.Tensor, "cuda", same, "it is there already"),
        Patch(torch.nn.Module, "cuda", same, "it is there already"),
        Patch(torch.Tensor, "pin_memory", same, "no copy to a GPU follows"),
        Patch(torch.Tensor, "record_stream", _returns(None), "every call is finished when it returns"),
        Patch(torch.Tensor, "type", type_as_on_gpu, "Megatron's optimizers sort parameters by it"),
        Patch(
            torch.optim.Optimizer,
            "_accelerator_graph_capture_health_check",
            _returns(None),
            "it asks the driver whether a CUDA graph is being captured",
        ),
    ]


def _gloo_patches() -> list[Patch]:
    distributed = torch.distributed
    all_to_all_single, barrier = distributed.all_to_all_single, distributed.barrier

    def integers(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    @functools.wraps(all_to_all_single)
    def all_to_all(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        output_sizes, input_sizes = integers(output_split_sizes), integers(input_split_sizes)
        return all_to_all_single(output, input, output_sizes, input_sizes, group=group, async_op=async_op)

    @functools.wraps(barrier)
    def barrier_without_devices(group=None, async_op=False, device_ids=None, timeout=None):
        return barrier(group=group, async_op=async_op)

    return [
        Patch(distributed, "all_to_all_single", all_to_all, "gloo takes split sizes as integers, Megatron has arrays"),
        Patch(distributed, "barrier", barrier_without_devices, "gloo refuses device_ids"),
    ]


# Megatron


def _import_megatron_bridge() -> None:
    """Import it as on a machine without Transformer Engine, which every module but one copes with."""
    # That logger prints a traceback per optional GPU symbol it does not find, and sets its own level.
    logging.getLogger("megatron.bridge.utils.import_utils").addFilter(lambda record: record.levelno > logging.INFO)
    with warnings.catch_warnings(), _placeholder_transformer_engine(importer="megatron.bridge.peft.lora_layers"):
        warnings.simplefilter("ignore")  # a dozen times "Transformer Engine and Apex are not installed"
        import megatron.bridge  # noqa: F401
        import megatron.bridge.training.pretrain  # noqa: F401


@contextlib.contextmanager
def _placeholder_transformer_engine(importer: str) -> Iterator[None]:
    """While active, the module `importer` gets an empty shell as Transformer Engine; all others see the truth."""
    shell = types.SimpleNamespace
    classes = {name: type(name, (torch.nn.Module,), {}) for name in ("Linear", "LayerNormLinear", "Sequential")}
    ops = shell(Sequential=classes.pop("Sequential"))
    transformer_engine = shell(pytorch=shell(**classes, ops=ops))
    real_import = builtins.__import__

    def import_for(name, globals=None, locals=None, fromlist=(), level=0):
        if name == "transformer_engine.pytorch" and globals and globals.get("__name__") == importer:
            return transformer_engine
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_for
    try:
        yield
    finally:
        builtins.__import__ = real_import


def _megatron_patches() -> list[Patch]:
    import megatron.bridge.training.initialize as initialize
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs
    import megatron.core.tensor_parallel.layers as tensor_parallel
    import megatron.core.tensor_parallel.random as random
    import megatron.core.utils as utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    from megatron_kd.dryrun import adam, layers, partition

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    return [
        *(
            Patch(
                tensor_parallel,
                name,
                _skipping_groups_of_one(getattr(tensor_parallel, name)),
                "autograd refuses SequentialMLP's in-place bias addition to what an identity collective returns",
            )
            for name in ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")
        ),
        Patch(random, "_set_cuda_rng_state", set_state, "it reaches past torch.cuda for the GPU's generator"),
        *(
            Patch(Optimizer, name, mend(getattr(Optimizer, name)), "checkpoints of torch's Adam; see adam.py")
            for name, mend in (
                ("state_dict", adam.with_state),
                ("load_state_dict", adam.with_own_steps),
                ("_set_main_param_and_optimizer_states", adam.without_steps),
            )
        ),
        Patch(
            layer_specs,
            "get_gpt_mtp_block_spec",
            layers.with_local_modules(layer_specs.get_gpt_mtp_block_spec),
            "Bridge asks it for Transformer Engine's modules",
        ),
        Patch(
            utils,
            "tex",
            types.SimpleNamespace(thd_get_partitioned_indices=partition.packed_positions),
            "context-parallel ranks ask Transformer Engine for their part of packed sequences",
        ),
        Patch(
            initialize,
            "compile_helpers",
            _returns(None),
            "the wheel ships the compiled dataset helpers without their Makefile, and exits where make fails",
        ),
    ]


def _skipping_groups_of_one(collective: Callable) -> Callable:
    @functools.wraps(collective)
    def skip(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> torch.Tensor:
        alone = group is not None and group.size() == 1
        return tensor if alone else collective(tensor, *args, group=group, **kwargs)

    return skip


def _introduce_our_layers() -> None:
    """So that Bridge's weight conversion and its saved run configurations accept them."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    from megatron_kd.dryrun.layers import CpuAttention

    AutoMapping.register_module_type(CpuAttention.__name__, "column")  # its softmax offset, one per local head
    register_allowed_target_prefix("megatron_kd.")
