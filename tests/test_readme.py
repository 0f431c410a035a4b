"""README's speed table is the committed measurement, lost cells included.

UPDATE_DOCS=1 writes it anew.
"""

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- linear: begin -->\n", "<!-- linear: end -->"
SHAPES = ("qkv", "o", "gate_up", "down")


def mid(ratios):
    return sum(r["value"] for r in ratios) / len(ratios)


def table():
    """µs of ours, torch / ours, the fastest other library / ours; by M and shape."""
    lines = (ROOT / "benchmarks/baselines/nvidia_h200-linear.jsonl").read_text().splitlines()
    cells = [c for c in map(json.loads, lines) if c["kind"] == "cell"]
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


def test_the_speed_table_is_what_was_measured():
    path = ROOT / "README.md"
    text = path.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(text[:start] + table() + text[stop:])
        return
    assert text[start:stop] == table()


def test_the_demos_figures_are_within_what_is_promised():
    text = (ROOT / "README.md").read_text()
    base = float(re.search(r"^16-bit +([\d.]+)$", text, re.M)[1])
    for name, limit in (("FP8 weight-only", 1.015), ("FP8 W8A8, emulated", 1.035)):
        value = float(re.search(rf"^{name} +([\d.]+) ", text, re.M)[1])
        assert value / base < limit
