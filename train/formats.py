"""Numbers as short text for people."""


def format_count(value: float) -> str:
    """`12345` as "12.3k", `1.5e6` as "1.50M": three digits and a unit."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            return f"{value / limit:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"


def number_of(number: int, noun: str) -> str:
    """ "1 token" and "1,024 tokens"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_duration(seconds: float) -> str:
    """`83` as "1:23", `3723` as "1:02:03"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
