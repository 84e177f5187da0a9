# SPDX-License-Identifier: Apache-2.0
"""Parts of the job scripts that need no Slurm: srun's words with and without a container, what is saved of the
environment. tests/slurm runs the whole of them.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}


def bash(code: str, *arguments: object, **env: str) -> list[str]:
    """What `code` prints, split at NULs, after sourcing env.sh."""
    script = f'set -euo pipefail; kd_home="{ROOT}"; source "{ROOT}/slurm/env.sh"; {code}'
    done = subprocess.run(
        ["bash", "-c", script, "train.sbatch", *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **SLURM, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


SRUN = 'kd_prepare_srun "$1"; printf "%s\\0" "${kd_srun[@]}" -- "${kd_command[@]}"'


def test_without_a_container_the_clones_own_environment_runs():
    words = bash(SRUN, "/runs/a b", MEGATRON_KD_SRUN_ARGS="--mpi=pmix\n--comment=a b")
    command = ROOT / ".venv" / "bin" / "megatron-kd"
    command = str(command) if command.exists() else "megatron-kd"
    assert words == ["srun", "--kill-on-bad-exit=1", "--label", "--mpi=pmix", "--comment=a b", "--", command]


def test_in_a_container_clone_and_run_are_mounted_and_the_home_is_not():
    settings = {"MEGATRON_KD_CONTAINER": "/images/a b.sqsh", "MEGATRON_KD_MOUNTS": "/data:/data,/m:/m"}
    words = bash(SRUN, "/runs/a b", **settings)
    assert words[3:] == [
        "--container-image=/images/a b.sqsh",
        "--no-container-mount-home",
        f"--container-workdir={ROOT}",
        f"--container-mounts={ROOT}:{ROOT},/runs/a b:/runs/a b,/data:/data,/m:/m",
        "--",
        "megatron-kd",
    ]


def test_the_environment_is_saved_without_what_is_secret():
    settings = {
        "HF_TOKEN": "planted-1", "WANDB_API_KEY": "planted-2", "SLURM_JWT": "planted-3", "MY_PASSWORD": "planted-4",
        "SOMETHING_ELSE": "planted-5", "NCCL_DEBUG": "INFO", "HF_HOME": "/hub's", "MEGATRON_KD_CPU": "1",
    }  # fmt: skip
    (text,) = bash("kd_environment; printf '\\0'", **settings)
    assert "planted" not in text
    lines = text.splitlines()
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SLURM_JWT", "MY_PASSWORD", "SOMETHING_ELSE"):
        assert f"{name} (not saved)" in lines
    assert "NCCL_DEBUG='INFO'" in lines and "MEGATRON_KD_CPU='1'" in lines
    assert any(line.startswith("HF_HOME=") and "hub" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--run-dir", "a b"], "a b"),
        (["--run-dir=a=b"], "a=b"),
        (["--run-dir", "a", "--run-dir=b"], "b"),
        (["x=--run-dir"], ""),
        ([], ""),
    ],
)
def test_an_option_is_found_as_the_command_itself_would(arguments, value):
    assert bash('printf \'%s\\0\' "$(kd_option --run-dir "$@")"', *arguments) == [value]


def test_scripts_are_shellchecked_and_name_no_machine():
    checker = ROOT / ".venv" / "bin" / "shellcheck"
    scripts = sorted(path for path in (ROOT / "slurm").iterdir() if path.suffix in (".sbatch", ".sh"))
    assert len(scripts) == 4
    done = subprocess.run([checker, "-x", *scripts, ROOT / ".ci" / "run"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    for script in scripts:
        assert "/home/" not in script.read_text() and "account=" not in script.read_text()
