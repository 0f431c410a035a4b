"""anyfp8 bench quantize|gemm|linear: what a person reads of a benchmark.

Lines of progress on stderr; on stdout the table and the summary, or with `--json -` the JSON Lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from anyfp8.errors import InputError
from anyfp8.problem import Scheme
from anyfp8.tools import console


def integers(text: str, what: str) -> list[int]:
    """Positive integers of "1,8,16". Raises InputError naming `what`."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"cannot read {what}", got=repr(text), want="such as 1,16,4096")
    return sorted({int(part) for part in parts})


def quantize_command(
    *,
    kinds: str,
    k: str | None,
    m: str | None,
    peers: Path | None,
    out: Path | None,
    runs: int,
    rounds: int,
) -> None:
    """Time the activation quantizers; the summary on stdout, all results into a file."""
    from anyfp8.tools import bench_quantize as bench

    chosen = kinds.split(",") if kinds else list(bench.KINDS)
    unknown = [kind for kind in chosen if kind not in bench.KINDS]
    if unknown:
        raise InputError(
            "not a kind of quantizer", got=", ".join(unknown), want=", ".join(bench.KINDS)
        )
    result = bench.run(
        peers_folder=peers,
        kinds=chosen,
        columns=integers(k, "--k") if k else bench.COLUMNS,
        rows=integers(m, "--m") if m else bench.ROWS,
        runs=runs,
        rounds=rounds,
    )
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    console.data_json({name: result[name] for name in ("header", "missing", "summary")})


def multiply_command(
    op: str,
    *,
    shapes: Sequence[str],
    m: str | None,
    scheme: str,
    accumulate: str,
    kill_switch: str,
    all_backends: bool,
    peers: Path | None,
    slow_peers: bool,
    seconds: float,
    rounds: int,
    seed: int | None,
    warm: bool,
    out: Path | None,
    **injected: Any,
) -> None:
    """Race `op`; exit status 1 when a result of ours is wrong.

    Args:
        out: JSON Lines file, "-" for stdout instead of the table.
        injected: for tests: a timer, a roof, a place.
    """
    from anyfp8.tools import bench_gemm as bench
    from anyfp8.tools.gemm_report import table
    from anyfp8.tools.gemm_shapes import MS, parse_shapes

    to_stdout = out is not None and str(out) == "-"
    file = None if out is None or to_stdout else out.open("w", encoding="utf-8")

    def sink(entry: dict[str, Any]) -> None:
        if to_stdout:
            console.data(json.dumps(entry))
        elif file is not None:
            file.write(json.dumps(entry) + "\n")
            # what was measured survives whatever comes next
            file.flush()

    try:
        result = bench.run(
            op,
            parse_shapes(shapes),
            ms=integers(m, "--m") if m else MS,
            scheme=Scheme.parse(scheme),
            accumulate=accumulate,
            kill_switch=kill_switch,
            all_backends=all_backends,
            peers_folder=peers,
            slow_peers=slow_peers,
            seconds=seconds,
            rounds=rounds,
            seed=seed,
            warm=warm,
            sink=sink,
            **injected,
        )
    finally:
        if file is not None:
            file.close()
    if not to_stdout:
        _show(result, table(result["cells"]))
    if result["summary"]["ours_wrong"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any], table: str) -> None:
    header, summary = result["header"], result["summary"]
    facts = ("gpu", "driver", "torch", "triton", "anyfp8", "op", "scheme")
    console.data(", ".join(f"{name} {header[name]}" for name in facts))
    console.data(f"clocks {json.dumps(header['clocks_mhz'])}, roof {json.dumps(header['roof'])}")
    console.data(table)
    for name, value in summary.items():
        console.data(f"{name}: {json.dumps(value, ensure_ascii=False)}")
