"""`sundog report`: turn files that the other commands wrote into one HTML page."""

from __future__ import annotations

import os

from ..report.page import check_assets, read_report, write_comparison, write_report
from ..report.sections import Section, read_sections
from ._console import FINE, check_writable, command, note
from ._options import ReportOptions

_LARGE = 5 << 20  # bytes: a page that some will not open


@command("report")
def run(options: ReportOptions) -> int:
    check_assets()
    files = options.files or []
    out = options.out or ("comparison.html" if options.compare else "report.html")
    check_writable(out)
    if options.compare:
        if len(files) != 2:
            raise ValueError(f"--compare takes two reports, old.html new.html; {len(files)} given")
        write_comparison(out, *files)
    elif not files:
        raise ValueError("name at least one file: sundog report -o report.html found.json")
    else:
        write_report(out, [part for path in files for part in _parts(path)])
    size = os.path.getsize(out) if os.path.isfile(out) else 0
    note(f"{out}: {size / 1e6:.1f} MB, opens in a browser without a network")
    if size > _LARGE:
        note("that is large for a page: give fewer files, or trace fewer programs")
    return FINE


def _parts(path: str) -> list[Section]:
    """Read a file; a report gives its sections, so that pages can be joined."""
    if path.endswith(".html"):
        return [Section(**each) for each in read_report(path)["sections"]]
    return read_sections(path)
