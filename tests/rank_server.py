"""Ranks on CPUs that need not load the packages again: forks of a server that has loaded them."""

import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any
from unittest import mock

import pytest
import torch
from training_run import ROOT


class _SameOutput:
    """Where a process is started by pickling it, this makes its standard output and error those of who pickled it."""

    def __reduce__(self) -> tuple[Callable[..., "_SameOutput"], tuple[Any, Any]]:
        return _print_there, (DupFd(1), DupFd(2))


def _print_there(*there: Any) -> _SameOutput:
    for number, file in enumerate(there, 1):
        os.dup2(file.detach(), number)
    return _SameOutput()


class _Rank(ForkServerProcess):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.output = _SameOutput()


class _Server(ForkServerContext):
    Process = _Rank


def ranks_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """``dspark.verifier.ranks.start`` forks a server that has loaded the packages, on CPUs: fresh processes take
    seconds to load them.
    """
    if torch.cuda.is_available():
        return
    context = _Server()
    context.set_forkserver_preload(["ranking"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "tests")))):
        forkserver.ensure_running()
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)
