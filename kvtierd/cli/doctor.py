"""``kvtierd doctor``: is this host ready for the configuration? Each answer says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import click
from rich.text import Text

from kvtierd.cli.checks_access import check_limits, check_listen, check_tokens
from kvtierd.cli.checks_direct import check_direct
from kvtierd.cli.checks_gpu import Cuda, check_cuda, check_gds, check_packages, find_cuda
from kvtierd.cli.checks_memory import (
    check_cgroup,
    check_files,
    check_free_memory,
    check_huge_pages,
    check_memlock,
    check_populate,
    check_shmem_pages,
)
from kvtierd.cli.checks_storage import check_encryption, check_folder, check_metrics_address, check_socket, check_space
from kvtierd.cli.findings import Finding, Host, Level
from kvtierd.cli.options import Settings, config_option, json_option
from kvtierd.cli.output import clean, console, make_table, print_json
from kvtierd.config import Config

__all__ = ["doctor", "examine"]

_STYLES: Final = {Level.OK: "green", Level.WARN: "yellow", Level.ERROR: "bold red"}


def examine(config: Config, host: Host, cuda: Cuda) -> Iterator[Finding]:
    """All findings, in order. A check that fails by itself is a warning, never the end of the others."""
    memory: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("kernel", lambda: [check_populate()]),
        ("memory", lambda: [check_free_memory(host, config)]),
        ("cgroup memory", lambda: [check_cgroup(host, config)]),
        ("memlock limit", lambda: [check_memlock(config, cuda.library)]),
        ("huge pages of shared memory", lambda: [check_shmem_pages(host, config)]),
        ("reserved huge pages", lambda: [check_huge_pages(host)]),
        ("open files", lambda: [check_files(config)]),
        ("socket", lambda: [check_socket(config.server.socket, "socket")]),
        ("descriptor socket", lambda: [check_socket(config.server.fd_socket, "descriptor socket")]),
        ("metrics address", lambda: [check_metrics_address(config)]),
        ("tokens", lambda: check_tokens(config)),
        ("API on TCP", lambda: check_listen(config)),
    ]
    storage: list[tuple[str, Callable[[], Iterable[Finding]]]] = []
    if config.nvme.capacity:
        storage.append(("NVMe space", lambda: [check_space(config)]))
        storage.append(("NVMe encryption", lambda: check_encryption(config)))
        storage += [(f"folder {f}", partial(check_folder, host, config, f)) for f in config.nvme.folders]
    devices: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("CUDA", lambda: [check_cuda(config, cuda)]),
        ("limits of tenants", lambda: check_limits(config, len(cuda.devices))),
        ("GPUDirect Storage", lambda: [check_gds(host, config, cuda)]),
        ("GPU memory to NVMe", lambda: check_direct(config)),
        ("Python packages", lambda: [check_packages()]),
    ]
    for name, check in (*memory, *storage, *devices):
        try:
            yield from check()
        except Exception as e:
            yield Finding(name, Level.WARN, f"the check failed: {type(e).__name__}: {e}", "nothing is known about it", "")


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "found": finding.found,
        "meaning": finding.meaning,
        "fix": finding.fix,
    }


def _row(finding: Finding) -> tuple[Text, str, Text]:
    text = Text(clean(finding.found))
    if finding.meaning:
        text.append(f"\n{clean(finding.meaning)}", style="dim" if finding.level is Level.OK else "")
    if finding.fix:
        text.append(f"\nfix: {clean(finding.fix)}", style="cyan")
    return Text(finding.level.value, style=_STYLES[finding.level]), finding.check, text


@click.command()
@config_option
@json_option()
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check whether this host is ready for the configuration; fails when there are errors.

    Writes up to 64 MiB to each NVMe folder for a few seconds and removes it again. Where there is an HBM tier, it takes some
    hundred MiB of each GPU meanwhile.
    """
    config = ctx.ensure_object(Settings).load()
    findings = list(examine(config, Host(), find_cuda()))
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    if as_json:
        print_json(
            {
                "ok": counts[Level.ERROR] == 0,
                "errors": counts[Level.ERROR],
                "warnings": counts[Level.WARN],
                "checks": [_finding_json(f) for f in findings],
            }
        )
    else:
        console().print(make_table("", ("level", "check", "found"), map(_row, findings), fold=True))
        click.echo(f"\n{counts[Level.ERROR]} errors, {counts[Level.WARN]} warnings, {counts[Level.OK]} fine")
    if counts[Level.ERROR]:
        ctx.exit(1)
