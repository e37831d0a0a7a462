"""Kills a real daemon again and again under load, over a disk that fails, and looks at everything that is left each time.

Several client processes make random calls on four realms; the right bytes of a block follow from its realm and key. Each round ends
with a SIGKILL of the daemon. Then clients are held, a daemon starts on what is left, and every block that it lists is loaded and
compared; limits and figures are compared with memory and files. A key that its only user was told to be evicted must not come back.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from kvtierd.client import Client
from kvtierd.errors import StartupError
from kvtierd.lifetime import end_in_order, keep, scratch_folder, tied
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.faults import checks
from kvtierd.testing.faults.client import WRONG, evicted_keys, forget_evicted, make_state, progress_of
from kvtierd.testing.faults.contents import REALMS, Realm
from kvtierd.testing.faults.disk import FaultyDisk, compiler
from kvtierd.testing.faults.plan import Kind, Plan, draw

CPU_BYTES: Final = 6 << 20
NVME_BYTES: Final = 40 << 20
CLIENTS: Final = 5
JOURNAL_PAUSE_S: Final = 0.6
"""A removal is in the journal after this at the latest."""
PATIENCE_S: Final = 60.0
PATIENCE_KILLS: Final = 40
"""So many more than asked for at the most, until everything has been seen that a campaign has to see."""
TELL_EVERY: Final = 20


class Process:
    """One client process."""

    def __init__(self, folder: Path, number: int, address: str, seed: str) -> None:
        self.number = number
        self.state = folder / f"client-{number}.state"
        self.log = folder / f"client-{number}.log"
        make_state(self.state)
        arguments = {"realm": number % len(REALMS), "number": number, "address": address, "seed": seed, "path": str(self.state)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "kvtierd.testing.faults.client", json.dumps(arguments)]), stdout=log, stderr=log
            )

    def check(self) -> None:
        """It lives: it ends by itself only when bytes are wrong, or by a bug."""
        status = self._process.poll()
        assert status != WRONG, self.log.read_text()
        assert status is None, f"client {self.number} ended with {status}: {self.log.read_text()[-2000:]}"

    def signal(self, number: signal.Signals) -> None:
        """Stop it or let it go on."""
        self._process.send_signal(number)

    def end(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()


class Campaign:
    """One daemon, its clients, its disk, and what was counted.

    Args:
        folder: for everything; on a file system that takes O_DIRECT where that is to be tried.
        seed: of plans and clients.
        disk: False leaves faults of the disk out.
        encrypted: the NVMe tier has a key, which changes now and then.
    """

    def __init__(self, folder: Path, seed: int, *, disk: bool, encrypted: bool) -> None:
        self.seed = seed
        self.folder = folder
        under = folder / "nvme"
        self.disk = FaultyDisk(under, folder / "faults") if disk else None
        self.folders = [under / "a", under / "b"]
        config: dict[str, dict[str, Any]] = {
            "cpu": {"capacity": CPU_BYTES, "extent": 512 << 10, "ttl": 0.5},
            "nvme": {"capacity": NVME_BYTES, "folders": [str(f) for f in self.folders], "snapshot_journal": 8192},
            "log": {"slow": 0},
        }
        self.key_path = folder / "nvme.key" if encrypted else None
        if self.key_path is not None:
            config["nvme"]["encryption_key_file"] = str(self.key_path)
            self._new_key(self.key_path)
        self.daemon = DaemonProcess(folder / "d", config, tie=True)
        if self.disk is not None:
            self.daemon.environment = self.disk.environment
        self.clients: list[Process] = []
        self.gone: list[Process] = []
        self.counts: Counter[str] = Counter()
        self._log_read = 0

    def _new_key(self, path: Path) -> None:
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))

    def plan(self, number: int) -> Plan:
        """What befalls the daemon in a round."""
        return draw(self.seed, number, disk=self.disk is not None, encrypted=self.key_path is not None)

    def start(self) -> None:
        """The first daemon and its clients."""
        self.daemon.start()
        for _ in range(CLIENTS):
            self._spawn()
        self._all_go_on("each client loads")

    def _spawn(self) -> None:
        number = len(self.clients) + len(self.gone)
        self.clients.append(Process(self.folder, number, self.daemon.address, f"{self.seed}/client/{number}"))

    def round(self, number: int) -> None:
        """Load, death, start, and a look at everything. Raises AssertionError for whatever must not be."""
        plan = self.plan(number)
        self._say(str(plan))
        rng = random.Random(f"{self.seed}/{number}/run")
        if not plan.at_once:
            self._all_go_on("each client finds the daemon again")
        if self.disk is not None:
            self.disk.set(plan.rates, seed=hash((self.seed, number)), only=plan.only)
            self.disk.watch_writes(on=plan.kind is Kind.POWER)
        self._under_load(plan, rng)
        self._end_daemon(plan, rng)
        for client in self.clients:
            client.signal(signal.SIGSTOP)
            client.check()
        self._start_again(plan)
        self._look(plan)
        for client in self.clients:
            client.signal(signal.SIGCONT)

    def _under_load(self, plan: Plan, rng: random.Random) -> None:
        until_s = time.monotonic() + plan.run_s
        if plan.kill_client:
            time.sleep(rng.uniform(0, plan.run_s))
            victim = self.clients.pop(rng.randrange(len(self.clients)))
            victim.end()
            self.gone.append(victim)
            self._spawn()
            self.counts["SIGKILLs of clients"] += 1
        while (left_s := until_s - time.monotonic()) > 0:
            checks.check_memory(self.daemon.pid, CPU_BYTES)
            checks.check_files(self.folders, NVME_BYTES)
            time.sleep(min(left_s, 0.2))

    def _end_daemon(self, plan: Plan, rng: random.Random) -> None:
        process = self.daemon.process
        assert process is not None
        assert process.poll() is None, f"the daemon ended by itself: {self.daemon.log()[-3000:]}"
        if plan.kind is Kind.DRAIN:
            process.send_signal(signal.SIGTERM)
            time.sleep(rng.uniform(0, 0.4))
        self._kill()
        self.counts[plan.kind.value] += 1
        if self.disk is not None and plan.kind is Kind.POWER:
            self.counts["pages lost with the power"] += self.disk.cut_power(rng, plan.lost_share)

    def _kill(self) -> None:
        self.daemon.kill()
        self.counts["SIGKILLs of the daemon"] += 1

    def _start_again(self, plan: Plan) -> None:
        if self.disk is not None:
            self.disk.watch_writes(on=False)
            if not plan.faulty_start:
                self.disk.heal()
        if plan.kind is Kind.KEY:
            assert self.key_path is not None
            self._new_key(self.key_path)
        for after_s in plan.start_kills_s:
            self.daemon.launch()
            time.sleep(after_s)
            self._kill()
        try:
            self.daemon.start()
        except StartupError:
            assert plan.faulty_start, self.daemon.log()[-4000:]
            self.counts["starts refused by a failing disk"] += 1
            self.daemon.kill()
            self._heal()
            self.daemon.start()
        if any(f.problem.startswith("lost: ") for t in self.daemon.status().tiers for f in t.folders):
            assert plan.faulty_start, self.daemon.log()[-4000:]
            self.counts["starts without a folder that failed"] += 1
            self._kill()
            self._heal()
            self.daemon.start()
        self._heal()

    def _heal(self) -> None:
        if self.disk is not None:
            self.disk.heal()

    def _look(self, plan: Plan) -> None:
        found = checks.listing(self.daemon)
        checks.check_accounts(self.daemon, self.folders, found)
        checks.check_files(self.folders, NVME_BYTES)
        if self.key_path is not None:
            assert not (found and plan.kind is Kind.KEY), f"blocks that another key encrypted: {found}"
            checks.check_hidden(self.folders, found)
        missing = self._load_all(found)
        count = sum(map(len, found.values()))
        lost = sum(map(len, missing.values()))
        assert not (lost and plan.is_honest), f"{lost} of {count} listed blocks are none: {missing}"
        self._check_evicted(plan, found)
        self.counts["listed blocks loaded and compared"] += count - lost
        self.counts["listed blocks that the disk had lost"] += lost
        if lost:
            time.sleep(JOURNAL_PAUSE_S)
        checks.check_memory(self.daemon.pid, CPU_BYTES)
        checks.tiers(self.daemon)
        text = self.daemon.log()
        fresh, self._log_read = text[self._log_read :], len(text)
        for word in ("Traceback", "CRITICAL", "failed by a bug"):
            assert word not in fresh, fresh[-6000:]

    def _load_all(self, found: checks.Listing) -> checks.Listing:
        clients: dict[Realm, Client] = {}
        try:
            for realm in found:
                clients[realm] = Client(
                    realm.namespace, self.daemon.address, realm.tenant, timeout_s=30.0, name="check", require=True
                )
            return checks.load_all(clients, found)
        finally:
            for client in clients.values():
                client.close()

    def _check_evicted(self, plan: Plan, found: checks.Listing) -> None:
        """What was evicted stays so, unless its removal was lost with the disk."""
        listed = {(realm, key) for realm, keys in found.items() for key in keys}
        for client in self.clients:
            realm = REALMS[client.number % len(REALMS)]
            gone = evicted_keys(client.state, client.number)
            back = [key.hex() for key in gone if (realm, key) in listed]
            assert not (back and plan.is_honest), f"evicted, and there again: {back} of client {client.number}"
            self.counts["evictions that held"] += len(gone) - len(back)
            if not plan.is_honest:
                forget_evicted(client.state)

    def _all_go_on(self, what: str) -> None:
        before = [progress_of(client.state)[2] for client in self.clients]
        until_s = time.monotonic() + PATIENCE_S
        while any(progress_of(c.state)[2] <= then for c, then in zip(self.clients, before, strict=True)):
            for client in self.clients:
                client.check()
            assert time.monotonic() < until_s, what
            time.sleep(0.1)

    def missed(self) -> str:
        """What a campaign has to see, and this one has not yet; "" when it has seen it."""
        if not self.counts["evictions that held"]:
            return "no key that was evicted was looked for"
        if self.disk is not None and not any(self.disk.hits().values()):
            return "the disk has not failed once"
        return ""

    def finish(self) -> None:
        """Everybody goes on; nothing outlives its process."""
        self._all_go_on("each client loads again")
        for client in self.clients:
            client.end()
        until_s = time.monotonic() + PATIENCE_S
        while (status := self.daemon.status()).sessions or any(t.pinned_bytes for t in status.tiers):
            assert time.monotonic() < until_s, f"sessions and pins end with their processes: {status}"
            time.sleep(0.1)
        assert self.daemon.stop() == 0
        totals = [progress_of(client.state) for client in [*self.clients, *self.gone]]
        for name, values in zip(
            ("calls", "blocks saved", "blocks loaded and compared by clients"), zip(*totals, strict=True), strict=True
        ):
            self.counts[name] = sum(values)
        if self.disk is not None:
            for fault, hits in self.disk.hits().items():
                self.counts[f"fault {fault.name.lower()}"] = hits

    def close(self) -> None:
        """Leave no process behind."""
        for client in self.clients:
            client.end()
        self.daemon.kill()
        if self.disk is not None:
            self.disk.close()

    def _say(self, text: str) -> None:
        with (self.folder / "story.log").open("a") as f:
            f.write(text + "\n")


def run(
    folder: Path, seed: int, kills: int, *, disk: bool, encrypted: bool = False, first: int = 0, tell: bool = False
) -> Counter[str]:
    """A whole campaign.

    Args:
        folder: empty.
        seed: of everything that is drawn.
        kills: SIGKILLs of the daemon, at least.
        disk: whether the disk fails too.
        encrypted: whether the NVMe tier is, with a key that changes now and then.
        first: number of the first round.
        tell: print how far it is.

    Returns:
        What was counted.

    Raises:
        AssertionError: something is wrong; names the round.
    """
    campaign = Campaign(folder, seed, disk=disk, encrypted=encrypted)
    number = first
    try:
        campaign.start()
        while (killed := campaign.counts["SIGKILLs of the daemon"]) < kills or campaign.missed():
            assert killed < kills + PATIENCE_KILLS, f"seed {seed}: {killed} kills, and {campaign.missed()}"
            try:
                campaign.round(number)
            except Exception as e:
                raise AssertionError(f"seed {seed}, {campaign.plan(number)}:\n{e}") from e
            number += 1
            if tell and number % TELL_EVERY == 0:
                done, looked = campaign.counts["SIGKILLs of the daemon"], campaign.counts["listed blocks loaded and compared"]
                print(f"{done} of {kills} kills, {looked} blocks compared, 0 wrong", flush=True)
        campaign.finish()
    finally:
        campaign.close()
    campaign.counts["rounds"] = number - first
    return campaign.counts


def main() -> int:
    """Run and report. Returns the exit status: 1 when anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kvtierd.testing.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs of the daemon, at least (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to begin where a failure was (default 0)")
    parser.add_argument("--no-disk-faults", action="store_true", help="leave faults of the disk out, which need a C compiler")
    parser.add_argument("--encrypted", action="store_true", help="encrypt the NVMe tier, and start with another key now and then")
    parser.add_argument(
        "--folder", type=Path, help="where to work, made anew and kept (default: a temporary folder, kept on failure)"
    )
    args = parser.parse_args()
    if args.kills < 1 or args.first < 0:
        parser.error("--kills is at least 1, and --first at least 0")
    disk = not args.no_disk_faults
    if disk and compiler() is None:
        parser.error("faults of the disk need a C compiler: install gcc, or pass --no-disk-faults")
    end_in_order()
    if args.folder is None:
        with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-faults-") as folder:
            return _report(folder, args, disk=disk)
    args.folder.mkdir(parents=True, exist_ok=True)
    if any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty: name another folder, or empty it")
    return _report(args.folder, args, disk=disk)


def _report(folder: Path, args: argparse.Namespace, *, disk: bool) -> int:
    """Run in a folder, which stays on failure, and tell. Returns the exit status."""
    began_s = time.monotonic()
    print(f"seed {args.seed}, {args.kills} kills, in {folder}", flush=True)
    try:
        counts = run(folder, args.seed, args.kills, disk=disk, encrypted=args.encrypted, first=args.first, tell=True)
    except AssertionError as e:
        keep(folder)
        print(f"{e}\n\nfailed after {time.monotonic() - began_s:.0f} s; files and logs are in {folder}", file=sys.stderr)
        return 1
    width = max(map(len, counts))
    print(f"0 wrong bytes, every limit kept, figures equal files; {time.monotonic() - began_s:.0f} s")
    print("\n".join(f"{name:<{width}}  {count}" for name, count in counts.items()))
    return 0


__all__ = ["Campaign", "main", "run"]
