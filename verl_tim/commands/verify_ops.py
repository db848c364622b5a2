"""What `verl-tim verify --ops` prints."""

from __future__ import annotations

from typing import Any

from verl_tim.commands.output import stdout, table


def print_report(report: dict[str, Any]) -> None:
    """One model's table, or its problem."""
    if report["problem"] is not None:
        stdout().print(f"[red]{report['subject']}: {report['problem']}[/red]", soft_wrap=True)
        return
    rows = [(op, count, 0) for op, count in report["comparisons"].items()]
    took = f"{report['seconds']} s"
    if report["kernels"]:
        took += f", {report['compile_seconds']} s of them for {report['kernels']} kernels"
    stdout().print(f"{report['subject']}: {report['contract']} holds on {report['device']} ({took})", soft_wrap=True)
    table(None, ("op", "comparisons", "differing"), rows)
    for dropped in report["dropped_schedules"]:
        stdout().print(f"[yellow]dropped, since its bits differ here: {dropped}[/yellow]", soft_wrap=True)
    if report["row_blocks"]:
        stdout().print("[yellow]linears run in blocks of eight rows: this machine's GEMM depends on the rows[/yellow]")
