"""Build, push and pull beside Docker (BuildKit, uv), buildah and skopeo: the same wheels, one run, ratios.

    python -m benchmarks.build                                   # small: mlflow-skinny, numpy, pandas; a few minutes
    python -m benchmarks.build --size full --output benchmarks/results/build-full.md

Run it as root from the checkout, on a machine with little else to do: it starts a Docker engine and a registry of its
own below TMPDIR and removes them at the end. Wheels come from the store (--store) and are fetched into it when they are
not there. Prints Markdown on stdout; says on stderr what it is at.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import limit, ours, peers
from benchmarks.measure import CommandFailedError, Runner, machine
from benchmarks.tables import Results, Side, Step, copies_table, detail_table, facts_table, main_table, median
from benchmarks.wheelset import SIZES, closure
from envbuilder.atomic import atomic_file
from envbuilder.errors import EnvbuilderError
from envbuilder.lock.files import read_lock
from envbuilder.spec.catalog import Catalog
from envbuilder.store.store import Store, default_root
from envbuilder.system.interpreter import find_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.measure import Measured
    from benchmarks.ours import Input
    from envbuilder.oci.model import Image

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "lockfiles" / "base-v4.lock.toml"
#: Disk that a run takes, in multiples of the wheels: context, its copy in BuildKit, the layer, two images in a registry.
_ROOM = 9
_LATER, _LAUNCHES = 3, 7


@dataclass(frozen=True)
class Bench:
    """What the rounds share: the input, where they may write, how they run commands, where results go."""

    given: Input
    work: Path
    runner: Runner
    results: Results

    @property
    def statement(self) -> tuple[str, str, str]:
        """The command that imports."""
        return "python", "-c", self.given.size.statement


def main() -> None:
    """Check, measure, print."""
    try:
        _main(_arguments())
    except (CommandFailedError, EnvbuilderError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _main(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lock = read_lock(LOCK)
    size = SIZES[args.size]
    _check(sum(package.size for package in closure(lock, size.packages)))
    began = dt.datetime.now(dt.UTC)
    with ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="bench-"))  # short: a socket's path may have 107 bytes
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        runner = Runner(work, stack.enter_context((work / "log").open("wb")))
        say(f"preparing {size.name}: {len(closure(lock, size.packages))} wheels")
        given = ours.prepare(size, lock, Store(args.store), work, runner)
        bench = Bench(given, work, runner, Results())
        limits = measure_limit(bench, args.runs)
        images = [image for number in range(args.runs) for image in one_run(bench, number, args.peer_runs)]
        facts = list(our_facts(bench, images))
        text = report(bench, limits, facts, began, list(peers.versions(runner)))
    print(text)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(args.output) as out:
            out.write(f"{text}\n".encode())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, push and pull beside docker and buildah, on the same wheels.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="small (default) or full")
    parser.add_argument("--runs", type=int, default=3, help="runs of ours; medians are printed (default 3)")
    parser.add_argument("--peer-runs", type=int, help="runs of the peers (default: as many; 1 for the full size)")
    parser.add_argument("--store", type=Path, default=default_root(), help="where the wheels are (default: your store)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report to FILE as well")
    args = parser.parse_args()
    if args.peer_runs is None:
        args.peer_runs = 1 if args.size == "full" else args.runs
    return args


def _check(wheel_bytes: int) -> None:
    """Say what is missing before anything is done."""
    if os.geteuid() != 0:
        raise SystemExit("run it as root: starting a Docker engine takes it")
    if packages := peers.missing():
        raise SystemExit(f"install first: apt-get install --no-install-recommends {' '.join(packages)}")
    needed, free = _ROOM * wheel_bytes + 3_000_000_000, shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        raise SystemExit(
            f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB free, but about {needed / 1e9:.0f} GB are needed; "
            "set TMPDIR to a folder on a larger disk"
        )


def say(text: str) -> None:
    """Say on stderr what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def one_run(bench: Bench, number: int, peer_runs: int) -> list[Image]:
    """Take one turn of each side, so that whatever the machine does meanwhile meets all of them."""
    say(f"run {number + 1}: envbuilder")
    images = our_round(bench)
    if number < peer_runs:
        say(f"run {number + 1}: docker")
        docker_round(bench)
        say(f"run {number + 1}: buildah")
        buildah_round(bench)
    return images


def our_round(bench: Bench) -> list[Image]:
    """Build, push, rebuild, pull, run; return the images before and after the change."""
    given, add = bench.given, _adder(bench, Side.OURS)
    cache, pulled, copied = bench.work / "one", bench.work / "two", bench.work / "three"
    ours.fresh_cache(given, cache)
    measured, image = ours.build(bench.runner, cache, given.catalog)
    add(Step.BUILD, measured)
    add(Step.AGAIN, *(ours.build(bench.runner, cache, given.catalog)[0] for _ in range(_LATER)))
    with peers.registry(bench.work / "registry") as address:
        ours.push(bench.runner, cache, ours.BASE, address)
        push = _with_growth(bench.work / "registry", lambda: ours.push(bench.runner, cache, ours.NAME, address))
        add(Step.PUSH, push)
        moved = sum(layer.size for layer in image.manifest.layers)
        skopeo_round(bench, ours.store_in(cache), moved)
        measured, after = ours.build(bench.runner, cache, given.changed)
        add(Step.REBUILD, replace(measured, size=ours.new_bytes(image, after)))
        shutil.rmtree(cache)
        add(Step.COPY, replace(ours.pull(bench.runner, copied, address, unpack=False), size=moved))
        shutil.rmtree(copied)
        add(Step.PULL, replace(ours.pull(bench.runner, pulled, address), size=moved))
    _run_it(bench, Side.OURS, lambda *words: ours.launch(bench.runner, pulled, given.catalog, *words))
    shutil.rmtree(pulled)
    return [image, after]


def skopeo_round(bench: Bench, store: Path, moved: int) -> None:
    """Copy our image, which lies in ``store``, to a registry of its own that has the base, and from there."""
    add, skopeo, layout = _adder(bench, Side.SKOPEO), peers.Skopeo(bench.runner), bench.work / "layout"
    folder = bench.work / "registry-of-skopeo"
    with peers.registry(folder) as address:
        skopeo.push(store, ours.BASE, address)
        add(Step.PUSH, _with_growth(folder, lambda: skopeo.push(store, ours.NAME, address)))
        add(Step.COPY, replace(skopeo.pull(ours.NAME, address, layout), size=moved))
        shutil.rmtree(layout)


def docker_round(bench: Bench) -> None:
    """Do with Docker what ``our_round`` does."""
    add, context = _adder(bench, Side.DOCKER), bench.work / "context"
    with peers.docker(bench.work / "docker", bench.runner) as engine:
        peers.write_context(bench.given, context)
        engine.take_base(bench.given)
        add(Step.BUILD, engine.build(context))
        add(Step.AGAIN, *(engine.build(context) for _ in range(_LATER)))
        with peers.registry(bench.work / "registry") as address:
            engine.push_base(address)
            pushed = _with_growth(bench.work / "registry", lambda: engine.push(address))
            add(Step.PUSH, pushed)
            peers.change_context(bench.given, context)
            # The one layer changes as a whole: its size in the registry is what a rebuild makes anew.
            add(Step.REBUILD, replace(engine.build(context), size=pushed.size))
            shutil.rmtree(context)
            engine.forget()
            add(Step.PULL, replace(engine.pull(address), size=peers.stored_bytes(bench.work / "registry")))
        _run_it(bench, Side.DOCKER, engine.launch)


def buildah_round(bench: Bench) -> None:
    """Build, push and pull with buildah."""
    add, context = _adder(bench, Side.BUILDAH), bench.work / "context"
    with peers.buildah(bench.work / "buildah", bench.runner) as builder:
        peers.write_context(bench.given, context)
        builder.take_base(bench.given)
        add(Step.BUILD, builder.build(context))
        shutil.rmtree(context)
        with peers.registry(bench.work / "registry") as address:
            builder.push_base(address)
            add(Step.PUSH, _with_growth(bench.work / "registry", lambda: builder.push(address)))
            builder.forget()
            add(Step.PULL, replace(builder.pull(address), size=peers.stored_bytes(bench.work / "registry")))


def _run_it(bench: Bench, side: Side, launch: Callable[..., Measured]) -> None:
    add = _adder(bench, side)
    add(Step.START, launch("true"))
    add(Step.FIRST_IMPORT, launch(*bench.statement))
    add(Step.LATER_IMPORT, *(launch(*bench.statement) for _ in range(_LATER)))
    add(Step.LAUNCH, *(launch("true") for _ in range(_LAUNCHES)))


def _adder(bench: Bench, side: Side) -> Callable[..., None]:
    def add(step: Step, *measured: Measured) -> None:
        bench.results.add(side, step, *measured)
        say(f"  {step.value}: {', '.join(f'{one.wall:.2f}' for one in measured)} s")

    return add


def _with_growth(registry: Path, push: Callable[[], Measured]) -> Measured:
    """Push, and state as its size by how much the registry grew."""
    before = peers.stored_bytes(registry)
    measured = push()
    return replace(measured, size=peers.stored_bytes(registry) - before)


def measure_limit(bench: Bench, rounds: int) -> limit.Limits:
    """Measure the limits in a process of their own, so that their memory is not ours."""
    say("limits")
    recipe = Catalog(ROOT).recipe(ours.RECIPE)
    python = find_interpreter(read_lock(LOCK).target.python, recipe.interpreter, Store(ours.store_in(bench.given.seed)))
    words = ["-m", "benchmarks.limit", str(bench.given.wheels), "--python", str(python.executable)]
    words += ["--json", "--rounds", str(rounds)]
    return limit.from_json(bench.runner.quietly(sys.executable, *words, env={"PYTHONPATH": _python_path()}))


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def our_facts(bench: Bench, images: list[Image]) -> Iterator[tuple[str, str, str]]:
    """Yield what the table of medians cannot say: what, measured, to reach."""
    results, runner = bench.results, bench.runner
    before, after = images[:2]
    known = {layer.digest for layer in after.manifest.layers}
    bucket = max(layer.size for layer in before.manifest.layers if layer.digest not in known)
    new = ours.new_bytes(before, after)
    yield (
        "new bytes after one small package changed, against its bucket",
        f"{new / 1e6:.2f} MB / {bucket / 1e6:.2f} MB = {new / bucket:.2f}",
        "1.2",
    )
    peak = max(one.peak for one in results.of(Side.OURS, Step.BUILD))
    yield "peak memory of a build, largest process", f"{peak / 1e6:.0f} MB", "512 MB"
    builds = [image.digest for image in images[::2]]
    if len(builds) > 1:
        verdict = "equal" if len(set(builds)) == 1 else "DIFFER"
        yield f"digests of {len(builds)} builds, each on a store of its own", verdict, "equal"
    bare = median([runner.run(["true"]).wall for _ in range(_LAUNCHES)]) or 0.0
    launched = results.wall(Side.OURS, Step.LAUNCH) or 0.0
    yield "launch overhead over the bare command, second start", f"{1000 * (launched - bare):.0f} ms", "150 ms"
    docker = results.wall(Side.DOCKER, Step.LAUNCH)
    if docker is not None:
        yield "the same, `docker run`", f"{1000 * (docker - bare):.0f} ms", ""
    version = median([runner.run([ours.program(), "--version"]).wall for _ in range(_LAUNCHES)]) or 0.0
    yield "`envbuilder --version`", f"{1000 * version:.0f} ms", "100 ms"


def report(
    bench: Bench, limits: limit.Limits, facts: list[tuple[str, str, str]], began: dt.datetime,
    versions: list[tuple[str, str]],
) -> str:  # fmt: skip
    """Return the whole report as Markdown."""
    given, results = bench.given, bench.results
    ours_build = results.of(Side.OURS, Step.BUILD)
    wheels = (
        f"The closure of {', '.join(given.size.packages)} in base-v4's lock: {len(given.packages)} wheels of "
        f"{given.bytes / 1e6:.0f} MB. Written by `python -m benchmarks.build --size {given.size.name}`."
    )
    limits_table = limits.table(median([one.wall for one in ours_build]), median([one.cpu for one in ours_build]))
    parts = [
        f"# Building, pushing and pulling beside docker and buildah, {given.size.name}, {began:%Y-%m-%d}",
        wheels,
        description(bench, versions),
        f"{main_table(results)}\n\nRatio: the peer's seconds over ours.",
        f"The same image, moved as it is:\n\n{copies_table(results)}",
        facts_table(facts),
        f"## What is compared\n\n{NOTES}",
        f"## Each step\n\n{detail_table(results)}",
        f"## The limit\n\n{limits_table}",
    ]
    return "\n\n".join(parts)


def description(bench: Bench, versions: list[tuple[str, str]]) -> str:
    """Return the machine, the versions and the number of runs as a list."""
    revision = bench.runner.quietly("git", "-C", ROOT, "describe", "--always", "--dirty")
    runs = ", ".join(f"{side.value} {len(bench.results.of(side, Step.PUSH))}" for side in Side)
    load = "{:.1f}, {:.1f}, {:.1f} in the last 1, 5, 15 minutes".format(*os.getloadavg())
    own = [("envbuilder", f"revision {revision}"), ("runs", runs), ("load at the end", load)]
    return "\n".join(f"- {name}: {value}" for name, value in [*machine(bench.work), *versions, *own])


NOTES = """\
- Everybody begins with the base (system and interpreter: our own two lowest layers) and with all wheels on the local
  disk, their bytes in the page cache. Ours is `envbuilder build` on a store without package layers. The peers run one
  Dockerfile: `uv pip install --no-deps --compile-bytecode` of the wheels, mounted from the build context, one layer.
- `docker build` copies the build context to its daemon, wheels included, as it does for every user whose wheels are
  local; buildah reads them in place. BuildKit's cache is empty at the first build and kept for the later ones.
- buildah builds with `--isolation chroot --layers=false` and overlay storage, and keeps no build cache.
- The registry keeps blobs on the same disk and has the base already when something is pushed.
- Pulling begins with nothing, not even the base, and everybody unpacks while pulling. What is left for the first start
  differs (a container's file system, our root of hard links), so that the sum of the two rows is to be compared.
- skopeo copies our image from the store, which is an OCI layout, to a registry of its own, and from there to another
  layout. It verifies digests as we do and unpacks nothing, so it is held against `envbuilder pull --no-unpack`.
- uv verifies no hash of a local wheel and does not see to it that a second build gives the same bytes; our build
  computes both digests of every layer.
- MB made: for envbuilder the compressed layers of packages, for docker the uncompressed layer; at a rebuild, what has
  to be pushed. MB moved: what the registry got, or holds of the image.
- CPU seconds include those of the engine's daemon and what it started, not the registry's. Cores busy with others
  counts whatever else ran, the registry included: far above it, or where nothing is pushed, compare the CPU seconds."""


if __name__ == "__main__":
    main()
