"""The command ``kvtierd size``: from a model's configuration to sizes of tiers. docs/sizing.md has the formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from kvtierd.cli.options import json_option
from kvtierd.cli.output import console, counted, format_bytes, format_count, format_seconds, make_table, print_json
from kvtierd.errors import ConfigError
from kvtierd.sizing import Layout, Loading, drive_wear, holding, layout_of, loading, model_shape, needed_bytes
from kvtierd.units import parse_size

__all__ = ["size"]

MAX_FILE_BYTES: Final = 16 << 20
MAX_TOKENS: Final = 1 << 40
GB: Final = 10**9
SEES: Final = {"full": "", "mla": "", "swa": " with a window of {window_tokens:,}", "chunked": " in chunks of {window_tokens:,}"}
"""How far layers of a kind look back."""


def _size(_ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = parse_size(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e
    if not value and option.name == "drive_bytes":
        raise click.BadParameter("a drive has more than 0 bytes")
    return value


def _above_zero(what: str) -> Callable[[click.Context, click.Parameter, float | None], float | None]:
    def check(_ctx: click.Context, _option: click.Parameter, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1e15:  # false for nan too
            raise click.BadParameter(f"{value:g} is not possible; write {what} above 0")
        return value

    return check


def _read(path: Path) -> object:
    """The JSON of a model's configuration. Raises ConfigError."""
    if path.is_dir():
        path /= "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {format_bytes(MAX_FILE_BYTES)}; name the config.json of a model")
        return json.loads(text.decode())
    except OSError as e:
        raise ConfigError(f"cannot read the model's configuration {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid JSON: {e}") from e


@click.command()
@click.option(
    "--model-config",
    "path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's config.json, or the folder with it.",
)
@click.option("--dtype", default="auto", show_default=True, help="vLLM's --kv-cache-dtype: auto, bfloat16, fp8, fp8_ds_mla …")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="vLLM's --tensor-parallel-size.")
@click.option("--block-tokens", type=click.IntRange(1, 4096), default=16, show_default=True, help="vLLM's --block-size.")
@click.option("--tokens", type=click.IntRange(1, MAX_TOKENS), default=8192, show_default=True, help="Tokens of one context.")
@click.option("--users", type=click.IntRange(1, 1 << 30), help="Contexts that are to be kept.")
@click.option("--cpu", "cpu_bytes", metavar="SIZE", callback=_size, default="64GiB", show_default=True, help="CPU tier.")
@click.option("--nvme", "nvme_bytes", metavar="SIZE", callback=_size, default="1TiB", show_default=True, help="NVMe tier.")
@click.option("--tokens-per-day", type=float, callback=_above_zero("tokens"), help="New tokens a day: computed, not found.")
@click.option("--drive", "drive_bytes", metavar="SIZE", callback=_size, help="Capacity of the drives; --nvme when left out.")
@click.option(
    "--dwpd",
    type=float,
    callback=_above_zero("a rating"),
    default=1.0,
    show_default=True,
    help="Drive writes a day that they stand.",
)
@click.option(
    "--memory-gb-per-s",
    type=float,
    callback=_above_zero("GB/s"),
    default=50.0,
    show_default=True,
    help="Copy to the GPUs, all ranks.",
)
@click.option(
    "--nvme-gb-per-s", type=float, callback=_above_zero("GB/s"), default=6.0, show_default=True, help="Reads, all drives."
)
@click.option("--prefill-tokens-per-s", type=float, callback=_above_zero("tokens/s"), help="What the engine computes.")
@json_option("Write JSON: sizes in bytes, times in seconds.")
def size(
    path: Path,
    dtype: str,
    tp: int,
    block_tokens: int,
    tokens: int,
    users: int | None,
    cpu_bytes: int,
    nvme_bytes: int,
    tokens_per_day: float | None,
    drive_bytes: int | None,
    dwpd: float,
    memory_gb_per_s: float,
    nvme_gb_per_s: float,
    prefill_tokens_per_s: float | None,
    as_json: bool,
) -> None:
    """Work out what a model's KV cache takes, and what tiers of a size make of it.

    Bandwidths are assumptions: `kvtierd bench` measures those of this machine.

    \b
    kvtierd size --model-config config.json --tp 4 --dtype fp8
    kvtierd size --model-config config.json --tokens 32768 --users 500 --cpu 512GiB --nvme 14TiB
    kvtierd size --model-config config.json --tokens-per-day 2e9 --drive 7.68TB --dwpd 1
    """
    layout = layout_of(model_shape(_read(path)), dtype=dtype, tp=tp, block_tokens=block_tokens)
    if tokens < layout.chunk_tokens:
        raise ConfigError(
            f"--tokens {tokens}: of a context shorter than a block nothing is kept, and a block of this model has "
            f"{layout.chunk_tokens} tokens; name a longer context, or a smaller --block-tokens"
        )
    drive = nvme_bytes if drive_bytes is None else drive_bytes
    if tokens_per_day and not drive:
        raise ConfigError("--tokens-per-day tells the wear of drives, and there are none: name --drive, or an --nvme above 0")
    answer: dict[str, Any] = {"model": _model(layout)}
    answer["tiers"] = {
        "cpu": _tier(layout, cpu_bytes, tokens, users, loading(layout, tokens, memory_gb_per_s * GB), nvme=False),
        "nvme": _tier(
            layout, nvme_bytes, tokens, users, loading(layout, tokens, memory_gb_per_s * GB, nvme_gb_per_s * GB), nvme=True
        ),
    }
    answer["context"] = {"tokens": tokens, "stored_bytes": needed_bytes(layout, 1, tokens, nvme=False), "users": users}
    answer["assumed"] = {"memory_gb_per_s": memory_gb_per_s, "nvme_gb_per_s": nvme_gb_per_s}
    if prefill_tokens_per_s:
        answer["context"]["compute_seconds"] = tokens / prefill_tokens_per_s
    if tokens_per_day:
        wear = drive_wear(layout, tokens_per_day, drive, dwpd)
        answer["wear"] = {
            "tokens_per_day": tokens_per_day,
            "written_bytes_per_day": wear.written_bytes_per_day,
            "drive_bytes": drive,
            "drive_writes_per_day": wear.drive_writes_per_day,
            "rated_drive_writes_per_day": dwpd,
            "budget_bytes_per_day": wear.budget_bytes_per_day,
            "fits": wear.fits,
        }
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def _model(layout: Layout) -> dict[str, Any]:
    shape = layout.shape
    return {
        "name": shape.name,
        "attention": shape.attention,
        "layers": [{"kind": layers.kind, "count": layers.count, "window_tokens": layers.window} for layers in shape.layers],
        "kv_heads": shape.kv_heads,
        "dtype": layout.dtype,
        "tp": layout.tp,
        "bytes_per_token": layout.bytes_per_token,
        "rank_bytes_per_token": layout.rank_bytes_per_token,
        "block_tokens": layout.chunk_tokens,
        "block_bytes": layout.bytes_per_token * layout.chunk_tokens,
    }


def _tier(layout: Layout, capacity: int, tokens: int, users: int | None, load: Loading, *, nvme: bool) -> dict[str, Any]:
    held = holding(layout, capacity, tokens, nvme=nvme)
    return {
        "capacity_bytes": capacity,
        "tokens": held.tokens,
        "contexts": held.contexts,
        "needed_bytes": None if users is None else needed_bytes(layout, users, tokens, nvme=nvme),
        "load_bytes": load.bytes,
        "load_seconds": load.seconds,
        "break_even_tokens_per_s": load.break_even_tokens_per_s,
    }


def _print(answer: dict[str, Any]) -> None:
    out = console()
    model, context = answer["model"], answer["context"]
    kinds = ", ".join(counted(layers["count"], "layer") + SEES[layers["kind"]].format(**layers) for layers in model["layers"])
    heads = "" if model["attention"] == "MLA" else f", {counted(model['kv_heads'], 'KV head')}"
    out.print(f"{model['name']}: {model['attention']}, {kinds}{heads}, {model['dtype']}, {counted(model['tp'], 'rank')}")
    out.print(
        f"{format_count(model['bytes_per_token'])} bytes a token ({format_bytes(model['rank_bytes_per_token'])} on each rank); "
        f"a block of kvtierd is {counted(model['block_tokens'], 'token')}, {format_bytes(model['block_bytes'])}"
    )
    out.print(f"a context of {format_count(context['tokens'])} tokens is kept in {format_bytes(context['stored_bytes'])}")
    columns = ["tier", ">capacity", ">tokens held", ">contexts held", ">needed", ">load a context", ">faster than computing below"]
    rows = [_row(name, tier) for name, tier in answer["tiers"].items()]
    if context["users"] is None:
        columns.remove(">needed")
        rows = [[*row[:4], *row[5:]] for row in rows]
    out.print()
    out.print(make_table("", columns, rows))
    assumed = answer["assumed"]
    out.print(
        f"copies at {assumed['memory_gb_per_s']:g} GB/s from memory to the GPUs, NVMe read at {assumed['nvme_gb_per_s']:g} GB/s"
    )
    if "compute_seconds" in context:
        out.print(f"computing a context takes {format_seconds(context['compute_seconds'])}")
    if "wear" in answer:
        _print_wear(answer["wear"])


def _row(name: str, tier: dict[str, Any]) -> list[str]:
    return [
        name,
        format_bytes(tier["capacity_bytes"]),
        format_count(tier["tokens"]),
        format_count(tier["contexts"]),
        format_bytes(tier["needed_bytes"] or 0),
        format_seconds(tier["load_seconds"]),
        f"{format_count(tier['break_even_tokens_per_s'])} tokens/s",
    ]


def _print_wear(wear: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"NVMe is written {format_bytes(wear['written_bytes_per_day'])} a day, {wear['drive_writes_per_day']:.2f} drive writes of "
        f"{format_bytes(wear['drive_bytes'])}"
    )
    if wear["fits"]:
        out.print(f"that is within the rating of {wear['rated_drive_writes_per_day']:g} a day")
    else:
        budget = max(1, wear["budget_bytes_per_day"] >> 20)  # 0 would be no limit
        out.print(
            f'that is above the rating of {wear["rated_drive_writes_per_day"]:g} a day: set nvme.write_budget to "{budget}MiB" and '
            'nvme.admission to "second-use", or take more or larger drives'
        )
