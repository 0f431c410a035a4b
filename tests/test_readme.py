"""README's speed tables are the committed measurements, lost cells included.

UPDATE_DOCS=1 writes it anew.
"""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- linear: begin -->\n", "<!-- linear: end -->"
SHAPES = ("qkv", "o", "gate_up", "down")
TUNED_BEGIN, TUNED_END = "<!-- tuned: begin -->\n", "<!-- tuned: end -->"
TUNED_MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BASELINES = ROOT / "benchmarks/baselines"


def mid(ratios):
    return sum(r["value"] for r in ratios) / len(ratios)


def table():
    """µs of ours, torch / ours, the fastest other library / ours; by M and shape."""
    cells = [c for c in lines_of("linear") if c["kind"] == "cell"]
    by = {(c["shape"], c["m"]): c for c in cells}
    rows = ["| M | " + " | ".join(SHAPES) + " |", "|---:|" + "---:|" * len(SHAPES)]
    for m in sorted({c["m"] for c in cells}):
        row = [str(m)]
        for shape in SHAPES:
            cell = by[shape, m]
            others = {
                o["name"]: mid(o["ratios"]["selection"])
                for o in cell["others"]
                if not o["beside"] and "torch row slow" not in o["name"]
            }
            torch = next(r for name, r in others.items() if name.startswith("torch row fast"))
            peer = min(r for name, r in others.items() if not name.startswith("torch"))
            row.append(f"{cell['ours'][0]['us']:.1f} · {torch:.2f} · {peer:.2f}")
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows) + "\n"


def lines_of(name):
    return map(json.loads, (BASELINES / f"nvidia_h200-{name}.jsonl").read_text().splitlines())


def tuned():
    """time of the kill switch / time of the tuned row: (layer, scheme) -> {m: ratio}."""
    header, *rows = lines_of("check")
    schemes = {"w8a8-channel-token": "per token", "w8a8-block128x128-group128": "block"}
    found = {}
    for layer in header["layers"].values():
        for scheme in schemes.values():
            found[layer, scheme] = {}
    for row in rows:
        # a row that lost is not in the table any more
        if row["op"] == "linear" and row["verdict"] in ("won", "tie", "slower"):
            layer = header["layers"][f"{row['n']}x{row['k']}"]
            mine = found[layer, schemes[row["scheme"]]]
            mine[row["m"]] = max(row["ratio"], mine.get(row["m"], 0.0))
    return {key: by_m for key, by_m in found.items() if by_m}


def tuned_table():
    heads = ["layer", "scales", *map(str, TUNED_MS), "worst"]
    rows = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(TUNED_MS) + 1)]
    for (layer, scheme), by_m in tuned().items():
        cells = [f"{by_m[m]:.2f}" if m in by_m else "·" for m in TUNED_MS]
        rows.append("| " + " | ".join([layer, scheme, *cells, f"{min(by_m.values()):.2f}"]) + " |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("begin", "end", "made"),
    [(BEGIN, END, table), (TUNED_BEGIN, TUNED_END, tuned_table)],
    ids=["linear", "tuned"],
)
def test_a_speed_table_is_what_was_measured(begin, end, made):
    path = ROOT / "README.md"
    text = path.read_text()
    start, stop = text.index(begin) + len(begin), text.index(end)
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(text[:start] + made() + text[stop:])
        return
    assert text[start:stop] == made()


def test_the_demos_figures_are_within_what_is_promised():
    text = (ROOT / "README.md").read_text()
    base = float(re.search(r"^16-bit +([\d.]+)$", text, re.M)[1])
    for name, limit in (("FP8 weight-only", 1.015), ("FP8 W8A8, emulated", 1.035)):
        value = float(re.search(rf"^{name} +([\d.]+) ", text, re.M)[1])
        assert value / base < limit
