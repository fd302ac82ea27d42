"""Names each test as soon as it fails: a run that is stopped early has no summary."""

from __future__ import annotations

from typing import Any

import pytest


class FailuresAtOnce:
    """A pytest plugin for the process that reports."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the name of a failed test and the message of what it raised."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or reporter is None:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message.partition("\n")[0] if crash else ""
        reporter.write_line(f"\nFAILED {report.nodeid} ({report.when}): {message}"[:400])
        reporter.flush()
