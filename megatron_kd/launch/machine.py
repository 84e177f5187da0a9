# SPDX-License-Identifier: Apache-2.0
"""What this machine has: versions, GPUs, file systems. Facts only; `doctor` and `node` judge them.

In: nothing but the machine. Out: plain values, ready for JSON. Imports neither torch nor Megatron; costs a second at
most, nearly all of it nvidia-smi.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from megatron_kd.versions import installed_versions

PACKAGES = (
    "megatron-kd", "torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "hydra-core",
    "numpy", "nvidia-nccl-cu13", "nvidia-nccl-cu12",
)  # fmt: skip
_GPU_FIELDS = (
    "name",
    "memory.total",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
)
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "fuse.ceph", "cifs", "fuse.sshfs", "9p"}


def versions() -> dict[str, str]:
    """Python's version, and of each package that is installed."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def gpus() -> list[dict[str, str]]:
    """One entry a GPU: name, memory in MiB, driver, clocks in MHz, and what throttles it now, as nvidia-smi says."""
    lines = output_of("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    return [
        dict(zip(_GPU_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in (lines or "").splitlines()
    ]


def output_of(*command: str, timeout_s: float = 10) -> str | None:
    """What a program prints; None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def container() -> str | None:
    """The container this process runs in: NVIDIA's product and version if it says so; None outside of any."""
    for name in ("NVIDIA_NEMO_VERSION", "NEMO_VERSION", "NVIDIA_PYTORCH_VERSION"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "ENROOT_ROOTFS" in os.environ
    return "a container" if inside else None


def file_system(path: Path) -> tuple[str, bool]:
    """Type of the file system that holds `path`, and whether several nodes can see it."""
    path, best, kind = Path(path).absolute(), "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, found, *_ = line.split()
        if len(mounted) >= len(best) and (path == Path(mounted) or Path(mounted) in path.parents):
            best, kind = mounted, found
    return kind, kind in _SHARED


def free_bytes(path: Path) -> int:
    """Room that is left at `path`, or at its nearest parent that exists."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
