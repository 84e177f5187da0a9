# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd bench`, which is `python -m megatron_kd.loss.bench` as well: arguments, table, files.

It lies outside `megatron_kd.loss`, whose import is torch's, so that help is read at once. What it does is in
loss/bench.py and report/loss_bench.py, imported when it runs; with torch alone all works but the chart.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_kd.errors import UserError

PRESETS = {
    "cpu": {
        "tokens": 4096,
        "hidden": 512,
        "vocabulary": 50304,
        "top_k": 100,
        "dtype": "float32",
        "device": "cpu",
        "strip_tokens": 512,
    },
    "gpt-oss-32k": {
        "tokens": 32768,
        "hidden": 2880,
        "vocabulary": 201088,
        "top_k": 100,
        "dtype": "bfloat16",
        "device": "cuda",
        "strip_tokens": None,
    },
}
PRESETS["gpt-oss-256k"] = PRESETS["gpt-oss-32k"] | {"tokens": 262144}

_DESCRIPTION = """\
Measure ways to compute a distillation loss, forward and backward, on one shape: time, the work in matrix products,
peak memory, and the error of the gradients against float64. Each method runs in a process of its own. Between its
repeats the limit is measured: the three products that no such loss can do without, alone.

methods:
  fused            ours, gradients computed in forward: three products
  fused-recompute  ours, projecting again in backward: four products, least memory
  forward-chunked  sparse teacher, the student's logits kept whole
  dense            all of it on the whole grid of tokens and vocabulary
  dense-compiled   the same, by torch.compile
  megatron-topk    Megatron's topk_kl_div behind an ordinary output layer (needs megatron-core)
  liger            Liger's chunked distillation loss (needs liger-kernel); it wants a dense teacher, a larger problem
  MODULE:FUNCTION  your own, as megatron_kd/loss/bench_methods.py describes it
A library that is absent is named and left out; a method that runs out of memory says so.

presets (options override them):
  cpu              4,096 tokens, hidden 512, vocabulary 50,304, top 100, float32, strips of 512 (default without GPU)
  gpt-oss-32k      32,768 tokens, hidden 2,880, vocabulary 201,088, top 100, bfloat16, on CUDA (default with a GPU)
  gpt-oss-256k     the same with 262,144 tokens
"""

_EXAMPLES = """\
examples:
  megatron-kd bench
  megatron-kd bench --methods fused,dense --json bench.json --chart bench.png
  megatron-kd bench --preset gpt-oss-256k --tensor-parallel 8 --methods fused,fused-recompute
  python -m megatron_kd.loss.bench --tokens 512 --hidden 256 --vocabulary 8000 --top-k 20
"""


def add_parser(subparsers: Any) -> None:
    """Register the command `bench` on an argparse sub-parsers object."""
    parser = subparsers.add_parser(
        "bench",
        help="time, memory and error of the distillation loss, ours and others",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options."""
    shape = parser.add_argument_group("shape")
    shape.add_argument("--preset", choices=PRESETS, help="a shape by name, see above")
    shape.add_argument("--tokens", type=int, metavar="N", help="tokens of the call")
    shape.add_argument("--hidden", type=int, metavar="H", help="hidden size")
    shape.add_argument("--vocabulary", type=int, metavar="V", help="vocabulary size")
    shape.add_argument("--top-k", type=int, metavar="K", help="entries of the sparse teacher")
    shape.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of hidden states and weight")
    shape.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N")
    shape.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="TP", help="measure one rank's V / TP columns, no collective"
    )
    shape.add_argument(
        "--strip-tokens", metavar="N", type=_strip, help="tokens projected at a time; auto: by the loss"
    )
    how = parser.add_argument_group("measurement")
    how.add_argument("--methods", metavar="A,B", help="which, separated by commas (default: all named above)")
    how.add_argument("--repeats", type=int, default=5, metavar="N", help="timed calls of each method (default 5)")
    how.add_argument(
        "--error-tokens", type=int, default=256, metavar="N", help="tokens compared with float64 (default 256)"
    )
    how.add_argument("--threads", type=int, metavar="N", help="of torch on CPU (default: as torch chooses)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures and every single time")
    out.add_argument("--chart", type=Path, metavar="FILE.png", help="draw time and memory (needs matplotlib)")


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the files.

    Raises:
        UserError: For a shape or a method that cannot be, and before anything is measured if no chart can be drawn.
    """
    if args.chart and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--chart: expected the package matplotlib, found none; install it, or leave --chart out.")
    for file in filter(None, (args.json, args.chart)):
        if not file.absolute().parent.is_dir():
            raise UserError(f"{file}: expected an existing folder {file.parent}, found none.")
    import torch

    from megatron_kd.loss.bench import METHODS, BenchShape, run_bench
    from megatron_kd.report.loss_bench import bench_table, draw_bench

    preset = args.preset or ("gpt-oss-32k" if torch.cuda.is_available() else "cpu")
    values = dict(PRESETS[preset])
    values |= {name: getattr(args, name) for name in values if getattr(args, name) is not None}
    if values["strip_tokens"] == "auto":
        values["strip_tokens"] = None
    if args.tensor_parallel < 1:
        raise UserError(f"--tensor-parallel: expected at least 1, found {args.tensor_parallel}.")
    vocabulary = values.pop("vocabulary")
    shape = BenchShape(columns=-(-vocabulary // args.tensor_parallel), **values)
    found = run_bench(
        shape,
        args.methods.split(",") if args.methods else tuple(METHODS),
        repeats=args.repeats,
        error_tokens=args.error_tokens,
        threads=args.threads,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    found["shape"] |= {"vocabulary": vocabulary, "tensor_parallel": args.tensor_parallel}
    print(bench_table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.chart:
        draw_bench(args.chart, found)


def _strip(text: str) -> int | str:
    if text == "auto":
        return text
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0 or auto, found {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m megatron_kd.loss.bench`: exit code 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_kd.loss.bench",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    try:
        run(parser.parse_args(argv))
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
