"""``dspark doctor``: seconds of looking before hours of work. Every check says whether all is right, why, the cure."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.cli.doctor import draft as of_draft
from dspark.cli.doctor import subject as of_machine
from dspark.cli.doctor import target as of_target
from dspark.cli.doctor.subject import WORDS, Finding, NotApplicable, Subject
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.errors import DsparkError
from dspark.target.loading import locate_target

CHECKS: list[Callable[[Subject], Finding]] = [
    *(of_machine.versions, of_machine.gpus, of_machine.disk, of_target.census, of_machine.memory),
    *(of_target.template, of_target.swiglu_limits, of_target.taps, of_target.head, of_target.router_ties),
    *(of_target.decode_equals_prefill, of_target.rollback),
    *(of_draft.record_origin, of_draft.loss_mask, of_draft.record_rows),
    *(
        of_draft.draft_fits,
        of_draft.slot_alignment,
        of_draft.conventions,
        of_draft.leaks,
        of_draft.export_round_trip,
        of_draft.parity,
    ),
]
"""In the order in which they are made: what others rest on comes first."""
STATES = {True: ("pass", "green"), False: ("fail", "bold red"), None: ("not applicable", "dim")}


def doctor(
    target: Annotated[str, typer.Argument(help="A name (ling-3.0-nano, ...) or a Hugging Face folder.")],
    record: Annotated[Path | None, typer.Option(help="A record.folder of this target.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft of this target.")] = None,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Look for what would go wrong in silence: seconds to minutes, before anything expensive.

    Every check prints pass, fail or not applicable, what it found, and the cure; the exit status is 1 if one failed.
    Where the weights are not here, or too large for the memory, the checks that need them do not apply; the checkpoint
    is held against config.json by its headers all the same.
    """
    console, subject = Console(highlight=False), Subject(locate_target(target), record, draft, device)
    states = [show(console, check.__name__, look(check, subject)) for check in CHECKS]
    console.print(", ".join(f"{states.count(state)} {name}" for state, (name, _) in STATES.items()))
    raise typer.Exit(int(False in states))


def look(check: Callable[[Subject], Finding], subject: Subject) -> Finding:
    """What a check finds. An error of ours fails the check that meets it first; any other error goes through."""
    try:
        return check(subject)
    except NotApplicable as reason:
        return Finding(None, str(reason))
    except (DsparkError, PackageNotFoundError) as error:
        known, subject.told = subject.told, subject.told | {str(error)}
        return Finding(None if str(error) in known else False, str(error))


def show(console: Console, name: str, finding: Finding) -> bool | None:
    """Print a finding, and the cure where something is wrong. Returns: whether all is right."""
    row, (state, style) = Table.grid(padding=(0, 2)), STATES[finding.is_right]
    cure = f"\nCure: {WORDS['cures'][name]}." if finding.is_right is False else ""
    row.add_row(Text(f"{state:14}", style), f"{name.replace('_', ' '):21}", Text(finding.found + cure))
    console.print(row)
    return finding.is_right
