# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for H200 and B200 without a GPU, and say what the compiler made of them.

    python -m megatron_kd.loss.compile_kernels [--vocabulary 201088] [--top-k 100]

In: the shape of a launch, of which Triton's specialisation needs the divisibility. Out: a line per variant and target
with registers, shared memory and spilled bytes, read from the very binary by the cuobjdump that triton ships.
Cost: about a second per variant and target, less when triton has it cached.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_kd.loss.arguments import default_strip_tokens
from megatron_kd.loss.errors import require
from megatron_kd.loss.triton_kernels import (
    GRADIENT,
    INTERPRETED,
    STATISTICS,
    row_gradient_kernel,
    row_statistics_kernel,
)
from megatron_kd.loss.vocab_parallel import VocabShard

TARGETS = {"sm_90a": 90, "sm_100a": 100}
REGISTERS_OF_SM, WARPS_OF_SM, PROGRAMS_OF_SM = 65536, 64, 32
"""Of both targets."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments as they would be at a launch; a pointer is the name of its type."""

    name: str
    kernel: triton.JITFunction
    arguments: dict[str, str | int | float]
    constants: dict[str, int]
    """Constexprs and num_warps."""


@dataclass(frozen=True)
class Compiled:
    """One binary."""

    name: str
    target: str
    warps: int
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of a program."""
    spilled: int
    """Bytes of a thread's registers that live in memory instead: stack frame and local memory."""
    ptx: str

    @property
    def programs(self) -> int:
        """Programs that an SM holds at once."""
        by_registers = REGISTERS_OF_SM // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(by_registers, WARPS_OF_SM // self.warps, PROGRAMS_OF_SM)


def variants(vocabulary: int = 201_088, top_k: int = 100) -> Iterator[Variant]:
    """Every form in which the launchers of triton_kernels.py start a kernel, for logits [any, vocabulary]."""
    common = {"columns": "*i64", "label_column": "*i64", "V": vocabulary, "K": top_k, "inverse_temperature": 1.0}
    common |= {"logits": "*fp32", "logits_stride": vocabulary}
    for name, label, at_one in (("", 0, 0), (", label", 1, 0), (", label, T = 1 too", 1, 1)):
        arguments = common | {"owned": "*fp32", "log_sums": "*fp32"}
        constants = {"HAS_LABEL": label, "AT_ONE": at_one}
        yield Variant(f"statistics{name}", row_statistics_kernel, arguments, constants | STATISTICS)
    for dtype, narrow in (("bf16", 1), ("fp32", 0)):
        for name, label, ce in (("", 0, 0), (", label", 1, 0), (", label, CE at T = 1", 1, 1)):
            arguments = common | {"grad": f"*{dtype}", "grad_stride": (1 + narrow) * vocabulary}
            arguments |= {"entries": "*fp32", "coefficients": "*fp32"}
            constants = {"HAS_LABEL": label, "HAS_CE": ce, "NARROW": narrow}
            yield Variant(f"gradient {dtype}{name}", row_gradient_kernel, arguments, constants | GRADIENT)


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compile for a target of TARGETS and read what the binary needs.

    Raises:
        LossArgumentError: Under Triton's interpreter.
    """
    require(not INTERPRETED, "TRITON_INTERPRET: expected unset, found set; the interpreter has no compiler.")
    signature, constants, attributes = _specialise(variant)
    warps = variant.constants["num_warps"]
    kernel = triton.compile(
        ASTSource(variant.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", TARGETS[target], 32),
        options={"num_warps": warps},
    )
    usage = _resource_usage(kernel.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    return Compiled(variant.name, target, warps, usage["REG"], kernel.metadata.shared, spilled, kernel.asm["ptx"])


def _specialise(variant: Variant) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes as Triton's launcher has them: a 1 is a constant, 16 is a known divisor."""
    signature, attributes = {}, {}
    constants = {name: value for name, value in variant.constants.items() if name != "num_warps"}
    for position, name in enumerate(variant.kernel.arg_names):
        value = variant.arguments.get(name)
        if name == "label_column" and not constants["HAS_LABEL"]:
            value = constants[name] = None
        if value == 1 and isinstance(value, int):
            constants[name] = value
        if name in constants:
            signature[name] = "constexpr"
            continue
        kinds = {str: value, int: "i32", float: "fp32"}
        signature[name] = kinds[type(value)]
        if isinstance(value, str) or (isinstance(value, int) and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and more of the only function in a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", found)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compile the loss's Triton kernels without a GPU.")
    parser.add_argument("--vocabulary", type=int, default=201_088, help="columns of a rank (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=100, help="teacher entries (default: %(default)s)")
    options = parser.parse_args()
    shard = VocabShard(0, options.vocabulary, options.vocabulary)
    rows = default_strip_tokens(shard, torch.float32)
    print(f"triton {triton.__version__}; V = {options.vocabulary:,}, K = {options.top_k}")
    print(f"launch: {rows:,} programs, one a row of a strip; statistics {STATISTICS}, gradient {GRADIENT}")
    print("bytes a logit: statistics 4 read; gradient 4 read, 2 (bf16) or 4 (fp32) written")
    print(f"{'kernel':<36}{'target':>8}{'registers':>11}{'shared':>8}{'spilled':>9}{'programs/SM':>13}")
    for variant in variants(options.vocabulary, options.top_k):
        for target in TARGETS:
            made = compile_variant(variant, target)
            numbers = f"{made.registers:>11}{made.shared:>8}{made.spilled:>9}{made.programs:>13}"
            print(f"{made.name:<36}{target:>8}{numbers}")


if __name__ == "__main__":
    main()
