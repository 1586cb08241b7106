"""The live view fits any terminal, and is readable without colours."""

from dataclasses import replace

import pytest
from rich.console import Console

from fulcrum_cli.play.frame import DecisionLine, Frame, InstanceRow, RequestCounts, TierRow
from fulcrum_cli.play.recorder import HistoryCell
from fulcrum_cli.play.screen import Key, read_keys, render_svg
from fulcrum_cli.play.view import draw
from fulcrum_core.values import Phase, Role, Slo
from fulcrum_simulator.client import Latencies


def row(number: int, seconds: int = 90) -> InstanceRow:
    role = Role.PREFILL if number % 2 else Role.DECODE
    cells = tuple(
        HistoryCell.PREFILL if (number + second // 9) % 2 else HistoryCell.DECODE for second in range(seconds)
    )
    return InstanceRow(f"play-{number}", role, Phase.SERVING, cells, frozenset({9, 80}), 0.4, 9340, 12, 0.42)


def frame(**changes: object) -> Frame:
    made = Frame(
        service="play",
        model="laptop-1b",
        endpoint="http://127.0.0.1:8000",
        mode="Auto",
        seed=1,
        elapsed_s=90.0,
        duration_s=120.0,
        load="moving",
        load_phase="prefill-heavy",
        rate_rps=12.0,
        slo=Slo(1.5, 0.05),
        instances=tuple(row(number) for number in range(8)),
        selected=2,
        counts=RequestCounts(offered=12_345, ok=12_300, failed=1, broken=2, wrong=3, in_flight=39),
        recent=Latencies(0.42, 1.71, 0.034, 0.052),
        attainment=0.942,
        attainment_recent=0.871,
        desired_split=(5, 3),
        actual_split=(4, 4),
        flips_to_prefill=14,
        flips_to_decode=13,
        ack_p99_ms=5.2,
        lateness_p99_ms=3.1,
        decisions=tuple(
            DecisionLine(float(at), f"play-{at % 8} → Decode  {'why ' * 30}", Role.DECODE) for at in range(20)
        ),
        notice="play-3 killed",
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # each test names fields of Frame


def lines(shown: Frame, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(draw(shown, width=width, height=height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 40), (200, 60)])
def test_a_frame_fills_the_terminal_and_no_more(width: int, height: int) -> None:
    shown = lines(frame(), width, height)
    assert len(shown) == height
    assert max(map(len, shown)) <= width
    assert "quit" in shown[-1]


def test_a_terminal_that_is_too_small_still_shows_the_keys() -> None:
    shown = lines(frame(), 40, 10)
    assert (len(shown), max(map(len, shown))) == (10, 40)
    assert "moving" in shown[-1]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_latencies_splits_flips_and_attainment_are_on_screen(width: int, height: int) -> None:
    text = "\n".join(lines(frame(), width, height))
    expected = (
        "play-0",
        "play-7",
        "1/2/3",
        "1.71 s",
        "52 ms",
        "87.1%",
        "94.2%",
        "5:3",
        "4:4",
        "→P 14",
        "→D 13",
        "5.2 ms",
    )
    assert [part for part in expected if part not in text] == []


def test_each_tier_has_a_line_and_the_flood_has_a_key() -> None:
    tiers = (TierRow("premium", 90, 0, 0.989, 1.0), TierRow("free", 4_321, 3_000, 0.304, None))
    shown = lines(frame(tiers=tiers, has_tiers=True, counts=RequestCounts(refused=3_000)), 80, 24)
    assert [" ".join(line.split()) for line in shown if line.startswith((" premium", " free"))] == [
        "premium attained last 10 s 100.0% run 98.9% offered 90 refused 0",
        "free attained last 10 s – run 30.4% offered 4,321 refused 3,000",
    ]
    assert "x  flood" in shown[-1]
    assert "quit" in shown[-1]


def test_roles_are_readable_without_colours() -> None:
    shown = lines(frame(), 120, 40)
    assert next(line for line in shown if "play-1" in line).split()[1] == "P"
    assert next(line for line in shown if "play-0" in line).split()[1] == "D"
    assert "█" in shown[5]
    assert "▄" in shown[5]
    assert "◆" in shown[5]


def test_a_failed_engine_and_a_slow_machine_are_shown_as_text() -> None:
    dead = replace(row(0), phase=Phase.FAILED, restarts=2, role_history=(HistoryCell.DEAD,))
    text = "\n".join(lines(frame(instances=(dead,), lateness_p99_ms=25.0), 80, 24))
    assert "failed, restart 2" in text
    assert "MACHINE TOO SLOW" in text


def test_parts_that_do_not_respond_are_shown_as_text() -> None:
    silent = replace(row(0), missed_probes=3)
    text = "\n".join(
        lines(frame(instances=(silent,), unavailable=("autoscaler for 2 s", "router for 4 s")), 80, 24)
    )
    assert "not responding, 3 probes missed" in text
    assert "NOT RESPONDING: autoscaler for 2 s; router for 4 s" in text


def test_a_run_that_has_just_begun_can_be_drawn() -> None:
    begun = frame(
        instances=(), counts=RequestCounts(), recent=Latencies(None, None, None, None), attainment=None,
        attainment_recent=None, ack_p99_ms=None, lateness_p99_ms=None, decisions=(), notice="", rate_rps=None,
        duration_s=None,
    )  # fmt: skip
    assert "no decision yet" in "\n".join(lines(begun, 80, 24))


def test_a_saved_svg_refers_to_no_external_font() -> None:
    picture = render_svg(frame())
    assert picture.startswith("<svg")
    assert "@font-face" not in picture


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("1", [Key.MOVING]),
        ("msb", [Key.MOVING, Key.STEADY, Key.BURSTY]),
        ("\x1b[A\x1b[B", [Key.UP, Key.DOWN]),
        ("4tx", [Key.TIERS, Key.TIERS, Key.FLOOD]),
        ("zfykq", [Key.FLIP, Key.KILL, Key.QUIT]),
        ("", []),
    ],
)
def test_unknown_keys_are_ignored(typed: str, keys: list[Key]) -> None:
    assert list(read_keys(typed)) == keys
