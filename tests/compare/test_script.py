# SPDX-License-Identifier: Apache-2.0
"""compare.sbatch with stand-ins for srun, scontrol and megatron-kd: which runs it starts, and what it says of them."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "node0", "SLURM_SUBMIT_DIR": str(ROOT),
}  # fmt: skip
PROGRAMS = {
    # As srun --label does: options first, and the rank before each line.
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@" | sed "s/^/0: /"; exit "${PIPESTATUS[0]}"',
    "scontrol": 'case $2 in hostnames) echo node0 ;; node) echo "NodeAddr=127.0.0.1 x" ;; esac',
    # Three runs, of which `dense` fails.
    "kd": """
previous=""
for word in "$@"; do
    [[ $previous != --run-dir ]] || folder=$word
    [[ $previous != --run ]] || run=$word
    previous=$word
done
case " $* " in
*" --list "*) for name in fused dense "fused kd.top_k=20"; do
    [[ -e $folder/${name// /_}/result.json ]] || echo "$name"; done ;;
*" --summary "*) echo tables ;;
*) echo "$run" "$MASTER_PORT" >>"$folder/started"
    [[ $run != dense ]] || exit 1
    mkdir -p "$folder/${run// /_}" && touch "$folder/${run// /_}/result.json" ;;
esac""",
}


@pytest.fixture
def job(tmp_path):
    """Runs the script as a job would; returns its log."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGATRON_KD_COMMAND": str(tmp_path / "kd"), **SLURM}

    def run() -> str:
        words = ["bash", ROOT / "slurm" / "compare.sbatch", "--run-dir", tmp_path / "run", "kd.cache=/k"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "run" / "logs" / "x_7.out").read_text()

    run.started = tmp_path / "run" / "started"
    return run


def test_each_run_is_started_once_and_one_that_fails_leaves_the_others(job):
    log = job()
    started = [line.rpartition(" ") for line in job.started.read_text().splitlines()]
    assert [name for name, _, _ in started] == ["fused", "dense", "fused kd.top_k=20"]
    assert len({port for _, _, port in started}) == 3
    assert "dense failed (exit status 1); the others go on" in log and "0: tables" in log
    job()  # the same command again
    assert [line.rpartition(" ")[0] for line in job.started.read_text().splitlines()[3:]] == ["dense"]
