"""Reports that failing ranks leave for the process that has started them."""

from pathlib import Path

from lightning_pardist.runtime.returned_failures import ReturnedFailures
from lightning_pardist.runtime.watchdog import FailureReport


def test_the_first_report_is_returned_whatever_its_length():
    failures = ReturnedFailures()
    folder = Path(failures._folder)
    assert failures.first() is None
    reports = [FailureReport(1, "pid 7", "text " * 100_000), FailureReport(-1, "pid 8", "later")]
    for report in reports:
        failures.send(report)
    # What a rank had written when it was killed.
    (folder / "unfinished-0.0").write_bytes(b"half")
    assert failures.first() == reports[0]
    failures.close()
    assert not folder.exists()
