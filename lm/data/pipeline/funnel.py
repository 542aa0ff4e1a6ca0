"""The funnel of a data folder: what every stage of every source took, as JSON, as text and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm.data.files import write_bytes, write_json

JSON, TEXT, PLOT = "funnel.json", "funnel.txt", "funnel.png"


def source_rows(stages: list[dict[str, Any]], report: dict[str, Any], train: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one source: its stages, and last what exact dedup over all sources left for the shards.

    Tokens of a row are its bytes over the bytes per token of the source's train shards: exact for what was kept, an
    estimate for what was not. A row's tokens are None where its bytes are unknown (a source without stages).

    Args:
        stages: reports of lm.data.pipeline.run; empty for a source without stages.
        report: of lm.data.documents.Report.
        train: the train split's entry of the manifest.
    """
    dropped = {name: report[name] for name in ("malformed", "not_text", "invalid_unicode", "empty", "duplicate")}
    last = {
        "stage": "exact dedup over sources",
        "documents_in": report["read"],
        "bytes_in": stages[-1]["bytes_out"] if stages else None,
        "documents_out": sum(report["kept"].values()),
        "bytes_out": sum(report["kept_bytes"].values()),
        "changed": 0,
        "dropped": {name: {"documents": count, "bytes": None} for name, count in dropped.items() if count},
        "notes": {},
        "samples": {},
    }
    bytes_per_token = train["utf8_bytes"] / max(1, train["tokens"])
    return [
        {
            **row,
            **{f"tokens_{end}": None if row[f"bytes_{end}"] is None else round(row[f"bytes_{end}"] / bytes_per_token)
               for end in ("in", "out")},
        }
        for row in [*stages, last]
    ]  # fmt: skip


def write_funnel(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """funnel.json, funnel.txt and funnel.png of a data folder."""
    from lm.data.pipeline.funnel_plot import plot_funnel

    write_json(folder / JSON, rows)
    write_bytes(folder / TEXT, (funnel_table(rows) + "\n" + funnel_samples(rows)).encode())
    plot_funnel(rows, folder / PLOT)


def funnel_table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """One line a stage, and below it why documents fell and what was found in those kept."""
    lines = [f"{'source':<12} {'stage':<26} {'documents':>12} {'kept':>7} {'MB':>10} {'M tokens':>9}"]
    for source, stages in rows.items():
        for row in stages:
            share = row["documents_out"] / max(1, row["documents_in"])
            size, tokens = row["bytes_out"] / 1e6, row["tokens_out"] / 1e6
            counts = f"{row['documents_out']:>12,} {share:>7.1%} {size:>10,.2f} {tokens:>9,.3f}"
            lines.append(f"{source:<12} {row['stage']:<26} {counts}")
            for reason, count in row["dropped"].items():
                taken = "" if count["bytes"] is None else f", {count['bytes'] / 1e6:,.2f} MB"
                lines.append(f"{'':<12}   - {reason}: {count['documents']:,} documents{taken}")
            lines += [f"{'':<12}   * {name}: {count:,}" for name, count in row["notes"].items()]
    lines.append("- dropped, * found in documents that stay; tokens: bytes over the source's bytes per token")
    return "\n".join(lines) + "\n"


def funnel_samples(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Up to ten documents a rule, shortened, to see whether the rule is right for this source."""
    lines = []
    for source, stages in rows.items():
        for row in stages:
            for rule, samples in row["samples"].items():
                lines.append(f"== {source} / {row['stage']} / {rule}")
                for sample in samples:
                    facts = ", ".join(filter(None, [f"{sample['bytes']:,} bytes", sample["detail"], sample["url"]]))
                    lines += [f"  [{facts}]", f"    {sample['text']}"]
    return "\n".join(lines) + "\n" if lines else ""
