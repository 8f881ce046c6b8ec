"""Format numbers, bytes and times for people."""

from __future__ import annotations

COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_number(value: float) -> str:
    """Return three significant digits, with thousands separated: `0.123`, `45.6`, `1,234`."""
    if value and abs(value) < 0.0005:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_count(value: float) -> str:
    """Return a count with its unit: `512`, `48.4k`, `1.24B`."""
    return _scaled(value, COUNTS, "") or (f"{value:.0f}" if value == int(value) else format_number(value))


def format_bytes(value: float) -> str:
    """Return bytes in binary units: `512 bytes`, `1.5 GiB`."""
    return next((f"{value / size:,.1f} {unit}" for unit, size in BINARY if value >= size), f"{value:.0f} bytes")


def format_decimal_bytes(value: float) -> str:
    """Return bytes in decimal units, as storage is sold: `1.5 TB`."""
    return _scaled(value, DECIMAL, " ") or f"{value:.0f} bytes"


def format_duration(seconds: float) -> str:
    """Return a time with its unit: `31.2 µs`, `3.1 ms`, `2.4 s`, `15 min`, `2.5 h`, `4 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= length:
            return f"{format_number(seconds / length)} {unit}"
    return f"{format_number(seconds * 1e6)} µs" if seconds > 0 else "0 s"


def format_clock(seconds: float) -> str:
    """Return a time as a clock shows it: `2:03`, `1:02:03`, `3d 04:05`."""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _scaled(value: float, units: tuple[tuple[str, float], ...], space: str) -> str:
    return next((f"{format_number(value / size)}{space}{unit}" for unit, size in units if abs(value) >= size), "")
