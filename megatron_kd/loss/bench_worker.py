# SPDX-License-Identifier: Apache-2.0
"""Measures one method in a process of its own, so that its peak memory is its own.

    python -m megatron_kd.loss.bench_worker REQUEST.json RESULT.json

In: a shape, a method, how often. Out: seconds of each repeat, forward and backward, and of the limit measured just
before it; FLOPs counted by torch; peak memory beyond what was there before the call; the error of both gradients
against float64. The limit are the three products of hidden, weight and logit gradient alone, strip by strip into
buffers made before: no loss with these operands can take less. Method and limit take turns, so a machine that slows
down slows both.

Legend: N tokens, n tokens of a strip, H hidden size, V columns.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.loss.bench_methods import BenchInputs, BenchShape, Method, load_method, make_inputs
from megatron_kd.loss.row_kernels import use_triton

OK, ABSENT, OUT_OF_MEMORY, FAILED = "ok", "absent", "out of memory", "failed"

OPERAND_SPREAD = 1e-3
"""Of the numbers that stand for a logit gradient in the limit's products, where it cannot be the logits themselves."""


@dataclass(frozen=True)
class BenchRequest:
    """What one process is asked for."""

    method: str
    shape: BenchShape
    repeats: int
    error_tokens: int
    """The gradients are compared with float64 on so many tokens of the same inputs."""
    threads: int | None = None
    """Of torch on CPU; None: as torch chooses."""

    def to_json(self) -> str:
        """For the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BenchRequest":
        """In the process."""
        fields = json.loads(text)
        return cls(**fields | {"shape": BenchShape(**fields["shape"])})


class GemmLimit:
    """The three products of a loss and nothing else, strip by strip into the same buffers.

    They are taken as a loss would: bf16 on CUDA with float32 results; otherwise all in the dtype of hidden. The logit
    gradient is the strip of logits itself; on CUDA, where those are float32, it is a bf16 strip of small numbers.
    """

    def __init__(self, inputs: BenchInputs, strip: int):
        self.hidden, self.weight, self.strip = inputs.hidden.detach(), inputs.weight.detach(), strip
        self.mixed = self.hidden.is_cuda and self.hidden.dtype == torch.bfloat16
        wide = torch.float32 if self.mixed else self.hidden.dtype
        self.logits = self.hidden.new_empty(strip, len(self.weight), dtype=wide)
        self.operand = self.logits
        if self.mixed:
            self.operand = self.hidden.new_empty(strip, len(self.weight)).normal_(0, OPERAND_SPREAD)
        self.grad_hidden = torch.empty_like(self.hidden)
        self.grad_weight = torch.zeros_like(self.weight, dtype=wide)

    def __call__(self) -> None:
        """Take the 3 * 2 * N * H * V FLOPs once."""
        options = {"out_dtype": self.logits.dtype} if self.mixed else {}
        for start in range(0, len(self.hidden), self.strip):
            hidden = self.hidden[start : start + self.strip]
            logits, operand = self.logits[: len(hidden)], self.operand[: len(hidden)]
            torch.mm(hidden, self.weight.T, out=logits, **options)
            torch.mm(operand, self.weight, out=self.grad_hidden[start : start + self.strip])
            torch.addmm(self.grad_weight, operand.T, hidden, out=self.grad_weight, **options)


def measure(request: BenchRequest) -> dict[str, Any]:
    """All figures of one method.

    Raises:
        ImportError: If it needs a library that is not there.
        Exception: Whatever else it raises, for want of memory or otherwise.
    """
    shape = request.shape
    method = load_method(request.method, shape)
    inputs = make_inputs(shape)

    def run() -> tuple[float, float]:
        return seconds_of(method, inputs)

    run()  # compiles, and makes what a library keeps
    with FlopCounterMode(display=False) as counter:  # not around what is measured: its first use costs memory
        run()
    peak = peak_beyond(run, shape.device)
    limit = GemmLimit(inputs, shape.strip)
    seconds(limit, shape.device)
    limit_s, forward_s, backward_s = [], [], []
    for _ in range(request.repeats):
        limit_s.append(seconds(limit, shape.device))
        limit.grad_weight.zero_()
        for times, taken in zip((forward_s, backward_s), run(), strict=True):
            times.append(taken)
    del limit
    return {
        "note": method.note,
        "limit_s": limit_s,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "flops": counter.get_total_flops(),
        "peak_bytes": peak,
        "error": gradient_errors(method, inputs.first(request.error_tokens)),
    }


def seconds_of(method: Method, inputs: BenchInputs) -> tuple[float, float]:
    """Seconds of forward and of backward. The gradients are dropped, so that each call makes its own."""
    device = inputs.hidden.device
    _wait(device)
    start = time.perf_counter()
    loss = method.loss(inputs)
    _wait(device)
    between = time.perf_counter()
    loss.backward()
    _wait(device)
    end = time.perf_counter()
    inputs.hidden.grad = inputs.weight.grad = None
    return between - start, end - between


def seconds(function: Callable[[], None], device: str) -> float:
    """Seconds of one call."""
    _wait(torch.device(device))
    start = time.perf_counter()
    function()
    _wait(torch.device(device))
    return time.perf_counter() - start


def peak_beyond(function: Callable[[], Any], device: str) -> int | None:
    """The most bytes held during a call beyond those held before it: torch's count on CUDA, resident memory on CPU.

    None where the kernel does not say (other systems than Linux).
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        _wait(torch.device(device))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory would pass for memory in use
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from now
        before = _resident("VmRSS")
    except (OSError, AttributeError):
        function()
        return None
    function()
    return _resident("VmHWM") - before


def gradient_errors(method: Method, inputs: BenchInputs) -> dict[str, float | int]:
    """Relative L2 errors of both gradients against autograd in float64 on the same values."""
    truth = inputs.double()
    method.exact(truth).backward()
    method.loss(inputs).backward()
    errors = {}
    for name in ("hidden", "weight"):
        exact, found = getattr(truth, name).grad, getattr(inputs, name).grad.double()
        errors[name] = float((found - exact).norm() / exact.norm())
    inputs.weight.grad = None
    return errors | {"tokens": len(inputs.hidden)}


def environment(request: BenchRequest) -> dict[str, Any]:
    """What the times depend on."""
    device = torch.device(request.shape.device)
    cuda = device.type == "cuda"
    logits = torch.empty(0, device=device, dtype=torch.float32)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "row_kernels": "triton" if use_triton(logits) else "eager",
    }


def describe(error: BaseException) -> tuple[str, str]:
    """The status and the message of what went wrong."""
    message = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, ImportError):
        return ABSENT, message
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return (OUT_OF_MEMORY, message) if short else (FAILED, f"{type(error).__name__}: {message}")


def main(request_file: str, result_file: str) -> None:
    """Measure and write down what was found, or what went wrong."""
    with contextlib.suppress(OSError):  # if memory runs out, the kernel shall end this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    request = BenchRequest.from_json(Path(request_file).read_text())
    if request.threads:
        torch.set_num_threads(request.threads)
    found = {"environment": environment(request)}
    try:
        found |= {"status": OK, "message": ""} | measure(request)
    except Exception as error:  # noqa: BLE001 - one method's failure is a result, not the end of the bench
        found |= dict(zip(("status", "message"), describe(error), strict=True))
    Path(result_file).write_text(json.dumps(found))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(field: str) -> int:
    """Bytes, of /proc/self/status."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _processor() -> str:
    with contextlib.suppress(OSError, TypeError):
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main(*sys.argv[1:])
