"""Checks of who may call the daemon, and of what tenants may use: tokens, the API on TCP, limits."""

from __future__ import annotations

from collections.abc import Iterator

from kvtierd.cli.findings import Finding, Level
from kvtierd.config import Config
from kvtierd.errors import ConfigError
from kvtierd.runtime.tokens import read_grants
from kvtierd.tenant_config import TIER_NAMES, check_tenants

__all__ = ["check_limits", "check_listen", "check_tokens"]


def check_tokens(config: Config) -> Iterator[Finding]:
    """The file of tokens, where there is one."""
    server = config.server
    if server.token_file is None:
        return
    try:
        grants = read_grants(server.token_file).values()
    except ConfigError as e:
        yield Finding("tokens", Level.ERROR, str(e), "the daemon cannot start", "correct the file, or server.token_file")
        return
    useless = [grant.name for grant in grants if not (grant.tenants or grant.admin)]
    if useless:
        meaning = "they are good for nothing"
        fix = "give them tenants or admin = true, or take them out"
        yield Finding("tokens", Level.WARN, f"{', '.join(useless)}: neither tenants nor admin", meaning, fix)
    elif server.unix_tokens != "none" and not any(grant.admin for grant in grants):
        meaning = "nobody can use the admin API: kvtierd status, evict, drain and others"
        fix = 'give a token admin = true, or set server.unix_tokens = "none"'
        yield Finding("tokens", Level.WARN, f"none of {len(grants)} tokens in {server.token_file} has admin = true", meaning, fix)
    else:
        yield Finding("tokens", Level.OK, f"{len(grants)} in {server.token_file}")


def check_listen(config: Config) -> Iterator[Finding]:
    """The API on TCP, where there is one: what keeps others out."""
    server = config.server
    if server.listen is None:
        return
    name, fix = "API on TCP", "docs/security.md says how to set up TLS and tokens"
    if not server.tls_cert:
        meaning = "whoever sees its packets reads and changes all that is sent"
        yield Finding(name, Level.WARN, f"{server.listen} without TLS", meaning, fix)
    elif server.token_file is None and server.tls_client_ca is None:
        meaning = "whoever reaches it may act for every tenant and use the admin API"
        yield Finding(name, Level.WARN, f"{server.listen} with neither tokens nor client certificates", meaning, fix)
    else:
        yield Finding(name, Level.OK, f"{server.listen} asks who calls")


def check_limits(config: Config, gpus: int) -> Iterator[Finding]:
    """Limits of tenants, where there are any, on this host: what a configuration alone cannot tell."""
    if not config.tenants:
        return
    name = "limits of tenants"
    hbm, cpu, nvme = config.block_bytes
    capacity = (gpus * config.hbm.pool_bytes if hbm is None and gpus else hbm, cpu, nvme)
    try:
        check_tenants(config.tenants, capacity)
    except ValueError as e:
        meaning = f"with {gpus} GPUs here; the daemon starts with a reserve out of force"
        yield Finding(name, Level.ERROR, str(e), meaning, "correct the reserves, or hbm.capacity")
        return
    idle = sorted(
        {
            key
            for tier, size in zip(TIER_NAMES, capacity, strict=True)
            for key in (f"{tier}_quota", f"{tier}_reserve", f"{tier}_ttl")
            if size == 0 and any(getattr(tenant, key) for tenant in config.tenants.values())
        }
    )
    if idle:
        fix = "leave them out, unless this file is for other hosts too"
        yield Finding(name, Level.WARN, f"{', '.join(idle)} are set", "there is no such tier here, so they do nothing", fix)
    else:
        yield Finding(name, Level.OK, f"of {len(config.tenants)}; their reserves fit")
