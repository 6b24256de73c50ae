"""Where a result comes from: commit, versions, hardware and command."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "deepspeed", "triton")


def describe_launch(command: Sequence[str]) -> dict[str, Any]:
    """Facts of this process: time, ``command`` (absolute paths without their folders), commit, versions, hardware."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(Path(word).name if Path(word).is_absolute() else word for word in command),
        "commit": commit(),
        "versions": versions(),
        "hardware": {"processor": _processor(), "cores": cores, "threads": torch.get_num_threads(), "gpus": gpus},
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on, those that are installed."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if find_spec(name)}


def commit() -> str:
    """The commit of this source tree, with -dirty when files were changed; "unknown" outside a git clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
