"""Leases: who holds one, when it counts, and what happens where none can be written."""

from __future__ import annotations

import errno
import gc as garbage
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.store import leases
from envbuilder.store.leases import FOREIGN, GateError, HeldLease, gate, live_leases
from envbuilder.store.store import Store

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO = Digest.of(b"one"), Digest.of(b"two")

_HOLD = """
import sys, time
from pathlib import Path
from envbuilder.store.store import Store
store = Store(Path(sys.argv[1]))
print(store.put(b"held"), flush=True)
time.sleep(60)
"""


def live(store: Store) -> set[Digest]:
    with gate(store.root, closed=True):
        return {digest for lease in live_leases(store.root) for digest in lease.digests}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "s")


def test_what_is_found_or_put_is_held_until_the_store_is_let_go(store: Store):
    watcher = Store(store.root)
    digest = store.put(b"data")
    assert not store.has(ONE)  # also what was only asked for: another may put it the moment after
    assert live(watcher) == {digest, ONE}
    store.close()
    assert live(watcher) == set()
    other = Store(store.root)
    assert other.has(digest)
    assert live(watcher) == {digest}
    del other
    garbage.collect()
    assert live(watcher) == set()
    assert list((watcher.root / "leases").iterdir()) == []


def test_a_lease_for_a_block(store: Store):
    with store.lease([ONE, TWO], "a test"):
        assert live(store) == {ONE, TWO}
        with gate(store.root, closed=True):
            (lease,) = live_leases(store.root)
        assert lease.holder == f"process {os.getpid()}: a test"
    assert live(store) == set()


def test_kill_9_lets_go(store: Store):
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(store.root)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        digest = Digest.parse(holder.stdout.readline().strip())
        assert live(store) == {digest}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert live(store) == set()
    assert list((store.root / "leases").iterdir()) == []


def test_a_forked_process_goes_on_holding(store: Store):
    lease = HeldLease(store.root, "parent")
    lease.add([ONE])
    go_on, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done)
        lease.release()  # not its to release
        os.read(go_on, 1)
        os._exit(0)
    os.close(go_on)
    assert live(store) == {ONE}
    os.close(done)
    os.waitpid(child, 0)
    assert live(store) == {ONE}
    lease.release()
    assert live(store) == set()


@pytest.mark.parametrize(
    ("about", "age", "counts"),
    [
        ({"host": "elsewhere", "boot": "other"}, 60, True),
        ({"host": "elsewhere", "boot": "other"}, FOREIGN + 60, False),
        ({"host": "elsewhere", "boot": "other"}, -3600, True),  # from the future
        ({"host": os.uname().nodename, "boot": "before the power cut"}, 60, False),
        ({"host": "a container", "boot": leases.boot()}, 60, False),
        (None, 60, False),  # killed while it was made
    ],
)
def test_locks_that_cannot_be_seen(store: Store, about: dict[str, str] | None, age: float, counts: bool):  # noqa: FBT001
    path = store.root / "leases" / "1-abc"
    path.parent.mkdir()
    path.write_text((json.dumps(about) if about else "") + f"\n{ONE.hex}\n{TWO.hex[:40]}")
    os.utime(path, (time.time() - age,) * 2)
    assert live(store) == ({ONE} if counts else set())
    assert path.exists() == counts


def test_the_gate_is_passed_together_and_closed_alone(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leases, "_WAIT", 0.1)
    with gate(store.root), gate(store.root), pytest.raises(GateError, match="holds the store open"):  # noqa: SIM117
        with gate(store.root, closed=True):
            pass
    order: list[str] = []

    def put() -> None:
        store.put(b"x")
        order.append("put")

    with gate(store.root, closed=True):
        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(0.05)
        order.append("opened")
    thread.join()
    assert order == ["opened", "put"]


def test_without_room_for_a_lease_the_gate_stays_open(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leases, "_WAIT", 0.05)

    def full(_handle: int, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lease = HeldLease(store.root, "first")
    monkeypatch.setattr(leases, "_write_line", full)
    lease.add([ONE])  # no error: reading goes on with a full disk
    late = HeldLease(store.root, "second")
    late.add([TWO])
    for held in (lease, late):
        with pytest.raises(GateError), gate(store.root, closed=True):
            pass
        held.release()
    with gate(store.root, closed=True):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_store_that_may_not_be_written_to(store: Store, monkeypatch: pytest.MonkeyPatch, number: int):
    digest = store.put(b"data")
    store.close()

    def refuse(_path: object, _flags: int, _mode: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    reader = Store(store.root)
    assert reader.has(digest)
    assert reader.read(digest) == b"data"
    reader.close()


def test_a_file_system_without_locks(store: Store, monkeypatch: pytest.MonkeyPatch):
    def none(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    assert store.has(store.put(b"data"))
    with pytest.raises(GateError, match="no locks") as caught, gate(store.root, closed=True):
        pass
    assert caught.value.exit_code == 4


def test_many_threads(store: Store):
    digests = [Digest.of(str(number).encode()) for number in range(400)]
    threads = [threading.Thread(target=lambda n=n: [store.has(d) for d in digests[n::4]]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live(store) == set(digests)
