# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine: one controller, two node daemons, munge; started for the tests, gone after them.

Each node says it has 8 CPUs and 8 GPUs, whatever the machine has: Slurm only counts them. Needs root, and Debian's
slurmctld, slurmd, slurm-client and munge.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2")
GPUS = 8
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=30
MailProg=/bin/true
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000 Gres=gpu:{gpus}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Daemons under `root`; commands talk to them through `env`."""

    def __init__(self, root: Path):
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
        if missing or os.geteuid() != 0:
            raise RuntimeError(
                f"the Slurm tests need root and {', '.join(_PROGRAMS)}; missing: {', '.join(missing) or 'root'}. "
                "apt-get install slurmctld slurmd slurm-client munge, or run `make test`, which leaves them out."
            )
        self.root = root
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "PATH": _search_path()}
        for name in [name for name in self.env if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.env[name]
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Starts the daemons; returns when both nodes are idle."""
        root, host = self.root, socket.gethostname()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (root / name).mkdir()
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o600)
        for index in range(GPUS):
            (root / f"gpu{index}").touch()
        (root / "slurm.conf").write_text(_CONF.format(host=host, root=root, ports=_free_ports(3), gpus=GPUS))
        (root / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={root}/gpu[0-{GPUS - 1}]\n")
        files = {name: f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        self._spawn("munged", "--foreground", "--force", f"--socket={root}/munge.socket", *files.values())
        wait_for(lambda: (root / "munge.socket").exists(), 20, "munge's socket")
        self._spawn("slurmctld", "-D", "-i")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node)
        wait_for(lambda: self.node_states() == ["idle", "idle"], 60, "two idle nodes", self.daemon_logs)

    def stop(self) -> None:
        """Cancels what still runs and ends the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.env, check=False, timeout=30)
        wait_for(lambda: not self.run("squeue", "--noheader", "--states=R,CG"), 30, "an empty queue", fatal=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def bring_back(self, node: str) -> None:
        """Put a node that was set down to work again, once its last job is off it."""
        deadline = time.monotonic() + 120
        while "DOWN" in self.run("sinfo", "--noheader", "--nodes", node, "--format", "%T").upper():
            assert time.monotonic() < deadline, self.run("scontrol", "show", "node", node)
            with contextlib.suppress(AssertionError):  # refused while the job is being taken off
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
            time.sleep(1)

    def run(self, *command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**self.env, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def node_states(self) -> list[str]:
        """idle, alloc, mix, down, ... of each node."""
        return self.run("sinfo", "--Node", "--noheader", "--format=%t").split()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.run("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 180, log: Callable[[], str] = str) -> None:
        """Waits until the job is in one of the states; fails at once if it ends in another."""

        def reached() -> bool:
            state = self.job(job)["JobState"]
            assert state in states or state not in _ENDED, f"job {job} is {state}\n{log()[-6000:]}"
            return state in states

        wait_for(reached, timeout_s, f"job {job} in {states}", log)

    def daemon_logs(self) -> str:
        """The end of each daemon's output."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.root.glob("*.out")))

    def _spawn(self, program: str, *arguments: str) -> None:
        name = "-".join([program, *arguments[-1:]] if program == "slurmd" else [program])
        with open(self.root / f"{name}.out", "w") as log:
            self._daemons.append(subprocess.Popen([program, *arguments], env=self.env, stdout=log, stderr=log))


def wait_for(
    condition: Callable[[], bool], timeout_s: float, what: str, log: Callable[[], str] = str, *, fatal: bool = True
) -> None:
    """Polls four times a second."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            assert not fatal, f"no {what} after {timeout_s} s\n{log()[-6000:]}"
            return
        time.sleep(0.25)


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports
