"""Every kernel of a benchmark, compiled in parallel processes before anything is timed.

A process calls each contender of its share of the Ms once, on the GPU at hand; what it compiles
(Triton's, DeepGEMM's, the driver's) lands in the caches on disk, where the timing process finds it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anyfp8.problem import Scheme
from anyfp8.tools import console
from anyfp8.tools.gemm_contenders import Layer, Setting
from anyfp8.tools.gemm_operands import Operands
from anyfp8.tools.gemm_peers import baselines, find_peers
from anyfp8.tools.gemm_shapes import Shape

TIMEOUT = 120.0


def warm_up(
    setting: Setting, shapes: Sequence[Shape], peers_folder: str | Path | None, slow_peers: bool
) -> float:
    """Compile in as many processes as there are Ms, or cores less two; returns seconds."""
    count = processes_for(len(setting.ms))
    shares = [
        {
            "op": setting.op,
            "scheme": setting.scheme.name,
            "ms": setting.ms[index::count],
            "ours": setting.ours,
            "accumulate": setting.accumulate,
            "shapes": [[shape.name, shape.n, shape.k] for shape in shapes],
            "peers": None if peers_folder is None else str(peers_folder),
            "slow": slow_peers,
        }
        for index in range(count)
    ]
    return in_processes(__name__, shares)


def processes_for(parts: int) -> int:
    return max(1, min(parts, (os.cpu_count() or 2) - 2))


def in_processes(module: str, shares: Sequence[dict[str, Any]]) -> float:
    """Run `work` of a module in a process for each share; returns seconds.

    A process that fails or hangs costs time, not results: its kernels compile when they are timed.
    """
    start = time.monotonic()
    code = f"import sys; from {module} import work; work(sys.argv[1])"
    workers: list[tuple[subprocess.Popen[bytes], Any]] = []
    with console.progress(f"compiling in {len(shares)} processes"):
        for share in shares:
            # closed below, when its process has ended
            output = tempfile.TemporaryFile()  # noqa: SIM115
            command = [sys.executable, "-c", code, json.dumps(share)]
            workers.append((subprocess.Popen(command, stdout=output, stderr=output), output))
        for worker, output in workers:
            try:
                status = worker.wait(max(1.0, TIMEOUT - (time.monotonic() - start)))
            except subprocess.TimeoutExpired:
                worker.kill()
                status = worker.wait()
            if status:
                output.seek(0)
                last = output.read().decode(errors="replace").strip().splitlines()[-1:]
                console.talk(f"warning: a compiling process ended with {status}: {last}")
            output.close()
    return round(time.monotonic() - start, 1)


def work(text: str) -> None:
    """One process's share: call every contender once, whatever they give or raise."""
    share = json.loads(text)
    ms, ours = tuple(share["ms"]), tuple(share["ours"])
    scheme = Scheme.parse(share["scheme"])
    setting = Setting(share["op"], scheme, ms, ours, share["accumulate"])
    peers, _ = find_peers(share["peers"], share["slow"])
    with torch.inference_mode():
        for values in share["shapes"]:
            shape = Shape(*values)
            operands = Operands(shape.n, shape.k, ms[-1], "cuda", 0, copies=1)
            layer = Layer(setting, shape, operands, [*baselines(), *peers])
            for m in ms:
                for contender in layer.contenders(m)[0]:
                    try:
                        contender.calls[0]()
                    except Exception as error:
                        console.talk(f"{contender.name} {shape} {m} {error}")
            torch.cuda.synchronize()
