"""The report as Markdown: for pull requests, and for TensorBoard's text tab."""

from __future__ import annotations

from clusterkv_ops.profiling.report import Report
from clusterkv_ops.profiling.tables import Table, tables


def to_markdown(report: Report, by: str = "phase", mode: str = "all") -> str:
    """Headline, warnings, tables."""
    parts = [f"**{report.headline}**"]
    parts += [f"> {warning}" for warning in report.warnings]
    parts += [
        f"### {table.title}\n\n{markdown_table(table)}" for table in tables(report, by, mode)
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """One table."""
    marks = [":--" if i < table.text_columns else "--:" for i in range(len(table.columns))]
    lines = [table.columns, marks, *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
