# SPDX-License-Identifier: Apache-2.0
"""slurm/by_nemo_run.py with a real NeMo-Run: its local executor, and the Slurm script that it would submit."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_nemo_run(tmp_path_factory):
    """Calls the example; its status and what it printed."""
    root = tmp_path_factory.mktemp("nemo")
    venv.create(root / "venv")
    python, uv = root / "venv/bin/python", Path(sys.prefix) / "bin/uv"
    pins = ROOT / "requirements/nemo_run.txt"
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", pins], check=True)

    def call(*words: object) -> tuple[int, str]:
        env = os.environ | {"NEMORUN_HOME": str(root / "home"), "COLUMNS": "400"}
        command = [python, ROOT / "slurm/by_nemo_run.py", *words]
        done = subprocess.run(list(map(str, command)), env=env, cwd=root, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return call


def test_the_local_executor_runs_the_command_and_tells_its_end(by_nemo_run, tmp_path):
    local = ["local", "--command", Path(sys.prefix) / "bin/megatron-kd", "--", "train", "--check-only", "--cpu"]
    status, said = by_nemo_run(*local, "--recipe", RECIPE, "--run-dir", tmp_path / "run", "kd=null")
    assert status == 0 and "no cache named" in said and "finished: SUCCEEDED" in said, said
    _, said = by_nemo_run(*local, "--recipe", RECIPE, "--run-dir", tmp_path / "run")
    assert "kd.cache is not set" in said and "finished: FAILED" in said, said
    _, said = by_nemo_run(*local, "--recipe", RECIPE + "s")
    assert f"unknown recipe '{RECIPE}s'" in said and "finished: FAILED" in said, said


def test_the_slurm_dry_run_shows_a_rank_for_each_gpu_in_the_container(by_nemo_run, tmp_path):
    words = ["slurm", "--account", "a", "--partition", "p", "--nodes", 2, "--container", "/i.sqsh", "--dryrun"]
    words += ["--mount", "/data:/data", "--job-dir", tmp_path / "jobs"]
    status, said = by_nemo_run(*words, "--", "train", "--config-file", "recipes/X.yaml", "--run-dir", "/data/run")
    assert status == 0, said
    wanted = ("--account=a", "--partition=p", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive")
    for option in (*wanted, "--time=04:00:00"):
        assert f"#SBATCH {option}" in said, said
    assert "srun" in said and "--container-image /i.sqsh --container-mounts /data:/data," in said
