"""The command line: one small file per command.

Owns exit codes and how errors look. Never computes. Hazard: only answers go to stdout, so that pipes work.
"""

import os
import sys

import typer
from typer.main import get_command

from makeway.cli.inspect import inspect_command
from makeway.cli.run import run_command
from makeway.errors import MakewayError

app = typer.Typer(
    name="makeway",
    help="Runs Mixture-of-Experts models that are bigger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run_command)
app.command("inspect")(inspect_command)


@app.callback()
def _root() -> None:
    """Runs Mixture-of-Experts models that are bigger than the GPU."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 an error of the input (one line on stderr), 130 interrupted."""
    try:
        get_command(app).main(args=arguments, prog_name="makeway", standalone_mode=True)
    except MakewayError as error:
        print(f"makeway: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nmakeway: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`); send what is still buffered nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
