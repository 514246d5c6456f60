"""The command line: one file per verb, and nothing heavy imported before a verb runs.

Exit codes of every verb: 0 done (a proof: equal), 1 a proof that found a difference or is void, 2 bad input, 3 the run
itself failed or its report could not be written, 130 interrupted. With ``--json``, stdout holds one JSON document and
nothing else, also for errors: ``{"error": "..."}``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from samebits import __version__
from samebits.errors import (
    CertificateError,
    CheckpointError,
    DeviceError,
    ModelError,
    SamebitsError,
    SettingsError,
    SizeError,
    UnsupportedModelError,
)

VERBS = ("bench", "certificates", "env", "generate", "profile", "prove", "quality", "warm")
"""Each is a module of this package with a click command of the same name."""

BAD_INPUT = (
    CertificateError,
    CheckpointError,
    DeviceError,
    ModelError,
    SettingsError,
    SizeError,
    UnsupportedModelError,
)
"""Errors that the user can mend by asking for something else."""

DIFFERENT, USAGE, FAILED, INTERRUPTED = 1, 2, 3, 130


class _Group(click.Group):
    """Loads a verb's module when it is named, and turns whatever is raised into one line and an exit code."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"samebits.cli.{name}"), name)
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        arguments = sys.argv[1:] if args is None else list(args)
        as_json = "--json" in arguments
        try:
            code = super().main(arguments, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            code = error.exit_code
            if not as_json and type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                _say(error.format_message(), as_json)
        except BAD_INPUT as error:
            code = USAGE
            _say(str(error), as_json)
        except SamebitsError as error:
            code = FAILED
            _say(str(error), as_json)
        except SystemExit:
            # click leaves by itself, with 1, where the reader of a pipe is gone; but 1 says that a proof found a
            # difference. No verb leaves this way.
            code = FAILED
        except (KeyboardInterrupt, click.Abort):
            code = INTERRUPTED
            _say("interrupted", as_json)
        except Exception as error:
            code = FAILED
            # By name: torch, whose error this is, is not imported here.
            if type(error).__name__ == "OutOfMemoryError":
                _say(f"out of memory; --offload model or group, or a smaller --size, needs less ({error})", as_json)
            else:
                traceback.print_exc()
                _say(f"failed with {type(error).__name__}: {error}", as_json)
        sys.exit(code if isinstance(code, int) else 0)


def _say(message: str, as_json: bool) -> None:
    line = " ".join(message.split())
    with contextlib.suppress(OSError):  # Nobody is there to hear it, or the disk is full: the exit code says enough.
        if as_json:
            click.echo(json.dumps({"error": line}))
        else:
            click.echo(f"samebits: {line}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="samebits %(version)s")
def main() -> None:
    """Diffusion transformers of Hugging Face diffusers, faster, with eager's bits, and the proof."""
