# SPDX-License-Identifier: Apache-2.0
"""A job as one command of sbatch: what to start, where, with which options.

In: what the user asked for. Out: a command line and the environment it needs, to print or to run. The scripts of
`slurm/` do the rest; nothing is done here that a user could not type. Imports neither torch nor Megatron.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_kd.errors import UserError

_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED|AUTH|JWT")


class SubmitError(UserError):
    """The job cannot be submitted."""


@dataclass(frozen=True)
class Job:
    """A call of sbatch."""

    script: Path
    arguments: Sequence[str]
    logs: Path
    name: str
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Settings of slurm/env.sh; never a secret: those stay in the caller's environment."""

    def command(self) -> list[str]:
        """Words of the command line. The log is in the run's folder from the first line on."""
        log = [f"--job-name={self.name}", f"--output={self.logs}/%x_%j.out"]
        return ["sbatch", *log, *self.options, str(self.script), *self.arguments]

    def printed(self) -> str:
        """The same, to be pasted into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        make = shlex.join(["mkdir", "-p", str(self.logs)])
        return f"{make}\n{' '.join([*settings, shlex.join(self.command())])}"

    def submit(self) -> str:
        """Makes the log's folder and calls sbatch. Returns what it says.

        Raises:
            SubmitError: there is no sbatch, or it refuses.
        """
        if shutil.which("sbatch") is None:
            raise SubmitError(
                "there is no sbatch here. Run this on a login node of the cluster; or add --print to see the command."
            )
        self.logs.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(self.command(), env={**os.environ, **self.environment}, capture_output=True, text=True)
        if done.returncode:
            raise SubmitError(
                f"sbatch refused: {done.stderr.strip() or done.stdout.strip()}\nIt was: {self.printed()}"
            )
        return done.stdout.strip()


def find_scripts() -> Path:
    """The clone: MEGATRON_KD_HOME, or the folder above this package, or the current one.

    Raises:
        SubmitError: none has the job scripts.
    """
    given = os.environ.get("MEGATRON_KD_HOME")
    for folder in [Path(given)] if given else [Path(__file__).parents[2], Path.cwd()]:
        if (folder / "slurm" / "env.sh").is_file():
            return folder.absolute()
    raise SubmitError(
        f"the job scripts are not in {given or 'the current folder'}: they come with the clone, not with the package. "
        "Export MEGATRON_KD_HOME=/path/to/the/clone."
    )


def refuse_secrets(words: Sequence[str]) -> None:
    """A token's value on a command line would be seen by everybody on the machine, and be saved with the run.

    Raises:
        SubmitError: names the word, not its value.
    """
    values = {value: name for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    for word in words:
        name, separator, _ = word.lstrip("-+").partition("=")
        if separator and re.search(r"(^|[._])(token|api_key|secret|password)$", name.lower()):
            raise SubmitError(f"{name}=... is a secret on the command line. Export its variable; jobs inherit it.")
        for value, variable in values.items():
            if value in word and not value.startswith("/"):
                raise SubmitError(f"argument {name!r} holds the value of {variable}. Leave it out; jobs inherit it.")
