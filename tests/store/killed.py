"""A program for ``test_faults``: forks workers off, kills them, and looks what that did to the store.

``killed.py ROOT kill ROUNDS SEED`` kills one worker after another. ``killed.py ROOT together ROUNDS SEED`` has four
writers and a collector at once, none of which is killed. Prints counts as JSON.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File, write_layer
from envbuilder.store.gc import carry_out, make_plan
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.store.verify import verify
from tests.smallimage import put_image

if TYPE_CHECKING:
    from collections.abc import Callable

    from envbuilder.oci.model import Layer


@dataclass
class Worker:
    """What a forked process does; ``say`` tells the parent what is finished, and is to be kept from then on."""

    store: Store
    random: random.Random
    say: Callable[[str], None]
    layers: list[Layer] = field(default_factory=list)

    def put(self) -> None:
        data = self.random.randbytes(self.random.randrange(1, 60_000))
        self.say(f"blob {self.store.put(data)}")

    def write(self) -> None:
        """Write a layer as a build does, and remember it."""
        buffer = io.BytesIO()
        entries = [File(f"d/{n}", Bytes(self.random.randbytes(2000))) for n in range(self.random.randrange(1, 12))]
        layer = write_layer(entries, buffer)
        with self.store.writer() as blob:
            blob.file.write(buffer.getvalue())
            blob.commit(layer.digest)
        self.store.remember("layer", f"{layer.digest}", layer.to_json())
        self.say(f"blob {layer.digest}")
        self.layers.append(layer)

    def image(self) -> None:
        if not self.layers:
            self.write()
        name = f"env-{self.random.randrange(4)}-{os.getpid()}"
        image = put_image(self.store, name, self.random.sample(self.layers, min(3, len(self.layers))))
        self.say(f"image {name} {image.digest}")

    def unpack(self) -> None:
        name = self.random.choice(sorted(self.store.images()) or [""])
        digest = self.store.find_image(name)
        if digest is not None:
            image = self.store.image(digest)
            root = root_tree(self.store, image)
            if not (root / "d" / "0").is_file():
                message = f"{root} is not whole"
                raise AssertionError(message)
            self.say(f"root {digest}")

    def collect(self) -> None:
        done = carry_out(self.store, make_plan(self.store, self.random.choice([None, 0, 300_000]), young=0))
        self.say(f"collected {len(done.removed)}")

    def run(self, rounds: int) -> None:
        actions = [self.put, self.write, self.write, self.image, self.image, self.unpack, self.unpack, self.collect]
        for _ in range(rounds):
            self.random.choice(actions)()


def fork(root: Path, seed: int, work: Callable[[Worker], None]) -> tuple[int, int]:
    """Start a process that does some work; return its id and where to read what it says."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    code = 1
    try:
        os.close(read)
        chance = random.Random(seed)  # noqa: S311 (no secrets here)
        work(Worker(Store(root), chance, lambda text: _tell(write, text)))
        code = 0
    except BaseException:  # noqa: BLE001 (reported by the exit code)
        traceback.print_exc()
    os._exit(code)


def _tell(handle: int, text: str) -> None:
    os.write(handle, f"{text}\n".encode())


def hear(handle: int) -> list[list[str]]:
    with os.fdopen(handle, "rb") as file:
        return [line.decode().split() for line in file.read().split(b"\n")[:-1]]


@dataclass
class Counts:
    kills: int = 0
    finished: int = 0
    collected: int = 0
    lost: int = 0
    unclean: int = 0
    failed: int = 0

    def check(self, root: Path, said: list[list[str]]) -> None:
        """Look for what was finished: the images of these names, whole. Blobs alone may have been evicted."""
        store = Store(root)
        self.finished += sum(words[0] != "collected" for words in said)
        self.collected += sum(int(words[1]) for words in said if words[0] == "collected")
        last = {words[1]: Digest.parse(words[2]) for words in said if words[0] == "image"}
        evicted = any(words[0] == "collected" for words in said)
        for name, digest in last.items():
            try:
                image = store.image(digest)
                whole = all(store.has(layer.digest, layer.size) for layer in image.manifest.layers)
            except Exception:  # noqa: BLE001 (any failure is a loss)
                traceback.print_exc()
                whole = False
            self.lost += not whole or (store.find_image(name) is None)
        if not evicted:
            self.lost += sum(not store.has(Digest.parse(words[1])) for words in said if words[0] == "blob")
        store.close()
        found = verify(store, trees=True)
        if not found.clean:
            self.unclean += 1
            sys.stderr.write(f"{found}\n")
        store.close()


def kill(root: Path, rounds: int, seed: int) -> Counts:
    counts, chance = Counts(), random.Random(seed)  # noqa: S311 (no secrets here)
    for number in range(rounds):
        child, handle = fork(root, seed * 10_000 + number, lambda worker: worker.run(1000))
        time.sleep(chance.uniform(0, chance.choice((0.05, 0.2))))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts.kills += 1
        counts.check(root, hear(handle))
        if number % 5 == 4:  # the next command succeeds, and cleans up
            child, handle = fork(root, number, _next_command)
            said = hear(handle)
            counts.failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 or len(said) < 3
            counts.check(root, said)
            left = [*root.glob("**/.tmp-*"), *root.glob("trash/*")]
            counts.unclean += bool(left)
            if left:
                sys.stderr.write(f"left over: {left}\n")
        if number % 20 == 19:
            store = Store(root)
            for name in store.images():
                store.drop_image(name)
            store.close()
            shutil.rmtree(root / "quarantine", ignore_errors=True)
    counts.lost += counts.failed
    return counts


def _next_command(worker: Worker) -> None:
    worker.image()
    worker.unpack()
    worker.collect()


def together(root: Path, rounds: int, seed: int) -> Counts:
    counts = Counts()
    writers = [fork(root, seed * 100 + number, lambda worker: _write(worker, rounds)) for number in range(4)]
    until = root / "done"
    collector = fork(root, seed, lambda worker: _collect(worker, until))
    said: list[list[str]] = []
    for child, handle in writers:
        said += hear(handle)
        counts.failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    until.touch()
    said += hear(collector[1])
    counts.failed += os.waitstatus_to_exitcode(os.waitpid(collector[0], 0)[1]) != 0
    counts.check(root, said)
    return counts


def _write(worker: Worker, rounds: int) -> None:
    """Do what builds do; whatever this process found or put must be there for it as long as it lives."""
    relied: list[Layer] = []
    for _ in range(rounds):
        worker.write()
        relied.append(worker.layers[-1])
        worker.image()
        worker.unpack()
        for layer in relied:
            if not worker.store.blob(layer.digest).exists():
                message = f"{layer.digest} was taken away"
                raise AssertionError(message)


def _collect(worker: Worker, until: Path) -> None:
    while not until.exists():
        worker.collect()
        stranger = Store(worker.store.root)  # leaves something behind, so that there is always something to collect
        stranger.put(worker.random.randbytes(5000))
        stranger.close()


def main(root: str, what: str, rounds: str, seed: str) -> None:
    run = {"kill": kill, "together": together}[what]
    sys.stdout.write(json.dumps(run(Path(root), int(rounds), int(seed)).__dict__))


if __name__ == "__main__":
    main(*sys.argv[1:])
