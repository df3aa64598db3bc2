"""The command line: one small file per command.

Owns exit codes and how errors look. Never computes. Hazard: only answers go to stdout, so that pipes work.
"""

import functools
import os
import sys
from collections.abc import Callable

import typer

from makeway.cli.bench import COMMANDS
from makeway.cli.demo import demo_command
from makeway.cli.inspect import inspect_command
from makeway.cli.plan import plan_command
from makeway.cli.run import run_command
from makeway.cli.serve import serve_command
from makeway.errors import MakewayError

app = typer.Typer(
    name="makeway",
    help="Runs Mixture-of-Experts models that are bigger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose failures end as a person expects: errors of the input in one line and exit code 2, Ctrl-C with
    130, a reader that left (`| head`) with 0."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except MakewayError as error:
            print(f"makeway: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\nmakeway: interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:
            # What is still buffered must go nowhere, or Python complains at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    return run


app.command("demo")(guarded(demo_command))
app.command("run")(guarded(run_command))
app.command("serve")(guarded(serve_command))
app.command("plan")(guarded(plan_command))
app.command("inspect")(guarded(inspect_command))

bench_app = typer.Typer(name="bench", help="Measure this machine and this engine.", no_args_is_help=True)
for _name, _command in COMMANDS.items():
    bench_app.command(_name)(guarded(_command))
app.add_typer(bench_app)


@app.callback()
def _root() -> None:
    """Runs Mixture-of-Experts models that are bigger than the GPU."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 an error of the input, 130 interrupted."""
    app(args=arguments, prog_name="makeway")
