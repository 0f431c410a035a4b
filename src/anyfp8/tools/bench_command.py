"""anyfp8 bench quantize|gemm|linear|decode: what a person reads of a benchmark.

Lines of progress on stderr; on stdout the table and the summary, or with `--json -` the JSON Lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    seconds: float,
    html: Path | None = None,
) -> None:
    """Time the activation quantizers; the summary on stdout, all results into a file, which holds
    what has been measured at any time.
    """
    from anyfp8.tools import bench_quantize as bench

    chosen = kinds.split(",") if kinds else list(bench.KINDS)
    unknown = [kind for kind in chosen if kind not in bench.KINDS]
    if unknown:
        raise InputError(
            "not a kind of quantizer", got=", ".join(unknown), want=", ".join(bench.KINDS)
        )

    def sink(state: dict[str, Any]) -> None:
        if out is not None:
            # a stop in between leaves the last file whole
            part = out.with_name(out.name + ".part")
            part.write_text(json.dumps(state, indent=1) + "\n")
            part.replace(out)

    result = bench.run(
        peers_folder=peers,
        kinds=chosen,
        columns=integers(k, "--k") if k else bench.COLUMNS,
        rows=integers(m, "--m") if m else bench.ROWS,
        runs=runs,
        rounds=rounds,
        seconds=seconds,
        sink=sink,
    )
    _write_page(html, [result])
    parts = ("header", "missing", "unmeasured", "summary")
    console.data_json({name: result[name] for name in parts})


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
    html: Path | None = None,
    **injected: Any,
) -> None:
    """Race `op`; exit status 1 when a result of ours is wrong.

    Args:
        out: JSON Lines file, "-" for stdout instead of the table. html: a page as `report` makes.
        injected: for tests: a timer, a roof, a place.
    """
    from anyfp8.tools import bench_gemm as bench
    from anyfp8.tools.gemm_report import table
    from anyfp8.tools.gemm_shapes import MS, parse_shapes

    with _sink(out, html) as sink:
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
    if not _to_stdout(out):
        _show(result, table(result["cells"]))
    if result["summary"]["ours_wrong"]:
        raise typer.Exit(1)


def decode_command(
    model: str,
    *,
    tp: int,
    layers: int | None,
    batch: str,
    context: int,
    prefill: int,
    scheme: str,
    kill_switch: str,
    dense: bool,
    seconds: float,
    rounds: int,
    seed: int | None,
    warm: bool,
    out: Path | None,
    html: Path | None = None,
    **injected: Any,
) -> None:
    """Race a decoder stack; exit status 1 when a result of ours is wrong.

    Args:
        out: JSON Lines file, "-" for stdout instead of the table. html: a page as `report` makes.
        injected: for tests: a timer, a roof, a place.
    """
    from anyfp8.tools import bench_decode as bench
    from anyfp8.tools.decode_report import table
    from anyfp8.tools.decode_shapes import decoder

    with _sink(out, html) as sink:
        result = bench.run(
            decoder(model, tp),
            layers=layers,
            batches=integers(batch, "--batch"),
            context=context,
            prefill=prefill,
            scheme=Scheme.parse(scheme),
            kill_switch=kill_switch,
            dense=dense,
            seconds=seconds,
            rounds=rounds,
            seed=seed,
            warm=warm,
            sink=sink,
            **injected,
        )
    header = result["header"]
    if not _to_stdout(out):
        console.data(
            f"{header['model']}, {header['layers']} of {header['of']} layers, {header['mode']}"
        )
        if header["mode"] == "eager":
            console.data(
                "no GPU: kernels run as they would for a caller, and no figure is to quote"
            )
        _show(result, table(result["cells"]))
    if result["summary"]["ours_wrong"]:
        raise typer.Exit(1)


def _to_stdout(out: Path | None) -> bool:
    return out is not None and str(out) == "-"


@contextmanager
def _sink(out: Path | None, html: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Where JSON Lines go: a file, stdout for "-", or nowhere; and a page of them at the end."""
    kept: list[dict[str, Any]] = []
    file = None if out is None or _to_stdout(out) else out.open("w", encoding="utf-8")

    def sink(entry: dict[str, Any]) -> None:
        if html is not None:
            kept.append(entry)
        if file is not None:
            file.write(json.dumps(entry) + "\n")
            # what was measured survives whatever comes next
            file.flush()
        elif out is not None:
            console.data(json.dumps(entry))

    try:
        yield sink
    finally:
        if file is not None:
            file.close()
        _write_page(html, kept)


def _write_page(html: Path | None, lines: list[dict[str, Any]]) -> None:
    if html is not None and lines:
        from anyfp8.tools.report_command import write_page
        from anyfp8.tools.report_read import run_of

        # as a file would give them back
        write_page(run_of(html, json.loads(json.dumps(lines))), html)


def _show(result: dict[str, Any], table: str) -> None:
    header, summary = result["header"], result["summary"]
    facts = ("gpu", "driver", "torch", "triton", "anyfp8", "op", "scheme")
    console.data(", ".join(f"{name} {header[name]}" for name in facts))
    console.data(f"clocks {json.dumps(header['clocks_mhz'])}, roof {json.dumps(header['roof'])}")
    console.data(table)
    for name, value in summary.items():
        console.data(f"{name}: {json.dumps(value, ensure_ascii=False)}")
