"""A memory report as tables: bytes by purpose, and the largest live buffers."""

from rich import box
from rich.table import Table

from zero_jax.planning.memory import TEMPORARIES, MemoryReport, Row

GB = 1e9


def memory_table(report: MemoryReport) -> Table:
    """By formula, as stored and as compiled, in GB of 1e9 bytes as in the paper."""
    table = Table(title=report.title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("GB = 1e9 bytes", "by formula", "as placed", "as compiled", "note"):
        left = name in ("GB = 1e9 bytes", "note")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "note")
    inside = [row for row in report.rows if row.name in TEMPORARIES]
    for row in (row for row in report.rows if row not in inside):
        _add(table, row)
    table.add_section()
    for row in inside:
        _add(table, row)
    table.add_section()
    for row in (report.state, report.temporaries, report.peak):
        _add(table, row, style="bold")
    return table


def largest_table(report: MemoryReport, count: int = 10) -> Table:
    """The largest buffers that are live at the peak, with the source line that each comes from."""
    table = Table(title="Largest temporaries at the peak", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("GB", "what", "operation", "source"):
        table.add_column(name, justify="right" if name == "GB" else "left", no_wrap=name == "GB")
    for size, what, op_name, source in report.largest(count):
        table.add_row(_text(size), what, "/".join(op_name.split("/")[-3:]), "/".join(source.split("/")[-2:]))
    return table


def _add(table: Table, row: Row, style: str | None = None) -> None:
    table.add_row(row.name, _text(row.formula), _text(row.placed), _text(row.compiled), row.note, style=style)


def _text(size: float | None) -> str:
    return "" if size is None else f"{size / GB:.3f}" if size >= GB / 1e3 or not size else f"{size / GB:.6f}"
