"""Targets that read text which people write: the daemon's TOML file, its variables, LMCache's YAML file."""

from __future__ import annotations

from pathlib import Path

from kvtierd.config import Config, load_config
from kvtierd.connectors.lmcache import LmcacheConfigError, read_config_file, translate
from kvtierd.errors import ConfigError
from kvtierd.service.config_text import config_toml

ROOT = Path(__file__).parents[2]


def _told(error: Exception, path: Path) -> None:
    text = str(error)
    assert text, "an error says what is wrong"
    assert len(text) < 20_000, "and no more than somebody reads"
    assert "Traceback" not in text and type(error).__name__ not in text, path


class TomlTarget:
    """A configuration is taken, and then it can be written and read again; or refused with a text."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "kvtierd.toml"

    def seeds(self) -> list[bytes]:
        """The documented file, and one of many forms."""
        text = (ROOT / "deploy" / "kvtierd.toml").read_bytes()
        return [
            text[:3000],
            b'[cpu]\ncapacity = "64MiB"\n[nvme]\ncapacity = 0\n[tenants.a]\nclass = "premium"\ncpu_reserve = "10%"\n',
            b'[server]\nlisten = "[::1]:5"\ninsecure = true\nsocket_mode = "0600"\nmax_deadline = "1h"\n[nvme]\nfolders = ["/a"]\n',
            b"a = " + b"[" * 2000,
            b"[cpu]\ncapacity = " + b"9" * 5000,
            b"[cpu]\ncapacity = 0x" + b"f" * 4000,
            b'[server]\nsocket = "a\\u0000b"\n',
        ]

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        self._path.write_bytes(data)
        try:
            config = load_config(self._path, env={})
        except ConfigError as e:
            _told(e, self._path)
            return
        assert isinstance(config, Config)
        again = config_toml(config)
        self._path.write_text(again, encoding="utf-8")
        assert config_toml(load_config(self._path, env={})) == again, "what is shown as configuration is one"


class YamlTarget:
    """LMCache's configuration is translated, or refused with a text."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lmcache.yaml"

    def seeds(self) -> list[bytes]:
        """Keys with and without a counterpart, and shapes that they cannot have."""
        return [
            b"chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0\nremote_url: null\n",
            b'local_disk: "file:///a,b"\nmax_local_disk_size: 5\nextra_config: {use_odirect: true, save_only_first_rank: yes}\n',
            b"enable_p2p: [1, {a: b}]\nchunk_sise: 5\nextra_config: '{\"a\": [1]}'\nblocking_timeout_secs: .inf\n",
            b"a: &a [x, x]\nb: &b [*a, *a]\nmax_local_cpu_size: *b\nremote_serde: *b\n",
            b"chunk_size: 0x" + b"f" * 4000 + b"\n",
            b"a: &a [*a]\nlocal_disk: *a\n",
        ]

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        self._path.write_bytes(data)
        try:
            file = read_config_file(self._path)
            result = translate({}, {}, file, ranks=2)
            # A daemon's configuration comes out of it, or the text says which key to change.
            Config.model_validate({k: v for k, v in result.daemon.items() if k != "nvme"})
        except LmcacheConfigError as e:
            _told(e, self._path)
