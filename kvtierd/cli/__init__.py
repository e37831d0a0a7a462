"""The command line: ``kvtierd COMMAND``.

Exit codes: 0 all is well, 1 the command failed (for ``doctor``: found errors), 2 wrong usage or configuration, 3 no daemon
answers. Errors are one line on standard error. A command's module is imported when the command runs, so that help and
completion are quick.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from kvtierd import __version__
from kvtierd.errors import ConfigError, DaemonUnavailableError, KvtierdError, RequestError
from kvtierd.lifetime import end_in_order

__all__ = ["EXIT_FAILED", "EXIT_UNREACHABLE", "EXIT_USAGE", "cli", "main"]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_INTERRUPTED: Final = 130
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room for what a command writes, on standard output more often than not: a state of the machine, and no bug."""

_COMMANDS: Final = {
    "serve": ("kvtierd.cli.local:serve", "Run the daemon."),
    "status": ("kvtierd.cli.status:status", "Show tiers, tenants, sessions and counters of a daemon."),
    "top": ("kvtierd.cli.top:top", "Watch tiers, tenants, moves and latencies of a daemon."),
    "advise": ("kvtierd.cli.advise:advise", "Say why the hit rate is what it is, and what would change it."),
    "tenants": ("kvtierd.cli.tenants:tenants", "List tenants, change or take away their limits."),
    "doctor": ("kvtierd.cli.doctor:doctor", "Check whether this host is ready for the configuration."),
    "evict": ("kvtierd.cli.admin:evict", "Forget copies of blocks."),
    "pin": ("kvtierd.cli.admin:pin", "Keep blocks in place for a while."),
    "pins": ("kvtierd.cli.admin:pins", "List pinned blocks and how long they stay so."),
    "unpin": ("kvtierd.cli.admin:unpin", "Take a pin back."),
    "blocks": ("kvtierd.cli.admin:blocks", "List blocks."),
    "story": ("kvtierd.cli.admin:story", "Show what happened to a block."),
    "drain": ("kvtierd.cli.admin:drain", "Stop taking saves and write memory down to NVMe."),
    "checkpoint": ("kvtierd.cli.admin:checkpoint", "Write a snapshot of the NVMe index now."),
    "config": ("kvtierd.cli.local:config", "Show the configuration."),
    "size": ("kvtierd.cli.size:size", "Work out bytes per token of a model, and what tiers hold."),
    "lmcache-config": ("kvtierd.cli.lmcache_config:lmcache_config", "Turn LMCache's configuration into kvtierd's."),
    "demo": ("kvtierd.cli.demo:demo", "See save, spill, restart and load in one minute."),
    "replay": ("kvtierd.cli.replay:replay", "Replay a request trace, simulated or through a daemon, and report its hits."),
    "bench": ("kvtierd.cli.bench:bench", "Measure this host."),
    "completion": ("kvtierd.cli.local:completion", "Write the completion script of a shell."),
}


class CliError(click.ClickException):
    """An error that ends the command with its message and exit code 1."""

    exit_code = EXIT_FAILED


class CliConfigError(CliError):
    """Wrong configuration."""

    exit_code = EXIT_USAGE


class CliUnreachableError(CliError):
    """No daemon answers."""

    exit_code = EXIT_UNREACHABLE


class LazyGroup(click.Group):
    """Commands that are imported when they are needed, and errors turned into lines and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        """Names of all commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        if cmd_name not in _COMMANDS:
            near = difflib.get_close_matches(cmd_name, _COMMANDS, 1)
            if near and not ctx.resilient_parsing:
                raise click.UsageError(f"no such command {cmd_name!r}; did you mean {near[0]!r}?", ctx)
            return None
        module_name, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as e:
            what = f"is not part of this installation ({e.name} is missing)"
            raise CliError(f"'kvtierd {cmd_name}' {what}") from e
        command = getattr(module, attribute)
        assert isinstance(command, click.Command), f"{module_name}.{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click passes it
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        """Complete command names without importing them."""
        names = [click.shell_completion.CompletionItem(n, help=t) for n, (_, t) in _COMMANDS.items() if n.startswith(incomplete)]
        return names or super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run, and turn errors that kvtierd raises on purpose into their line and exit code."""
        try:
            return super().invoke(ctx)
        except ConfigError as e:
            raise CliConfigError(str(e)) from e
        except DaemonUnavailableError as e:
            raise CliUnreachableError(str(e)) from e
        except RequestError as e:
            raise CliError(f"{e.message} ({e.reason.name})") from e
        except KvtierdError as e:
            raise CliError(str(e)) from e


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvtierd", message="%(prog)s %(version)s")
@click.option(
    "--address", envvar="KVTIERD_ADDRESS", metavar="ADDRESS", help="Unix socket or host:port of the daemon.  [KVTIERD_ADDRESS]"
)
@click.option(
    "--config",
    "config_path",
    envvar="KVTIERD_CONFIG",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with the configuration.  [KVTIERD_CONFIG]",
)
@click.option(
    "--token-file",
    envvar="KVTIERD_TOKEN_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that holds the token to show to the daemon.  [KVTIERD_TOKEN_FILE]",
)
@click.pass_context
def cli(ctx: click.Context, address: str | None, config_path: Path | None, token_file: Path | None) -> None:
    """kvtierd keeps LLM KV cache blocks in CPU memory and on NVMe.

    Begin with `kvtierd serve`, and in another terminal `kvtierd status`. Commands find the daemon by its configuration: without
    --address and --config at the socket where `kvtierd serve` listens by default for this user. These options may also follow the
    command.

    Exit codes: 0 fine, 1 failed, 2 wrong usage or configuration, 3 no daemon answers.
    """
    from kvtierd.cli.options import Settings

    ctx.obj = Settings(address=address, config_path=config_path, token_file=token_file)


def _give_output_up() -> None:
    """Drop what waits to be written, where it cannot be: the end of the process would fail by it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: list[str] | None = None) -> NoReturn:
    """Entry point of the ``kvtierd`` command. Never returns: exits with the code of the outcome."""
    end_in_order()
    try:
        result = cli.main(args, prog_name="kvtierd", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except OSError as e:
        if e.errno not in FULL:
            raise
        _give_output_up()
        click.echo(
            f"Error: cannot write {e.filename or 'all of the output'}: {e.strerror}; free some, or write elsewhere", err=True
        )
        sys.exit(EXIT_FAILED)
    sys.exit(result if isinstance(result, int) else 0)
