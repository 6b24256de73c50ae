"""Ranks, world size and sums over ranks; the same code with one process."""

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from dspark.config import TrainSection
from dspark.errors import ConfigError

CPU_PROCESSES = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N train.py ..."


def start_accelerator(train: TrainSection, environment: Mapping[str, str], launcher: Sequence[str]) -> Accelerator:
    """Join the processes that the launcher started and check that all of them did join.

    ``environment`` and ``launcher`` (the parent's command line, may be empty) say what the user asked for. Precision,
    devices, DeepSpeed and FSDP2 come from ``accelerate launch``; clipping, batch size and accumulation from the run.
    Raises: ConfigError when the processes would train apart, or for a way of training that is not supported.
    """
    # accelerate hands it on to torch, which has renamed it; with no buffer to share both names mean the same.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    # Every output of the draft is a view for good; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    wants_deepspeed, wants_fsdp = (
        environment.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("DEEPSPEED", "FSDP")
    )
    if train.optimizer == "muon" and (wants_deepspeed or wants_fsdp):
        name, parts = ("DeepSpeed", "flat parts") if wants_deepspeed else ("FSDP2", "rows")
        raise ConfigError(f"train.optimizer muon moves whole matrices, {name} {parts} of them; use adamw with it")
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
    if wants_deepspeed and "LOCAL_RANK" in environment and not torch.cuda.is_available():
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    accelerator = Accelerator(
        gradient_accumulation_steps=train.accumulation_steps,
        log_with=list(train.trackers) or None,
        project_dir=str(train.folder),
        kwargs_handlers=handlers,
    )
    kind = accelerator.distributed_type
    check_launch(accelerator.num_processes, environment, launcher)
    if wants_deepspeed and kind != DistributedType.DEEPSPEED:
        raise ConfigError(
            "DeepSpeed was asked for but accelerate trains without it (ACCELERATE_USE_CPU has this effect); "
            "on CPUs start with DS_ACCELERATOR=cpu and without ACCELERATE_USE_CPU"
        )
    if wants_fsdp and kind != DistributedType.FSDP:
        raise ConfigError("FSDP was asked for but accelerate trains without it (it does so on CPUs and in one process)")
    if accelerator.mixed_precision not in {"no", "bf16"}:
        raise ConfigError(f"mixed_precision {accelerator.mixed_precision} is not supported; use bf16 or no")
    if kind == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        if plugin.zero_stage not in {1, 2}:
            raise ConfigError(f"DeepSpeed ZeRO stage {plugin.zero_stage} is not supported; use configs/deepspeed/")
        plugin.deepspeed_config |= {
            "gradient_clipping": train.max_grad_norm,
            "train_micro_batch_size_per_gpu": train.batch_size,
            "gradient_accumulation_steps": train.accumulation_steps,
        }
    elif kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        check_fsdp(plugin, has_parallelism=accelerator.parallelism_config is not None)
        plugin.mixed_precision_policy = None  # precision is autocast's, as in every other way; reductions are float32
    elif kind not in {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}:
        known = "one process, data parallel, DeepSpeed or FSDP2"
        raise ConfigError(f"accelerate's {kind.value} is not supported; use {known}")
    return accelerator


def check_fsdp(plugin: FullyShardedDataParallelPlugin, has_parallelism: bool) -> None:
    """Refuse the kinds of FSDP that no test trains with. Raises: ConfigError naming what was found and expected."""
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    expected = {
        "fsdp_version": (plugin.fsdp_version, 2),
        "fsdp_offload_params": (offloads, False),
        "fsdp_transformer_layer_cls_to_wrap": (plugin.transformer_cls_names_to_wrap, ["DraftLayer"]),
        "fsdp_activation_checkpointing": (bool(plugin.activation_checkpointing), False),
        "fsdp_cpu_ram_efficient_loading": (bool(plugin.cpu_ram_efficient_loading), False),
        "fsdp_ignored_modules": (plugin.ignored_modules, None),
        "use_parallelism_config": (has_parallelism, False),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise ConfigError(f"{name} must be {wanted}, got {found}; use configs/accelerate/fsdp2.yaml")


def check_launch(world_size: int, environment: Mapping[str, str], launcher: Sequence[str]) -> None:
    """Refuse the launches that accelerate turns into something else without a word.
    Raises: ConfigError naming what was asked, what came of it, and the command that does it.
    """
    started, wanted, found = int(environment.get("WORLD_SIZE", "1")), _option(launcher, "num_processes"), ""
    if started != world_size:
        found = f"the launcher started {started} processes but this one trains in a group of {world_size}"
    elif any(word.endswith("launch") for word in launcher) and wanted.isdigit() and int(wanted) > world_size:
        found = f"accelerate launch was asked for {wanted} processes and started {world_size} (it does so with --cpu)"
    if found:
        raise ConfigError(f"{found}; on CPUs start with {CPU_PROCESSES}")


def parent_command() -> list[str]:
    """The command line of the process that started this one, where the system tells it (Linux); else empty."""
    path = Path(f"/proc/{os.getppid()}/cmdline")
    return path.read_text().split("\0") if path.is_file() else []


def leave(accelerator: Accelerator) -> None:
    """End what was begun, at the end of a door. With several processes nothing behind this call runs: an interpreter
    that unwinds beside the threads of a group of processes was seen to hang, or abort.
    """
    accelerator.wait_for_everyone()  # none leaves the group while the main one still writes
    accelerator.end_training()
    if accelerator.num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def sum_over_ranks(value: Tensor) -> Tensor:
    """The elementwise sum of every rank's value; a new tensor, the same on every rank."""
    total = value.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


def whole(tensor: Tensor) -> Tensor:
    """The tensor, put together where FSDP2 spread it over the processes, each of which must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every process has, moved to where ``like`` is and spread over the processes as it is."""
    here = value.to(like.device)
    if not isinstance(like, DTensor):
        return here
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None).clone()


def _option(command: Sequence[str], name: str) -> str:
    """The value of ``--name value`` or ``--name=value`` in a command line, with - and _ alike; empty if absent."""
    found = re.search(rf"(?:^|\0)--{name.replace('_', '[-_]')}[=\0]([^\0]*)", "\0".join(command))
    return found[1] if found else ""
