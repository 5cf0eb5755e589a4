"""Draw the picture of the README: a trace of four simulated ranks, with an arrow per signal.

python scripts/site/picture.py            # writes docs/trace_of_four_ranks.svg
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "docs" / "trace_of_four_ranks.svg"
OP = "tutorials/06_your_own_op.py"

LEFT, TOP, LANE, BAR, WIDTH = 74, 46, 58, 26, 860
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # a wait has the colour of who ended it
FETCH = "#2f2f38"


def main() -> None:
    OUT.write_text(draw(record()))
    print(f"wrote {OUT.relative_to(ROOT)}")


def record() -> list[dict[str, Any]]:
    """Trace the op on the simulator and return its events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        words = ["trace", OP, "--world", "4", "--backend", "sim", "--problem", "numel=8192"]
        command = [sys.executable, "-m", "sundog", *words, "--out", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] != "M" and event["tid"] == 0]


def draw(events: list[dict[str, Any]]) -> str:
    """Return the SVG: a lane per rank, a bar per wait and fetch, an arrow per signal."""
    last = max(event["ts"] + event.get("dur", 0) for event in events)
    scale = (WIDTH - LEFT - 20) / last
    ranks = sorted({event["pid"] for event in events})
    height = TOP + LANE * len(ranks) + 20
    parts = [_text(12, 24, "Who waited for whom: an arrow from each signal to the wait it ended")]
    legend = "light: waits, in the colour of the rank that ended the wait; dark: fetches data"
    parts += [_text(12, height - 14, legend, "#5a5a66", 12)]
    parts += [_lane(rank) for rank in ranks]
    parts += [_bar(e, scale) for e in events if e["ph"] == "X" and e["name"] != "signal"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    parts += [_arrow(starts[e["id"]], e, scale) for e in events if e["ph"] == "f"]
    return _svg(height, parts)


def _y(rank: int) -> int:
    return TOP + LANE * rank


def _lane(rank: int) -> str:
    y = _y(rank) + BAR // 2
    line = f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}" stroke="#c8c8d0"/>'
    return line + _text(12, y + 5, f"rank {rank}", RANKS[rank])


def _bar(event: dict[str, Any], scale: float) -> str:
    wait = event["name"] == "wait"
    colour = RANKS[event["args"]["ended_by"]] if wait else FETCH
    x, width = LEFT + event["ts"] * scale, max(event["dur"] * scale, 2)
    style = f'fill="{colour}" fill-opacity="{0.35 if wait else 0.9}" stroke="{colour}"'
    bar = f'<rect x="{x:.1f}" y="{_y(event["pid"])}" width="{width:.1f}" height="{BAR}" {style}/>'
    words = f"waits for rank {event['args']['ended_by']}"
    fits = wait and width > 6.5 * len(words)
    return bar + (_text(x + 6, _y(event["pid"]) + 17, words, size=11) if fits else "")


def _arrow(start: dict[str, Any], end: dict[str, Any], scale: float) -> str:
    x1, x2 = LEFT + start["ts"] * scale, LEFT + end["ts"] * scale
    down = end["pid"] > start["pid"]
    y1, y2 = _y(start["pid"]) + BAR * down, _y(end["pid"]) + BAR * (not down)
    colour = RANKS[start["pid"]]
    middle = (y1 + y2) / 2
    path = f"M{x1:.1f},{y1} C{x1:.1f},{middle} {x2:.1f},{middle} {x2:.1f},{y2}"
    style = f'fill="none" stroke="{colour}" stroke-width="1.4" marker-end="url(#tip)"'
    return f'<circle cx="{x1:.1f}" cy="{y1}" r="2.5" fill="{colour}"/><path d="{path}" {style}/>'


def _text(x: float, y: float, words: str, colour: str = "#1b1b22", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}">{words}</text>'


def _svg(height: int, parts: list[str]) -> str:
    tip = (
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#5a5a66"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fbfbfd"/>'
    return "\n".join([head, ground, tip, *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
