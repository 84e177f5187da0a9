# SPDX-License-Identifier: Apache-2.0
"""A cache and a training run through the job scripts on a real Slurm of two nodes, with real Megatron-Bridge ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_kd import dryrun
from megatron_kd.cache import CacheReader
from tests.bridge.corpora import write_pair_corpus
from tests.dryrun.tiny import write_tiny_gpt_oss
from tests.slurm.cluster import wait_for
from tests.slurm.jobs import Job, log_text, steps

pytestmark = pytest.mark.slurm
STEPS = 14
EVERY = 2  # steps from one checkpoint to the next
TWO_NODES = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
YAML = """\
recipe: hf:{root}/student
kd: {{cache: {root}/cache, ce_weight: 0.5}}
model: {{tensor_model_parallel_size: 2, expert_tensor_parallel_size: 1, sequence_parallel: true, seq_length: 64}}
dataset: {{seq_length: 64, data_path: {root}/corpus, split: '100,0,0', path_to_cache: {root}/index}}
train: {{train_iters: {steps}, global_batch_size: 16, micro_batch_size: 1}}
scheduler: {{lr_warmup_iters: 1, lr_decay_iters: 100}}
optimizer: {{lr: 1e-3}}
validation: {{eval_iters: 0, eval_interval: 1000}}
checkpoint: {{save_interval: {every}}}
logger: {{log_interval: 1}}
"""


def make_inputs(root: Path) -> None:
    write_tiny_gpt_oss(root / "student")
    write_pair_corpus(root / "corpus")


@pytest.fixture(scope="module")
def inputs(cluster, tmp_path_factory) -> Path:
    """A folder with a student, which is its own teacher, a corpus, the run's YAML, and the cache an array built."""
    root = tmp_path_factory.mktemp("inputs")
    dryrun.run_ranks(make_inputs, 1, args=(root,))
    (root / "run.yaml").write_text(YAML.format(root=root, steps=STEPS, every=EVERY))
    arguments = ["--teacher", root / "student", "--corpus", root / "corpus", "--out", root / "cache"]
    arguments += ["--top-k", 20, "--tile-tokens", 2000, "--accept-teacher-loss"]
    one_node = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
    array = Job(cluster, "cache.sbatch", [*one_node, "--array=3-5:2"], arguments)
    for task in (3, 5):
        cluster.wait_for_state(f"{array.id}_{task}", "COMPLETED", log=lambda: log_text(root / "cache.logs"))
    return root


def test_the_jobs_of_an_array_build_one_cache(inputs):
    from megatron_kd.cache.verify import verify

    assert CacheReader(inputs / "cache").n_rows == 120**2  # which opens sealed caches only
    assert not verify(inputs / "cache").problems
    logs = sorted((inputs / "cache.logs").glob("*.out"))
    assert len(logs) == 2 and all("this job's share is done" in log.read_text() for log in logs)


def test_the_ranks_of_a_megatron_teacher_on_two_nodes_build_the_same_cache(cluster, inputs):
    """At TP=2 x EP=1; against the cache of the transformers teacher, whose writers were single tasks."""
    arguments = ["--engine", "megatron", "--teacher", inputs / "student", "--corpus", inputs / "corpus"]
    arguments += ["--out", inputs / "megatron", "--top-k", 20, "--tile-tokens", 2000, "--accept-teacher-loss"]
    layout = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
    job = Job(cluster, "cache.sbatch", TWO_NODES, [*arguments, *layout])
    job.wait("COMPLETED", "FAILED", timeout_s=400, logs=inputs / "megatron.logs")
    assert job.facts["JobState"] == "COMPLETED", log_text(inputs / "megatron.logs")
    every = np.array([[0, 120**2]])
    found, true = (CacheReader(inputs / name).read(every) for name in ("megatron", "cache"))
    np.testing.assert_array_equal(found.tokens, true.tokens)
    np.testing.assert_allclose(found.logprobs, true.logprobs, atol=4e-3)  # one step of f16 at log p of -4 to -8
    assert (found.ids == true.ids).mean() > 0.999


def train(cluster, inputs: Path, run_dir: Path, *arguments: str) -> Job:
    return Job(
        cluster,
        "train.sbatch",
        [*TWO_NODES, "--time=60"],
        ["--config-file", inputs / "run.yaml", "--run-dir", run_dir, *arguments],
        HF_TOKEN="hf_planted_secret",
        WANDB_API_KEY="planted_secret_of_wandb",
    )


def newest(run_dir: Path) -> int:
    """The newest checkpoint's iteration."""
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(scope="module")
def whole(cluster, inputs) -> Path:
    """The folder of a run that nothing disturbed."""
    run_dir = inputs / "whole"
    job = train(cluster, inputs, run_dir)
    job.wait("COMPLETED", "FAILED", "CANCELLED", timeout_s=400, logs=run_dir / "logs")
    assert job.facts["JobState"] == "COMPLETED", log_text(run_dir / "logs")
    return run_dir


def test_a_run_leaves_everything_in_its_folder(whole):
    log = log_text(whole / "logs")
    assert "finished: " in log and "node n1:" in log and "versions as on the other 1" in log
    assert sorted(steps(whole)) == [*range(1, STEPS + 1)]
    names = {path.suffix for path in (whole / "logs").iterdir()}
    assert {".out", ".commit", ".command", ".env"} <= names
    (commit,) = (whole / "logs").glob("*.commit")
    assert commit.read_text().startswith("commit ")
    assert "tensor_model_parallel_size: 2" in (whole / "config.yaml").read_text()
    assert (whole / "checkpoints" / f"iter_{STEPS:07d}").is_dir()
    assert (whole / "logs").stat().st_mode & 0o022 == 0  # as the umask of whoever submitted has it


def test_secrets_go_by_name_alone(cluster, whole):
    """Planted tokens reach the tasks; neither the run's folder nor what Slurm prints has their values."""
    (environment,) = (whole / "logs").glob("*.env")
    assert "HF_TOKEN (not saved)" in environment.read_text()
    for path in [*whole.rglob("*"), *(cluster.root / "submitted").iterdir()]:
        assert not path.is_file() or b"planted_secret" not in path.read_bytes(), path


def test_a_comparison_is_requeued_near_its_time_limit_and_goes_on_with_what_is_missing(cluster, inputs):
    """Two losses on two nodes; the signal of the time limit comes while the second trains."""
    run_dir, losses = inputs / "losses", ["--methods", "dense,fused", "--assert-equal", "2e-3"]  # bf16
    words = ["--config-file", inputs / "run.yaml", "--run-dir", run_dir, *losses, "train.train_iters=5"]
    job, logs = Job(cluster, "compare.sbatch", [*TWO_NODES, "--time=60"], words), run_dir / "logs"
    wait_for((run_dir / "dense" / "result.json").exists, 300, "a result of dense", lambda: log_text(logs))
    first = (run_dir / "dense" / "result.json").read_bytes()
    wait_for(lambda: "] fused" in log_text(logs), 60, "the start of fused", lambda: log_text(logs))
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_for_restart(1, logs)
    job.wait("COMPLETED", "FAILED", "CANCELLED", timeout_s=400, logs=logs)
    log = log_text(logs)
    assert job.facts["JobState"] == "COMPLETED" and job.restarts == 1, log
    assert "requeued to go on from 1 results" in log and (run_dir / "dense" / "result.json").read_bytes() == first
    methods = json.loads((run_dir / "compare.json").read_text())["methods"]
    assert [method["name"] for method in methods] == ["dense", "fused"]
    for method in methods:
        assert [step["step"] for step in method["steps"]] == [1, 2, 3, 4, 5]
    dense, fused = (np.array([step["kd loss"] for step in method["steps"]]) for method in methods)
    np.testing.assert_allclose(fused, dense, rtol=1e-2)
    assert all((run_dir / method / "config.yaml").is_file() for method in ("dense", "fused"))
    assert "fused" in (run_dir / "compare.html").read_text()


def test_a_comparisons_mistake_is_met_before_anything_is_run(cluster, inputs):
    run_dir = inputs / "mistaken"
    words = ["--config-file", inputs / "run.yaml", "--run-dir", run_dir, "train.train_iters=5"]
    job = Job(cluster, "compare.sbatch", ["--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=3"], words)
    job.wait("FAILED", timeout_s=60, logs=run_dir / "logs")
    log = log_text(run_dir / "logs")
    assert "3 ranks do not split into TP=2" in log
    assert "Not requeued" in log and "Traceback" not in log and job.facts["ExitCode"] == "2:0"


@pytest.mark.timeout(2400)  # six starts of two Megatron ranks, and those of the fixtures
def test_a_run_with_its_plugs_pulled_ends_with_the_same_losses(cluster, inputs, whole):
    """Time limit's signal, SIGKILL of a rank, a node set down: each requeues, and it goes on from the checkpoint.

    At last it is cancelled, which saves and does not requeue, and given once more.
    """
    run_dir = inputs / "disturbed"
    job, logs = train(cluster, inputs, run_dir), run_dir / "logs"

    def wait_for_step(step: int) -> None:
        wait_for(lambda: max(steps(run_dir), default=0) >= step, 300, f"step {step}", lambda: log_text(logs))

    wait_for_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@300 has Slurm send
    job.wait_for_restart(1, logs)
    saved = newest(run_dir)
    assert saved >= 3 and f"requeued to go on from {saved} iterations" in log_text(logs)

    wait_for_step(saved + EVERY + 1)
    job.kill_task(1)
    job.wait_for_restart(2, logs)
    assert "(exit status 1" in log_text(logs)  # 137, or 143 of the rank that srun ended then

    saved = newest(run_dir)
    wait_for_step(saved + EVERY + 1)
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.wait("PENDING", logs=logs)
    cluster.bring_back("n2")
    job.wait_for_restart(3, logs)

    saved = newest(run_dir)
    wait_for_step(saved + 1)
    cluster.run("scancel", job.id)
    job.wait("CANCELLED", logs=logs)
    wait_for(lambda: "The same command goes on from there" in log_text(logs), 60, "the end", lambda: log_text(logs))
    assert job.restarts == 3 and newest(run_dir) > saved, log_text(logs)
    job = train(cluster, inputs, run_dir)
    job.wait("COMPLETED", "FAILED", "CANCELLED", timeout_s=400, logs=logs)

    assert job.facts["JobState"] == "COMPLETED" and job.restarts == 0, log_text(logs)
    expected, found = steps(whole), steps(run_dir)
    assert sorted(found) == [*range(1, STEPS + 1)]
    for step in expected:
        for name in expected[step]:
            np.testing.assert_allclose(found[step][name], expected[step][name], atol=1e-6, rtol=0, err_msg=str(step))
