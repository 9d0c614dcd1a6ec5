"""Wheels -> layers, several at once, into the store."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.images.packages import KIND
from envbuilder.memory import release_large_buffers, trim
from envbuilder.wheels.bytecode import Compiler
from envbuilder.wheels.layer import write_wheels
from envbuilder.wheels.remembered import BytecodeCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.images.packages import Job, Python
    from envbuilder.oci.blob import Compression
    from envbuilder.oci.model import Layer
    from envbuilder.store.store import Store
    from envbuilder.wheels.key import InstallPrefix


def convert(
    jobs: Sequence[Job], prefix: InstallPrefix, python: Python, compression: Compression, store: Store
) -> list[Layer]:
    """Make the layer of each job, whose wheels are in the store; return the layers in order, kept and remembered.

    Raises:
        WheelError, CorruptContentError: a wheel is refused; the layers made until then stay in the store.
        DiskFullError: there is no room.

    """
    cores = parallel.cores()
    release_large_buffers()
    trim()  # of what fetching left
    report.step(f"making {len(jobs)} layers of {sum(len(job.wheels) for job in jobs)} wheels")
    with (
        report.task("layers", sum(job.size for job in jobs)) as task,
        Compiler(python.executable, workers=cores) as compiler,
    ):
        remembered = BytecodeCache(store, compiler, f"{python.version} {prefix.site_packages}")

        def make(job: Job) -> Layer:
            # A wheel that lies alone is only written again when it has changed: not worth remembering.
            bytecode_of = remembered.of if len(job.wheels) > 1 else lambda _: nullcontext(compiler)
            with store.writer() as blob:
                layer = write_wheels(job.wheels, prefix, bytecode_of, blob.file, compression)
                blob.commit(layer.digest)
            trim()
            store.remember(KIND, job.key, layer.to_json())
            report.detail(f"layer {layer.digest} ({layer.size} bytes): {job.title}")
            task.advance(job.size)
            return layer

        # Heaviest first, so that the last to finish is a small one; more threads than cores, because each waits for
        # bytecode now and then.
        order = sorted(range(len(jobs)), key=lambda number: -jobs[number].size)
        made = parallel.run_all(lambda number: make(jobs[number]), order, workers=cores + 1)
    layers = dict(zip(order, made, strict=True))
    return [layers[number] for number in range(len(jobs))]
