"""A plan as a page of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from lm.columns import aligned

Plan = Mapping[str, Any]


def page(plan: Plan) -> str:
    """All sections, one blank line between them."""
    sections = [_model, _run, _layout, _memory, _step, _ways, _cost, _reliability, _data, _loss, _what_if]
    return "\n\n".join(text for section in sections if (text := section(plan)))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    return indent(aligned(rows), "  ")


def count(value: float) -> str:
    """1.051B, 41.94M, four digits; plain below 10,000."""
    for least, size, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{letter}"
    return f"{value:g}"


def gb(n_bytes: float) -> str:
    """In GB of 1e9 bytes."""
    value = n_bytes / 1e9
    if value < 0.1:
        return f"{1000 * value:.2f} MB"
    return f"{value:,.0f} GB" if value >= 1000 else f"{value:.1f} GB"


def money(ends: Sequence[float]) -> str:
    """$113k to $170k; nothing where there is no price."""
    if not ends[1]:
        return ""
    texts = [f"${value / 1e3:,.0f}k" if value >= 1e4 else f"${value:,.0f}" for value in ends]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def seconds(value: float) -> str:
    """Short, in ms, s, min, h or days."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if value >= 2 * size or (size == 1 and value >= 0.1):
            return f"{value / size:.3g} {unit}"
    return f"{1000 * value:.3g} ms"


def _model(plan: Plan) -> str:
    shape, parts, flops = plan["model"], plan["parameters"], plan["flops"]
    head = "tied" if shape["tie_embeddings"] else "untied"
    lines = [
        f"{plan['name']}: {parts['total']:,} parameters",
        f"  d_model {shape['d_model']}, {shape['n_layers']} layers, {shape['n_heads']} heads, {shape['n_kv_heads']} of"
        f" keys and values, d_ff {shape['d_ff']}, vocabulary {shape['vocab_size']:,} ({head})",
        f"  a layer: attention {count(parts['attention_layer'])}, MLP {count(parts['mlp_layer'])};"
        f" embedding and head {count(parts['embedding'] + parts['head'])}; norms {count(parts['norms'])};"
        f" multiplying a token {count(parts['matmul'])}",
        "",
        "FLOPs",
    ]
    rows = [["convention", "a token", "the run"]]
    for name, values in flops["conventions"].items():
        mark = " *" if name == flops["convention"] else ""
        rows.append([name + mark, f"{values['per_token'] / 1e9:.4g} G", f"{values['run']:.3g}"])
    lines.append(_aligned(rows))
    lines.append(f"  * counts below; attention is {flops['attention_share']:.0%} of it")
    return "\n".join(lines)


def _run(plan: Plan) -> str:
    run = plan["run"]
    return "\n".join(
        [
            "Run",
            f"  {count(run['tokens'])} tokens ({run['tokens_per_parameter']:.1f} a parameter), {run['steps']:,} steps"
            f" of {run['windows']:,} x {run['sequence_length']:,} = {count(run['global_batch_tokens'])} tokens",
            f"  {run['schedule']}, {run['warmup_steps']:,} warmup steps ({run['warmup_share']:.1%}), peak LR"
            f" {run['lr']:g}, {run['precision']}",
        ]
    )


def _layout(plan: Plan) -> str:
    cluster, choice = plan["cluster"], plan["choice"]
    lines = [
        f"Layout on {cluster['devices']} x {cluster['device']} ({cluster['devices_per_node']} a node):"
        f" {plan['layout']['describe']}",
        *(f"  - {reason}" for reason in choice["reasons"]),
        f"  - fastest of {choice['fitting']:,} layouts that fit, of {choice['tried']:,} tried",
    ]
    if choice["runners_up"]:
        rows = [["runner-up", "step", "memory", "sent in"]]
        for other in choice["runners_up"]:
            figures = [
                seconds(other["step_seconds"]),
                gb(other["memory_bytes"]),
                seconds(other["communication_seconds"]),
            ]
            rows.append([other["describe"], *figures])
        lines.append(_aligned(rows))
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    memory = plan["memory"]
    rows = [[name, gb(value)] for name, value in memory["parts_bytes"].items()]
    rows += [["total", gb(memory["total_bytes"])], ["usable", gb(memory["usable_bytes"])]]
    return "\n".join(
        [
            f"Memory a device (state of the model {gb(memory['whole_state_bytes'])}, here {gb(memory['state_bytes'])};"
            f" logits of a window, unchunked, {gb(memory['unchunked_logits_bytes_per_window'])})",
            _aligned(rows),
        ]
    )


def _step(plan: Plan) -> str:
    step, rows = plan["step"], [["transfer", "ranks", "link", "sent", "time", "hidden behind"]]
    for sent in plan["communication"]:
        figures = [str(sent["ranks"]), sent["link"], gb(sent["sent_bytes"]), seconds(sent["seconds"])]
        rows.append([f"{sent['what']} ({sent['kind']})", *figures, sent["hidden_behind"]])
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in step["parts_seconds"].items() if value)
    lines = [
        f"Step: {seconds(step['seconds'])} ({parts}), {step['tokens_per_s']:,.0f} tokens/s,"
        f" {step['tokens_per_s_per_device']:,.0f} a device, {step['flops_per_s']:.3g} FLOP/s, MFU {step['mfu']:.1%}"
    ]
    return "\n".join([*lines, _aligned(rows)] if len(rows) > 1 else lines)


def _ways(plan: Plan) -> str:
    if not plan["ways"]:
        return ""
    rows = [["way", "ranks", "link", "sent", "time", "computing"]]
    for way in plan["ways"]:
        figures = [gb(way["sent_bytes"]), seconds(way["seconds"]), seconds(way["compute_seconds"])]
        rows.append([way["name"], str(way["ranks"]), way["link"], *figures])
    pipe = plan["pipeline"]
    lines = [
        f"Ways to divide it, by the textbook: a micro-batch of {plan['layout']['micro_batch']} on a rank",
        _aligned(rows),
    ]
    if pipe["stages"] > 1:
        lines.append(
            f"  a pipeline of {pipe['stages']} stages and {pipe['micro_batches']} micro-batches waits"
            f" {pipe['bubble']:.1%} of a step"
        )
    return "\n".join(lines)


def _cost(plan: Plan) -> str:
    time = plan["time_and_cost"]
    cost, more = money(time["cost"]), money(time["cost_with_allowance"])
    lines = [
        "Time and cost",
        f"  {seconds(time['seconds'])} ({time['seconds']:.3g} s), {time['device_hours']:,.0f} device-hours"
        + (f", {cost}" if cost else ""),
        f"  with {time['allowance']:.0%} for restarts {time['days_with_allowance']:.2f} days,"
        f" {time['device_hours_with_allowance']:,.0f} device-hours" + (f", {more}" if more else ""),
    ]
    return "\n".join(lines)


def _reliability(plan: Plan) -> str:
    values = plan["reliability"]
    every, steps = seconds(values["young_interval_seconds"]), values["young_interval_steps"]
    size, save = gb(values["checkpoint_bytes"]), seconds(values["checkpoint_seconds"])
    return "\n".join(
        [
            "Reliability",
            f"  {values['expected_interruptions']:.2g} unexpected interruptions expected, one in"
            f" {seconds(values['mean_seconds_between_failures'])}",
            f"  a checkpoint is {size}; where a save takes {save}, one every {every} ({steps:,} steps) loses least"
            f" (Young): {values['lost_share']:.1%} of the time",
        ]
    )


def _data(plan: Plan) -> str:
    data = plan["data"]
    lines = [f"Data: {gb(data['shards_bytes'])} of ids, {data['id_bytes']} bytes each"]
    if data["sources"]:
        rows = [["source", "weight", "drawn", "unique", "epochs"]]
        for row in data["sources"]:
            drawn = [count(row["drawn_tokens"]), count(row["unique_tokens"]), f"{row['epochs']:.2f}"]
            rows.append([row["source"], f"{row['weight']:.3f}", *drawn])
        lines.append(_aligned(rows))
    lines += [f"  {name} is repeated more than 4 times: repeats are worth less" for name in data["repeated"]]
    return "\n".join(lines)


def _loss(plan: Plan) -> str:
    loss = plan["loss"]
    if loss is None:
        return ""
    best, aware = loss["optimal"], loss["inference_aware"]
    return "\n".join(
        [
            f"Predicted loss {loss['predicted']:.3f} (E {loss['surface']['E']:g}; 6 N D = {loss['flops_6nd']:.3g})",
            f"  compute-optimal there: {count(best['n_params'])} on {count(best['tokens'])} tokens, {best['loss']:.3f}",
            f"  fewest FLOPs to this loss with {count(loss['inference_tokens'])} tokens served:"
            f" {count(aware['n_params'])} on {count(aware['tokens'])} tokens",
        ]
    )


def _what_if(plan: Plan) -> str:
    rows = plan.get("what_if")
    if not rows:
        return ""
    table = [["what if", "params", "FLOPs", "days", "device-h", "cost +", "MFU", "memory", "stops", "loss"]]
    base = rows[0]
    for row in rows:
        if "error" in row:
            continue
        days = f"{row['days']:.2f}" + ("" if row is base else f" ({row['days'] / base['days']:.2f}x)")
        loss = "" if row["loss"] is None else f"{row['loss']:.3f}"
        figures = [count(row["n_params"]), f"{row['flops']:.3g}", days, f"{row['device_hours']:,.0f}"]
        figures += [money(row["cost_with_allowance"]), f"{row['mfu']:.1%}", gb(row["memory_bytes"])]
        table.append([row["what"], *figures, f"{row['interruptions']:.2g}", loss])
    lines = [f"  {row['what']}: {row.get('layout') or row['error']}" for row in rows]
    return "\n".join(["What if", _aligned(table), *lines])
