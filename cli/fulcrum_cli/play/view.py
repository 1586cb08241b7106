"""Draws a frame of the live view as coloured lines for a terminal of any size.

What does not fit is cut off, old decisions first. At 80 × 24 everything else fits, for 8 instances with
names of up to 17 characters. Of a name that is too long, the end is shown.

Prefill is orange and decode is blue, which colour-blind people can distinguish. In role histories the two
also differ in height.

`screen` calls `draw`; all figures come from the frame.
"""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.console import Group
from rich.text import Text

from fulcrum_cli.play.engine_lateness import TOO_SLOW_MS
from fulcrum_cli.play.frame import DecisionLine, Frame, InstanceRow
from fulcrum_cli.play.recorder import HistoryCell
from fulcrum_cli.terminal.output import format_seconds
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Phase, Role

PREFILL, DECODE = "#e69f00", "#56b4e9"
GOOD, BAD, DIM, TITLE = "#009e73", "bold #d55e00", "grey62", "bold"
_CELL_STYLES = {
    HistoryCell.PREFILL: ("█", PREFILL),
    HistoryCell.DECODE: ("▄", DECODE),
    HistoryCell.STARTING: ("·", DIM),
    HistoryCell.DEAD: ("x", BAD),
}
_GAUGES_WIDTH = 42
_MISSED_PROBES_MIN = 2
"""Probes missed in a row from which an engine counts as not responding; a busy machine may miss one."""
_HISTORY_WIDTH_MIN = 16
_NAME_MAX = 18


def draw(frame: Frame, *, width: int, height: int) -> Group:
    """Return the frame as exactly `height` lines of at most `width` cells.

    The newest decisions fill the lines that remain. The bottom line always shows the keys.
    """
    lines = [_title_line(frame, width), *_workload_lines(frame, width)]
    objectives = [*_objective_lines(frame, width), *_tier_lines(frame)]
    for part in (_instance_lines(frame, width), objectives, _status_lines(frame, width)):
        lines += [*_blank_lines(height >= 30), *part]
    lines += _blank_lines(height >= 26)
    lines += _decision_section(frame.decisions, max(0, height - len(lines) - 2), width)
    lines += [Text("")] * (height - len(lines) - 1)
    return Group(*(_truncate(line, width) for line in [*lines[: height - 1], _key_line(frame, width)]))


def _truncate(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis")
    return line


def _blank_lines(needed: bool) -> list[Text]:
    return [Text("")] if needed else []


def _role_style(role: Role | None) -> str:
    """Return the colour of a role; grey for another role or none."""
    return {Role.PREFILL: PREFILL, Role.DECODE: DECODE}.get(role, DIM) if role else DIM


def _title_line(frame: Frame, width: int) -> Text:
    clock = _format_clock(frame.elapsed_s) + (
        f" / {_format_clock(frame.duration_s)}" if frame.duration_s else ""
    )
    left = Text.assemble(
        (" fulcrum ", "bold reverse"),
        " ",
        (frame.service, TITLE),
        (f"  {frame.model}  ", DIM),
        (frame.mode, TITLE),
    )
    right = Text.assemble((f"{frame.endpoint}  seed {frame.seed}  ", DIM), (clock, TITLE))
    return left + Text(" " * max(2, width - left.cell_len - right.cell_len)) + right


def _format_clock(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    return f"{minutes:02d}:{rest:02d}"


def _join_parts(parts: Iterable[Text], width: int) -> list[Text]:
    """Join the parts, in order, into as few lines as possible."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + part.cell_len + 2 <= width:
            lines[-1].append("  ").append_text(part)
        else:
            lines.append(Text(" ").append_text(part))
    return lines


def _workload_lines(frame: Frame, width: int) -> list[Text]:
    counts = frame.counts
    bad = counts.failed + counts.broken + counts.wrong
    rate = "" if frame.rate_rps is None else f" {frame.rate_rps:.1f} req/s"
    load = Text.assemble(("load ", DIM), (frame.load, TITLE), f" {frame.load_phase}", (rate, DIM))
    counted = Text.assemble(
        ("offered ", DIM), f"{counts.offered:,}", ("  in flight ", DIM), f"{counts.in_flight}",
        ("  ok ", DIM), (f"{counts.ok:,}", GOOD if counts.ok else DIM),
        ("  failed/broken/wrong ", DIM),
        (f"{counts.failed}/{counts.broken}/{counts.wrong}", BAD if bad else DIM),
        *((("  refused ", DIM), f"{counts.refused:,}") if counts.refused else ()),
    )  # fmt: skip
    return _join_parts((load, counted), width)


def _tier_lines(frame: Frame) -> list[Text]:
    width = max((len(row.name) for row in frame.tiers), default=0)
    return [
        Text.assemble(
            (f" {row.name:{width}}", TITLE), ("  attained ", DIM),
            *_share_parts("last 10 s", row.attainment_recent), "  ", *_share_parts("run", row.attainment),
            ("  offered ", DIM), f"{row.offered:,}", ("  refused ", DIM), f"{row.refused:,}",
        )
        for row in frame.tiers
    ]  # fmt: skip


def _instance_lines(frame: Frame, width: int) -> list[Text]:
    name_width = min(_NAME_MAX, max((len(row.name) for row in frame.instances), default=8))
    history_width = max(_HISTORY_WIDTH_MIN, width - name_width - _GAUGES_WIDTH - 5)
    header = Text.assemble(
        (" " * (name_width + 5), DIM),
        (_caption(history_width).ljust(history_width), DIM),
        ("  prefill queue  req / tokens  KV cache", DIM),
    )
    rows = [
        _instance_line(row, index == frame.selected, name_width, history_width, frame.slo.ttft_s)
        for index, row in enumerate(frame.instances)
    ]
    return [header, *rows]


def _caption(seconds: int) -> str:
    captions = (
        f"roles, one cell a second, now at the right ({seconds} s)",
        f"roles, last {seconds} s",
        "roles",
    )
    return next(caption for caption in captions if len(caption) <= seconds)


def _instance_line(
    row: InstanceRow, selected: bool, name_width: int, history_width: int, ttft_s: float
) -> Text:
    letter = row.role.value[0] if row.role and row.phase is not Phase.FAILED else "x"
    line = Text.assemble(
        ("▸" if selected else " ", TITLE),
        (row.name[-name_width:].ljust(name_width), TITLE if selected else ""),
        " ",
        (
            f" {letter} ",
            f"{'black on ' if letter != 'x' else ''}{_role_style(row.role) if letter != 'x' else BAD}",
        ),
    )
    line.append_text(_draw_role_history(row, history_width))
    line.append_text(_gauges(row, ttft_s))
    return line


def _draw_role_history(row: InstanceRow, width: int) -> Text:
    first = max(0, len(row.role_history) - width)
    role_history = Text(" " * (width - (len(row.role_history) - first)))
    for index, cell in enumerate(row.role_history[first:], start=first):
        glyph, style = _CELL_STYLES[cell]
        if index in row.flip_marks:
            role_history.append("◆", f"bold {style}")
        else:
            role_history.append(glyph, style)
    return role_history


def _gauges(row: InstanceRow, ttft_s: float) -> Text:
    if row.phase is not Phase.SERVING:
        restarts = f", restart {row.restarts}" if row.restarts else ""
        return Text(f"  {row.phase.lower()}{restarts}", BAD if row.phase is Phase.FAILED else DIM)
    if row.missed_probes >= _MISSED_PROBES_MIN:
        return Text(f"  not responding, {row.missed_probes} probes missed", BAD)
    queued = row.prefill_queued_s
    return Text.assemble(
        "  ",
        _draw_bar(queued / ttft_s, 6, PREFILL),
        (f" {queued:4.1f} s", "" if queued else DIM),
        "  ",
        (f"{row.decode_legs:4d} /{_format_thousands(row.decode_tokens):>6}", "" if row.decode_legs else DIM),
        "  ",
        _draw_bar(row.kv_usage or 0.0, 6, DECODE),
        (" –" if row.kv_usage is None else f" {row.kv_usage:4.0%}", "" if row.kv_usage else DIM),
    )


def _format_thousands(count: int) -> str:
    return f"{count / 1000:.1f}k" if count >= 1000 else str(count)


_EIGHTHS = " ▏▎▍▌▋▊▉█"


def _draw_bar(share: float, width: int, style: str) -> Text:
    """Draw a bar of `width` cells, filled to `share` in eighths of a cell; the bar is red above 1."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(text.ljust(width), f"{BAD if share > 1 else style} on grey19")


def _objective_lines(frame: Frame, width: int) -> list[Text]:
    recent, slo = frame.recent, frame.slo
    bar_width = 10 if width >= 100 else 5
    attained = Text.assemble(
        ("attained ", DIM),
        *_share_parts("last 10 s", frame.attainment_recent),
        "  ",
        *_share_parts("run", frame.attainment),
    )
    decoding = format_count(frame.decode_legs, "request")
    queued = Text.assemble(
        ("work: prefill ", DIM), (f"{frame.prefill_queued_s:.1f} s", PREFILL), ("  decode ", DIM),
        (f"{decoding}, {_format_thousands(frame.decode_tokens)} tokens", DECODE),
    )  # fmt: skip
    return [
        _objective_line("TTFT", recent.ttft_p50_s, recent.ttft_p99_s, slo.ttft_s, bar_width),
        _objective_line("TPOT", recent.tpot_p50_s, recent.tpot_p99_s, slo.tpot_s, bar_width),
        *_join_parts((attained, queued), width),
    ]


def _objective_line(
    name: str, p50_s: float | None, p99_s: float | None, objective_s: float, bar_width: int
) -> Text:
    return Text.assemble(
        (f" {name} last 10 s   ", DIM),
        *_latency_parts("p50", p50_s, objective_s, bar_width),
        "  ",
        *_latency_parts("p99", p99_s, objective_s, bar_width),
        (f"  objective {format_seconds(objective_s)}", DIM),
    )


def _latency_parts(
    name: str, value_s: float | None, objective_s: float, bar_width: int
) -> Iterable[Text | tuple[str, str]]:
    yield (f"{name} ", DIM)
    if value_s is None:
        yield ("–".rjust(8) + " " * (bar_width + 1), DIM)
        return
    yield (f"{format_seconds(value_s):>8} ", BAD if value_s > objective_s else GOOD)
    yield _draw_bar(value_s / objective_s, bar_width, GOOD)


def _share_parts(name: str, share: float | None) -> Iterable[tuple[str, str]]:
    yield (f"{name} ", DIM)
    if share is None:
        yield ("–", DIM)
    else:
        yield (f"{share:.1%}", GOOD if share >= 0.9 else BAD)


def _status_lines(frame: Frame, width: int) -> list[Text]:
    parts = [
        Text.assemble(
            ("P:D desired ", DIM),
            *_split_parts(frame.desired_split),
            (" actual ", DIM),
            *_split_parts(frame.actual_split),
        ),
        Text.assemble(
            ("flips ", DIM),
            (f"→P {frame.flips_to_prefill}", PREFILL),
            " ",
            (f"→D {frame.flips_to_decode}", DECODE),
        ),
    ]
    if frame.ack_p99_ms is not None:
        parts.append(Text.assemble(("acknowledged in ", DIM), f"{frame.ack_p99_ms:.1f} ms", (" (p99)", DIM)))
    late_ms = frame.lateness_p99_ms
    if late_ms is not None:
        style = BAD if late_ms > TOO_SLOW_MS else ""
        parts.append(Text.assemble(("engines late ", DIM), (f"{late_ms:.1f} ms", style), (" (p99)", DIM)))
    lines = _join_parts(parts, width)
    if late_ms is not None and late_ms > TOO_SLOW_MS:
        lines.append(Text(" MACHINE TOO SLOW: engine steps are late, so latencies are too high", BAD))
    if frame.unavailable:
        lines.append(Text(f" NOT RESPONDING: {'; '.join(frame.unavailable)}", BAD))
    if frame.notice:
        lines.append(Text(f" {frame.notice}", TITLE))
    return lines


def _split_parts(split: tuple[int, int]) -> Iterable[tuple[str, str]]:
    yield (str(split[0]), PREFILL)
    yield (":", DIM)
    yield (str(split[1]), DECODE)


def _decision_section(decisions: Sequence[DecisionLine], lines_max: int, width: int) -> list[Text]:
    """Return the newest decisions first, wrapped to the width; nothing if `lines_max` is less than 2."""
    if lines_max < 2:
        return []
    lines = [Text(" last decisions" if decisions else " no decision yet", DIM)]
    for decision in reversed(decisions):
        lines += _decision_lines(decision, width)
        if len(lines) >= lines_max:
            break
    return lines[:lines_max]


_INDENT = 7


def _decision_lines(decision: DecisionLine, width: int) -> list[Text]:
    first, *more = wrap(decision.text, max(20, width - _INDENT - 1)) or [""]
    header = Text.assemble((f" {_format_clock(decision.at_s)} ", DIM), (first, _role_style(decision.to)))
    return [header, *(Text(" " * _INDENT + line, DIM) for line in more)]


def _key_line(frame: Frame, width: int) -> Text:
    loads = [("1", "moving"), ("2", "steady"), ("3", "bursty")]
    keys = [
        *([("4", "tiers"), ("x", "flood")] if frame.has_tiers else loads),
        ("↑↓", "select"),
        ("f", "flip"),
        ("k", "kill"),
        ("q", "quit"),
    ]
    line = Text(" ")
    for key, action in keys:
        line.append(f" {key} ", "reverse")
        line.append(f" {action}  ", DIM)
    line.truncate(width)
    return line
