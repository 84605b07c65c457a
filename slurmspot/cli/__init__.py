"""The command line. Each command lives in a module of its own, loaded only when it is run."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

import click

from slurmspot import __version__
from slurmspot.errors import SlurmspotError

SCHEMA_VERSION = 1

COMMANDS = {
    "sandbox": "A private, real Slurm cluster on this machine.",
    "doctor": "Whether cluster, environment and storage are fit for spot jobs.",
    "launch": "Submit a requeueable training job to spot capacity.",
    "status": "Where a run stands: attempts, last step, last checkpoint.",
    "watch": "Follow a run to its end and lift Slurm's requeue backoff.",
    "inject": "Take capacity away from a run, on purpose.",
    "verify": "Check every byte of a run's checkpoints.",
    "export": "Write a checkpoint's tensors to a safetensors file.",
    "timeline": "What happened to a run or job, attempt by attempt.",
    "report": "One self-contained HTML file about one or more runs.",
    "plan": "Which checkpoint period to choose, and what spot will really save.",
    "study": "Compare spot runs with an uninterrupted baseline.",
    "template": "Batch scripts for those who write their own.",
}


class _LazyGroup(click.Group):
    """Knows its commands by name; imports one only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"slurmspot.cli.{cmd_name}")
        command = module.command
        if not isinstance(command, click.Command):
            raise TypeError(f"slurmspot.cli.{cmd_name}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slurmspot")
def cli() -> None:
    """Spot GPUs on Slurm, made safe and measured.

    Exit codes: 0 good, 1 failed or not accepted, 2 wrong use, 3 nothing found, 4 Slurm not
    reachable, 75 checkpointed and wants to be requeued.
    """


def print_json(document: dict[str, Any]) -> None:
    """Print a machine-readable answer on stdout, with the schema's version first."""
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2))


def leave_in_order() -> None:
    """From now on SIGTERM and SIGHUP, where heeded at all, end the command as Ctrl-C does.

    What it has taken is given back on the way out.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; errors become three lines on stderr and an exit code."""
    try:
        code = cli.main(args=argv, prog_name="slurmspot", standalone_mode=False)
    except SlurmspotError as error:
        click.echo(f"slurmspot: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("slurmspot: interrupted", err=True)
        sys.exit(130)
    except OSError as error:  # above all a full disk under the output
        click.echo(f"slurmspot: {error.filename or 'the output'}: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try once more
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
