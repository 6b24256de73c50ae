"""Starting the ranks of one machine, and ending all of them with one message when one of them fails."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection

import torch
from torch import multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from dspark.errors import ConfigError, DsparkError, RankError, one_line
from dspark.verifier.ranks.alone import ALONE, Ranks
from dspark.verifier.ranks.devices import Devices
from dspark.verifier.ranks.processes import Processes, last_step

LIMIT_SECONDS = 20.0
LOCALHOST = "127.0.0.1"


def start(
    work: Callable[[Ranks], None], world_size: int, device_type: str, limit_seconds: float = LIMIT_SECONDS
) -> None:
    """Run ``work(ranks)`` (it must pickle) in ``world_size`` processes of this machine until all have returned; a rank
    alone works in this process, on any device.

    On ``cuda`` a rank takes the GPU of its number, which must see the others' memory. A rank that the others wait for
    longer than ``limit_seconds`` ends them.
    Raises: RankError with one line: the message of the first rank that failed, or which one ended how; the others are
    ended too. ConfigError for fewer GPUs than ranks, or another kind of device.
    """
    if world_size == 1:
        return work(ALONE)
    if world_size < 1 or device_type not in {"cpu", "cuda"}:
        raise ConfigError(f"ranks are one or more processes on cpu or cuda, got {world_size} on {device_type}")
    if device_type == "cuda" and torch.cuda.device_count() < world_size:
        raise ConfigError(f"{world_size} ranks need as many GPUs, torch finds {torch.cuda.device_count()}")
    listener = socket.create_server((LOCALHOST, 0))  # the store would listen to the whole network
    port = listener.getsockname()[1]
    store = TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    context = multiprocessing.get_context("spawn")
    options = (world_size, store.port, device_type, limit_seconds, work)
    running = {rank: context.Process(target=run, args=(rank, *options), daemon=True) for rank in range(world_size)}
    try:
        for process in running.values():
            process.start()
        while running:
            connection.wait([process.sentinel for process in running.values()])
            for rank, process in list(running.items()):
                if process.exitcode:
                    raise RankError(_ending(store, rank, process.exitcode))
                if process.exitcode == 0:
                    del running[rank]
    finally:
        for process in running.values():
            if process.pid is not None:
                process.kill()
                process.join()


def run(
    rank: int, world_size: int, port: int, device_type: str, limit_seconds: float, work: Callable[[Processes], None]
) -> None:
    """What a started process does: join the others, do the work, and leave a user's mistake in the store."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = TCPStore(LOCALHOST, port, is_master=False)
    try:
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        kind = Devices if device_type == "cuda" else Processes
        work(kind(store, rank, world_size, limit_seconds))
    except (DsparkError, OSError, torch.OutOfMemoryError) as error:
        text = f"rank {rank}: {error}" if isinstance(error, torch.OutOfMemoryError) else one_line(error)
        with contextlib.suppress(RuntimeError):  # the store ends with the process that started the ranks
            store.set(f"failure/{rank}", text)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # a terminal sends it to every process, and the one that started the ranks says so
        raise SystemExit(130) from None


def _end_with_parent() -> None:
    """A rank whose parent was killed would hold its GPU's memory for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _ending(store: Store, rank: int, exit_code: int) -> str:
    if store.check([f"failure/{rank}"]):
        return bytes(store.get(f"failure/{rank}")).decode()
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-exit_code, f"signal {-exit_code}")
    how = f"was ended by {name}" if exit_code < 0 else f"ended with status {exit_code}"
    return f"rank {rank} {how}; it last reported step {last_step(store, rank)}"
