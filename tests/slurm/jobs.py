# SPDX-License-Identifier: Apache-2.0
"""Submits the job scripts to the test cluster, and reads what their jobs left."""

import json
import os
from pathlib import Path

from tests.slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).parent.parent.parent


class Job:
    """One submitted job script."""

    def __init__(self, cluster: Cluster, script: str, options: list[str], arguments: list[object], **env: str):
        self.cluster = cluster
        where = cluster.root / "submitted"
        where.mkdir(exist_ok=True)
        env = {"MEGATRON_KD_HOME": str(ROOT), "MEGATRON_KD_CPU": "1", **env}
        path = ROOT / "slurm" / script
        self.id = cluster.run("sbatch", "--parsable", *options, path, *arguments, cwd=where, env=env)
        self.first_log = where

    @property
    def facts(self) -> dict[str, str]:
        return self.cluster.job(self.id)

    @property
    def restarts(self) -> int:
        return int(self.facts["Restarts"])

    def wait(self, *states: str, timeout_s: float = 180, logs: Path | None = None) -> None:
        self.cluster.wait_for_state(self.id, *states, timeout_s=timeout_s, log=lambda: log_text(logs))

    def wait_for_restart(self, number: int, logs: Path, timeout_s: float = 120) -> None:
        """Waits until the job runs again, for the `number`th time after the first."""
        running = lambda: self.restarts >= number and self.facts["JobState"] == "RUNNING"  # noqa: E731
        wait_for(running, timeout_s, f"restart {number} of job {self.id}", lambda: log_text(logs))

    def kill_task(self, rank: int) -> None:
        """SIGKILL to one rank of the newest step."""
        os.kill(max(self._pids(rank)), 9)

    def _pids(self, rank: int) -> list[int]:
        wanted = {f"SLURM_JOB_ID={self.id}", f"SLURM_PROCID={rank}"}
        found = []
        for folder in Path("/proc").iterdir():
            try:
                environment = set((folder / "environ").read_text().split("\0"))
                command = (folder / "cmdline").read_text().split("\0")
            except (OSError, ValueError):
                continue
            if wanted <= environment and "train" in command and "--check-only" not in command:
                found.append(int(folder.name))
        return found


def log_text(folder: Path | None) -> str:
    """The log that `latest` names."""
    latest = folder and folder / "latest"
    return latest.read_text() if latest and latest.exists() else "no log"


def steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """The run's curve; of a step that was made twice, the later."""
    path = run_dir / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        line["step"]: {name: value for name, value in line.items() if not name.endswith("seconds")} for line in lines
    }
