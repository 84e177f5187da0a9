# SPDX-License-Identifier: Apache-2.0
"""A run through NeMo-Run: on this machine, or as a Slurm job that NeMo-Run writes and submits.

    pip install --no-deps -r requirements/nemo_run.txt        # in an environment of its own
    python slurm/by_nemo_run.py local -- train --config-file recipes/X.yaml --dry-run
    python slurm/by_nemo_run.py slurm --account A --partition P --nodes 2 --container IMAGE.sqsh --mount /data:/data \
        --dryrun -- train --config-file recipes/X.yaml --run-dir /data/runs/first --student /data/student \
        kd.cache=/data/cache dataset.data_path=/data/corpus

In: what comes after `--`, a command line of megatron-kd, and where to run it. Out: NeMo-Run's experiment, which prints
how the task ended. With --dryrun the Slurm script is printed, nothing is submitted. A start for a script of your own:
`megatron-kd submit` has beyond this the check of every node, the checkpoint before the time limit, and requeueing.
"""

import argparse
import shlex

import nemo_run


def executor(args: argparse.Namespace) -> nemo_run.Executor:
    """Where the task runs: one rank here, or a rank for each GPU of a Slurm job."""
    if args.where == "local":
        return nemo_run.LocalExecutor()
    return nemo_run.SlurmExecutor(
        account=args.account,
        partition=args.partition,
        nodes=args.nodes,
        ntasks_per_node=args.gpus_per_node,
        gpus_per_node=args.gpus_per_node,
        time=args.time,
        mem="0",
        exclusive=True,
        container_image=args.container,
        container_mounts=args.mount,
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        tunnel=nemo_run.LocalTunnel(job_dir=args.job_dir),  # submits from this machine
        packager=nemo_run.Packager(),  # the code is in the container, or where every node sees it
    )


def main() -> None:
    """Run, submit, or print the task."""
    parser = argparse.ArgumentParser(description="megatron-kd through NeMo-Run")
    parser.add_argument("where", choices=["local", "slurm"])
    parser.add_argument("--account")
    parser.add_argument("--partition")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--time", default="04:00:00")
    parser.add_argument("--container", metavar="IMAGE", help="an image with megatron-kd, see Dockerfile")
    parser.add_argument("--mount", action="append", default=[], metavar="HOST:CONTAINER")
    parser.add_argument("--job-dir", default="/tmp/nemo-run", help="scripts and logs; every node has to see it")
    parser.add_argument("--command", default="megatron-kd", help="what starts megatron-kd")
    parser.add_argument("--dryrun", action="store_true", help="print what would be submitted")
    parser.add_argument("words", nargs="+", metavar="WORD", help="after --: the command line of megatron-kd")
    args = parser.parse_args()

    task = nemo_run.Script(inline=shlex.join([args.command, *args.words]))
    with nemo_run.Experiment("megatron-kd") as experiment:
        experiment.add(task, executor=executor(args), name="train")
        if args.dryrun:
            experiment.dryrun()
        else:
            experiment.run(detach=args.where == "slurm", tail_logs=args.where == "local")


if __name__ == "__main__":
    main()
