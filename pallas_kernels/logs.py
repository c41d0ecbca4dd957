"""Warnings, each of them once in a process, of the logger "pallas_kernels"."""

import logging

_logger = logging.getLogger(__package__)
_logged: set[str] = set()


def log_once(message: str) -> None:
    """Logs a warning, unless this process has logged it before."""
    if message not in _logged:
        _logged.add(message)
        _logger.warning("%s", message)
