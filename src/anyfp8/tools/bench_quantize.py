"""µs, GB/s and ratios of the activation quantizers: the work of `anyfp8 bench quantize`.

Each cell (kind, K, M) is one race: ours, ours with NaN replaced, a copy kernel that moves the same
bytes, an empty kernel, and every peer that loads. Ours is checked against the reference on the same
random data first, or there is no number. Buffers rotate through four times the L2; where 64 do not
fill it, through a quarter of it, so that they stay warm there as activations do in a model. A peer
that allocates its outputs (marked *) writes the same memory in every call of the graph, hot in L2:
it races our call without `out`, which does the same. What is measured is handed on at once, so that
a stop loses no cell.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyfp8 import quantize, reference, testing
from anyfp8.errors import DeviceError
from anyfp8.problem import QTensor
from anyfp8.tools import console, timing
from anyfp8.tools.quantize_peers import Peer, find_peers
from anyfp8.tools.timing import Call, Ratio, Timing

KINDS = ("token", "group", "group-column")
COLUMNS = (4096, 12288)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
GROUP = 128
# µs of a graph, which is replayed once for nothing in each round, and of a block of replays
GRAPH_US = 200.0
BLOCK_US = 600.0


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        us: of ours. gbps: bytes of x, q and s over that time.
        copy_us: of a copy kernel moving the same bytes; copy_share: copy_us / us.
        empty_us: of an empty kernel; times_empty: us / empty_us.
        sanitize: time with NaN replaced / time without.
        peers: name -> time of the peer / time of ours (of our allocating call for a name with *),
            one Ratio a run.
        allocating_us: of our allocating call.
        peer_us: name -> µs.
    """

    kind: str
    k: int
    m: int
    us: float
    gbps: float
    copy_us: float
    copy_share: float
    empty_us: float
    times_empty: float
    sanitize: float
    allocating_us: float
    buffers: int
    peers: dict[str, list[Ratio]] = field(default_factory=dict)
    peer_us: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The fastest peer and its ratio."""
        medians = {name: min(r.value for r in ratios) for name, ratios in self.peers.items()}
        if not medians:
            return "", float("nan")
        name = min(medians, key=medians.__getitem__)
        return name, medians[name]

    @property
    def verdict(self) -> str:
        """Against the fastest peer; won or lost only where every run says so."""
        name, _ = self.worst
        if not name:
            return ""
        said = {ratio.verdict for ratio in self.peers[name]}
        return said.pop() if len(said) == 1 else "tie"


def _ours(kind: str, x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, nan: bool = False) -> Call:
    if kind == "token":
        return lambda: quantize.per_token(x, out=q, out_scale=s, nan_to_zero=nan)
    layout = "tma" if kind == "group-column" else "row"
    return lambda: quantize.per_group(x, GROUP, layout=layout, out=q, out_scale=s, nan_to_zero=nan)


def _allocating(kind: str, x: torch.Tensor) -> Call:
    if kind == "token":
        return lambda: quantize.per_token(x)
    layout = "tma" if kind == "group-column" else "row"
    return lambda: quantize.per_group(x, GROUP, layout=layout)


def _empty_scale(kind: str, m: int, k: int) -> torch.Tensor:
    if kind == "token":
        return torch.empty(m, 1, device="cuda")
    layout = "tma" if kind == "group-column" else "row"
    return reference.empty_scale((m,), k // GROUP, layout, "cuda")


def _check(kind: str, x: torch.Tensor) -> None:
    """Our bytes on poisoned outputs against the reference's, or AssertionError."""
    q, s = torch.empty_like(x, dtype=torch.uint8), _empty_scale(kind, *x.shape)
    testing.poison(q, s)
    _ours(kind, x, q, s)()
    if kind == "token":
        want = reference.quantize_per_token(x)
    else:
        want = reference.quantize_per_group(x, GROUP)
    testing.assert_matches(QTensor(q, s.contiguous()), QTensor(want.codes, want.scale))


def _copy_calls(xs: Sequence[torch.Tensor], qs: Sequence[torch.Tensor]) -> dict[str, list[Call]]:
    from anyfp8.kernels import ceiling

    kernel: Any = ceiling.narrow_copy_kernel
    n = xs[0].numel()

    def call(x: torch.Tensor, q: torch.Tensor, block: int, warps: int) -> Call:
        grid = (-(-n // block),)
        return lambda: kernel[grid](x, q, n, BLOCK=block, num_warps=warps)

    tiles = ((2048, 4), (4096, 4), (8192, 4), (8192, 8), (16384, 8))
    return {
        f"copy {block}x{warps}": [call(x, q, block, warps) for x, q in zip(xs, qs, strict=True)]
        for block, warps in tiles
        if block == 2048 or n >= 132 * block
    }


def buffers_for(moved: int, l2: int) -> int:
    """As many as leave the L2 cold, or few enough to stay there: nothing in between is stable."""
    copies = timing.buffers_for(moved, l2)
    if copies * moved >= timing.COLD_FACTOR * l2:
        return copies
    return max(2, min(timing.MAX_BUFFERS, l2 // (4 * moved)))


def measure(kind: str, k: int, m: int, peers: Sequence[Peer], runs: int, rounds: int) -> Cell:
    """Race one cell.

    Args:
        kind: of `KINDS`. k, m: columns and rows. peers: of any kind.
        runs: independent races; a verdict needs all of them.
        rounds: paired rounds of each.

    Raises:
        AssertionError: our bytes are not the reference's.
    """
    from anyfp8.kernels import ceiling

    empty: Any = ceiling.empty_kernel
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    _check(kind, x)
    l2 = torch.cuda.get_device_properties(x.device).L2_cache_size
    scale_bytes = 4 * m * (1 if kind == "token" else k // GROUP)
    moved = 3 * m * k + scale_bytes
    copies = buffers_for(moved, l2)
    xs = [x] + [torch.randn_like(x) for _ in range(copies - 1)]
    qs = [torch.empty(m, k, device="cuda", dtype=torch.uint8) for _ in xs]
    ss = [_empty_scale(kind, m, k) for _ in xs]
    sets = list(zip(xs, qs, ss, strict=True))
    contenders: dict[str, list[Call]] = {
        "ours": [_ours(kind, *each) for each in sets],
        "ours nan_to_zero": [_ours(kind, *each, nan=True) for each in sets],
        "ours allocating": [_allocating(kind, x) for x in xs],
        "empty": [lambda: empty[(1,)](x, num_warps=4)] * 64,
        **_copy_calls(xs, qs),
    }
    failed: dict[str, str] = {}
    rivals: dict[str, str] = {}
    for peer in peers:
        if peer.kind != kind:
            continue
        calls: list[Call] = [
            lambda a=a, q=q.view(torch.float8_e4m3fn), s=s, peer=peer: peer.call(a, q, s)
            for a, q, s in sets
        ]
        try:
            calls[0]()
            torch.cuda.synchronize()
        except Exception as error:  # a peer may refuse a shape in its own way
            failed[peer.name] = repr(error)[:200]
            continue
        name = f"{peer.name}*" if peer.allocates else peer.name
        contenders[name] = calls
        rivals[name] = "ours allocating" if peer.allocates else "ours"
    # as many as fill a graph at 4 TB/s
    in_graph = max(copies, min(64, round(GRAPH_US * 4e6 / moved)))
    results = [timing.race(contenders, rounds, BLOCK_US, in_graph) for _ in range(runs)]
    first = results[0]
    copies_us = {n: min(r[n].us for r in results) for n in first if n.startswith("copy")}
    best_copy = min(copies_us, key=copies_us.__getitem__)
    us = _lower_median(results, "ours")
    return Cell(
        kind=kind,
        k=k,
        m=m,
        us=us,
        gbps=moved / us / 1e3,
        copy_us=_lower_median(results, best_copy),
        copy_share=_median(_paired(r[best_copy], r["ours"]) for r in results),
        empty_us=_lower_median(results, "empty"),
        times_empty=_median(_paired(r["ours"], r["empty"]) for r in results),
        sanitize=_median(_paired(r["ours nan_to_zero"], r["ours"]) for r in results),
        allocating_us=_lower_median(results, "ours allocating"),
        buffers=copies,
        peers={n: [timing.ratio(r[n], r[rival]) for r in results] for n, rival in rivals.items()},
        peer_us={n: _lower_median(results, n) for n in rivals},
        failed=failed,
    )


def _lower_median(results: Sequence[dict[str, Timing]], name: str) -> float:
    return min(r[name].us for r in results)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _paired(a: Timing, b: Timing) -> float:
    """Median over rounds of time(a) / time(b)."""
    return statistics.median(x / y for x, y in zip(a.rounds, b.rounds, strict=True))


def run(
    *,
    peers_folder: str | Path | None = None,
    kinds: Sequence[str] = KINDS,
    columns: Sequence[int] = COLUMNS,
    rows: Sequence[int] = ROWS,
    runs: int = 2,
    rounds: int = 11,
    seconds: float = 100.0,
    sink: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure every cell.

    Args:
        seconds: for everything; no cell is begun after it.
        sink: gets the result as it stands after each cell.

    Returns:
        {"header", "protocol", "missing", "cells": [Cell as dict …], "unmeasured", "summary"};
        JSON-serializable. "unmeasured" names the cells that time did not suffice for.

    Raises:
        DeviceError: no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "cannot time quantization kernels",
            got="no CUDA GPU",
            want="a machine with one",
            hint="the kernels' numerics can be tested anywhere: pytest tests/quantize",
        )
    end = time.monotonic() + seconds
    peers, missing = find_peers(peers_folder)
    wanted = [(kind, k, m) for kind in kinds for k in columns for m in rows]
    cells: list[Cell] = []
    result = {
        "header": timing.header(),
        "protocol": {"runs": runs, "rounds": rounds, "max_buffers": timing.MAX_BUFFERS},
        "missing": missing,
    }

    def state() -> dict[str, Any]:
        left = [f"{kind} k={k} m={m}" for kind, k, m in wanted[len(cells) :]]
        return result | {
            "cells": [asdict(cell) for cell in cells],
            "unmeasured": left,
            "summary": summarize(cells),
        }

    with torch.inference_mode():
        for kind, k, m in wanted:
            if time.monotonic() > end:
                console.talk(f"warning: {len(wanted) - len(cells)} cells left out for time")
                break
            cell = measure(kind, k, m, peers, runs, rounds)
            cells.append(cell)
            console.talk(_line(cell))
            if sink is not None:
                sink(state())
    return state()


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The worst cell first, then means: what decides whether a change may stay."""
    raced = [cell for cell in cells if cell.peers]
    summary: dict[str, Any] = {}
    if raced:
        worst = min(raced, key=lambda cell: cell.worst[1])
        summary["worst"] = {
            "cell": f"{worst.kind} k={worst.k} m={worst.m}",
            "peer": worst.worst[0],
            "ratio": round(worst.worst[1], 3),
        }
        summary["verdicts"] = {
            said: sum(cell.verdict == said for cell in raced) for said in ("won", "tie", "lost")
        }
    large = [cell for cell in cells if cell.m >= 2048]
    if large:
        summary["least_copy_share_m2048"] = round(min(c.copy_share for c in large), 3)
    small = [cell for cell in cells if cell.m <= 16]
    for k in sorted({cell.k for cell in small}):
        most = max(cell.times_empty for cell in small if cell.k == k)
        summary[f"most_times_empty_m16_k{k}"] = round(most, 2)
    names = sorted({(cell.kind, name) for cell in cells for name in cell.peers})
    summary["geometric_means"] = {
        f"{kind} / {name}": round(
            timing.geometric_mean(
                [
                    _median(r.value for r in c.peers[name])
                    for c in cells
                    if c.kind == kind and name in c.peers
                ]
            ),
            3,
        )
        for kind, name in names
    }
    if cells:
        summary["sanitize"] = round(timing.geometric_mean([cell.sanitize for cell in cells]), 3)
        most = max(cells, key=lambda cell: cell.sanitize)
        summary["worst_sanitize"] = {
            "cell": f"{most.kind} k={most.k} m={most.m}",
            "ratio": round(most.sanitize, 3),
        }
    return summary


def _line(cell: Cell) -> str:
    peers = "  ".join(
        f"{name} {_median(r.value for r in ratios):.2f}" for name, ratios in cell.peers.items()
    )
    return (
        f"{cell.kind:12} k={cell.k:<6} m={cell.m:<5} {cell.us:8.2f} µs {cell.gbps:6.0f} GB/s  "
        f"copy {cell.copy_share:5.3f}  empty x{cell.times_empty:5.2f}  "
        f"nan {cell.sanitize:5.3f}  {cell.verdict:4}  {peers}"
    )
