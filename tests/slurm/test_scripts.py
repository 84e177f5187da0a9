# SPDX-License-Identifier: Apache-2.0
"""What the job scripts themselves do, on a real Slurm: mistakes, time limit, cancellation, folders, quoting.

The payload is a stand-in for `megatron-kd` that counts seconds and keeps checkpoints, so that a case costs no imports;
test_training.py runs the real one. Wrong arguments go to the real one here too.
"""

import time

import pytest

from tests.slurm.cluster import wait_for
from tests.slurm.jobs import ROOT, Job, log_text

pytestmark = pytest.mark.slurm
RECIPE = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"
SPLIT_BY_TWO = ["--recipe", RECIPE, "model.tensor_model_parallel_size=2", "model.expert_model_parallel_size=2"]
ONE_NODE = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=60"]

COUNTER = """\
#!/bin/bash
# megatron-kd train ... --run-dir DIR, for the scripts: an iteration a second, a checkpoint at SIGTERM.
printf '%s\\n' "$@" >"$COUNTER_ARGUMENTS.$SLURM_PROCID"
while (($#)); do
    case $1 in
    --check-only) exit 0 ;;
    --run-dir) run_dir=$2 ;;
    until=*) until=${1#*=} ;;
    esac
    shift
done
tracker=$run_dir/checkpoints/latest_checkpointed_iteration.txt
mkdir -p "$run_dir/checkpoints"
n=$(cat "$tracker" 2>/dev/null || echo 0)
trap 'echo "$n" >"$tracker"; echo "saved $n"; exit 0' TERM
while ((n < until)); do
    sleep 1
    ((n += 1))
    [[ -z ${COUNTER_KILLS_ITSELF:-} ]] || kill -KILL $$
done
echo "$n" >"$tracker"
touch "$run_dir/finished"
"""


@pytest.fixture
def counter(cluster, tmp_path):
    """Submits train.sbatch with the stand-in."""
    script = tmp_path / "counter"
    script.write_text(COUNTER)
    script.chmod(0o755)

    def submit(*arguments: object, options=(), **env: str) -> Job:
        env = {"MEGATRON_KD_COMMAND": str(script), "COUNTER_ARGUMENTS": str(tmp_path / "arguments"), **env}
        return Job(cluster, "train.sbatch", [*ONE_NODE, *options], list(arguments), **env)

    return submit


def test_the_time_limit_checkpoints_requeues_and_goes_on(counter, tmp_path):
    """Slurm's own time limit of two minutes; its signal may come a minute early."""
    run_dir = tmp_path / "run"
    job = counter("--run-dir", run_dir, "until=100", options=["--time=2", "--signal=B:USR1@90"])
    job.wait("COMPLETED", "FAILED", "TIMEOUT", timeout_s=400, logs=run_dir / "logs")
    log = log_text(run_dir / "logs")
    assert job.facts["JobState"] == "COMPLETED" and job.restarts >= 1, log
    assert "the time limit is near" in log and "requeued to go on from" in log and "finished: " in log


def test_a_cancelled_job_keeps_its_checkpoint_and_stays_cancelled(cluster, counter, tmp_path):
    run_dir = tmp_path / "run"
    job = counter("--run-dir", run_dir, "until=1000")
    wait_for(lambda: (run_dir / "checkpoints").exists(), 30, "a running step", lambda: log_text(run_dir / "logs"))
    time.sleep(2)
    cluster.run("scancel", job.id)
    job.wait("CANCELLED", timeout_s=30)
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for(tracker.exists, 20, "a checkpoint", lambda: log_text(run_dir / "logs"))
    assert job.restarts == 0


def test_a_job_can_be_cancelled_without_hurry(counter, tmp_path):
    """A signal to the script alone: its tasks save as long as they need, and nothing is requeued."""
    run_dir = tmp_path / "run"
    job = counter("--run-dir", run_dir, "until=1000")
    wait_for((run_dir / "checkpoints").exists, 30, "a running step", lambda: log_text(run_dir / "logs"))
    time.sleep(2)
    job.cluster.run("scancel", "--batch", "--signal=TERM", job.id)
    job.wait("FAILED", timeout_s=30, logs=run_dir / "logs")
    assert job.facts["ExitCode"] == "143:0" and job.restarts == 0
    assert "The same command goes on from there" in log_text(run_dir / "logs")
    assert int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()) > 0


def test_a_crash_without_a_new_checkpoint_is_not_tried_again(counter, tmp_path):
    run_dir = tmp_path / "run"
    job = counter("--run-dir", run_dir, "until=1000", COUNTER_KILLS_ITSELF="1")
    job.wait("FAILED", timeout_s=60, logs=run_dir / "logs")
    log = log_text(run_dir / "logs")
    assert "failed with exit status 137 and nothing new since 0 iterations" in log and job.restarts == 0


def test_arguments_arrive_as_they_were_given(counter, tmp_path):
    awkward = ["a b", "c'd\"e", "$HOME", "*", "", "x=[1,2]", "kd.cache=/data/a folder/$(touch pwned)", "--flag=é\\n"]
    run_dir = tmp_path / "run dir"
    job = counter(*awkward, "--run-dir", run_dir, "until=1")
    job.wait("COMPLETED", timeout_s=60, logs=run_dir / "logs")
    got = (tmp_path / "arguments.1").read_text().splitlines()
    assert got == ["train", *awkward, "--run-dir", str(run_dir), "until=1", "--run-dir", str(run_dir), "--cpu"]
    assert not list(job.first_log.glob("pwned"))


MISTAKES = {
    "an unknown option": (["--conifg-file", "x"], ["unknown option --conifg-file", "Did you mean --config-file"]),
    "no YAML": (["--config-file", "/no/run.yaml"], ["/no/run.yaml cannot be read"]),
    "no recipe": (["kd.cache=/x"], ["no recipe: give --recipe NAME"]),
    "unknown recipe": (["--recipe", RECIPE.replace("h200", "h20")], ["unknown recipe", f"Did you mean {RECIPE}"]),
    "no cache": ([*SPLIT_BY_TWO, "kd.cache=/no/cache"], ["node n", "/no/cache is not a teacher cache"]),
    "no corpus": (
        [*SPLIT_BY_TWO, "kd=null", "dataset.data_path=/no/corpus"],
        ["node n", "/no/corpus.idx does not exist"],
    ),
    "no student": (
        [*SPLIT_BY_TWO, "kd=null", "--student", "/no/student"],
        ["node n", "student /no/student holds no config.json"],
    ),
    "ranks": (
        ["--recipe", RECIPE, "model.tensor_model_parallel_size=4"],
        ["2 ranks do not split into TP=4", "--nodes"],
    ),
    "grammar": (["--recipe", RECIPE, "train.train_iters"], ["'train.train_iters' is not key=value"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_met_within_seconds_and_stays_out_of_the_queue(cluster, tmp_path, mistake):
    arguments, parts = MISTAKES[mistake]
    run_dir = tmp_path / "run"
    started = time.monotonic()
    job = Job(cluster, "train.sbatch", ONE_NODE, ["--run-dir", run_dir, *arguments])
    job.wait("FAILED", timeout_s=60, logs=run_dir / "logs")
    log = log_text(run_dir / "logs")
    for part in [*parts, "stopped: the message above says what to mend. Not requeued."]:
        assert part in log
    assert "Traceback" not in log and job.facts["ExitCode"] == "2:0" and job.restarts == 0
    assert time.monotonic() - started < 30  # on a busy machine; see the report's own figure


def test_nodes_that_differ_are_named(cluster, tmp_path):
    """n2 finds another package first on its path."""
    (tmp_path / "wrong" / "numpy-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "wrong" / "numpy-0.0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.0.1\n")
    command = tmp_path / "command"
    command.write_text(
        f"#!/bin/bash\n[[ $SLURMD_NODENAME != n2 ]] || export PYTHONPATH={tmp_path}/wrong\n"
        f'exec {ROOT}/.venv/bin/megatron-kd "$@"\n'
    )
    command.chmod(0o755)
    run_dir = tmp_path / "run"
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    arguments = ["--run-dir", run_dir, *SPLIT_BY_TWO, "kd=null"]
    job = Job(cluster, "train.sbatch", options, arguments, MEGATRON_KD_COMMAND=str(command))
    job.wait("FAILED", timeout_s=60, logs=run_dir / "logs")
    assert "versions differ" in log_text(run_dir / "logs") and "node n2 has numpy 0.0.1" in log_text(run_dir / "logs")


def test_without_its_clone_a_script_says_so(cluster, tmp_path):
    job = Job(cluster, "train.sbatch", ONE_NODE, [], MEGATRON_KD_HOME=str(tmp_path))
    job.wait("FAILED", timeout_s=30)
    log = (job.first_log / f"megatron-kd-train_{job.id}.out").read_text()
    assert f"no slurm/env.sh in {tmp_path}" in log and "MEGATRON_KD_HOME" in log
