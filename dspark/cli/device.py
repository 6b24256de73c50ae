"""The ``--device`` option of the commands, checked before anything is loaded."""

from typing import Annotated

import torch
import typer

DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> str:
    """Returns: the name. Raises: typer.BadParameter for a device that this machine lacks or that is not supported."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {name!r}")
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise typer.BadParameter(f"{name!r} is not here: torch finds {found} CUDA devices; use --device cpu")
    return name


Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", callback=check_device)]
