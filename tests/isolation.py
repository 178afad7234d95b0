"""Runs test files that patch their process (no-GPU codegen, Triton's interpreter) in a process of their own.

A test file that imports `nogpu` or `interpreter`, itself or through another helper in this folder, is not imported
here: a child pytest runs it, with the same -k and -m, and its reports are repeated in this process. Naming that one
file on the command line runs it in place, which is also what the child does.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
PATCHING = {"nogpu", "interpreter"}
REPORTS = "FLA_INDUCTOR_TEST_REPORTS"


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Names of the helpers in this folder that the file imports, also those imported by a helper."""
    names = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    direct = [TESTS / f"{name}.py" for name in names if (TESTS / f"{name}.py").exists()]
    return frozenset(p.stem for p in direct).union(*(_imports(p) for p in direct if p != path))


def _named_alone(config: pytest.Config, path: Path) -> bool:
    named = {(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args}
    return named == {path.resolve()}


def pytest_configure(config: pytest.Config) -> None:
    files = list(TESTS.glob("test_*.py"))
    if any(_named_alone(config, path) and _imports(path) & PATCHING for path in files):
        os.environ["FLA_INDUCTOR_ISOLATED"] = "1"
    if path := os.environ.get(REPORTS):
        config.pluginmanager.register(ReportWriter(config, path))


class ReportWriter:
    """In the child: one line of JSON for each report."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self.config = config
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(self.path, "a") as file:
            file.write(json.dumps(data) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[Any]:
    collectors = yield
    if not file_path.name.startswith("test_") or "FLA_INDUCTOR_ISOLATED" in os.environ:
        return collectors
    if not collectors or not _imports(file_path) & PATCHING:
        return collectors
    return [IsolatedFile.from_parent(parent, path=file_path)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """-k and -m choose among the tests in the file, not among files."""
    files = [item for item in items if isinstance(item, IsolatedItem)]
    items[:] = [item for item in items if not isinstance(item, IsolatedItem)]
    yield
    # the longest jobs, so they start first
    items[:0] = files


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not isinstance(item, IsolatedItem):
        return None
    for report in item.run_in_child():
        item.reported = report.nodeid
        item.ihook.pytest_runtest_logreport(report=report)
    item.reported = None
    return True


class IsolatedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield IsolatedItem.from_parent(self, name="in-its-own-process")


class IsolatedItem(pytest.Item):
    reported: str | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # the child has a limit for each of its tests
        self.add_marker(pytest.mark.timeout(0))

    @property
    def nodeid(self) -> str:
        """The test being reported on, if any: xdist checks that a worker reports on the item that it runs."""
        return self.reported or super().nodeid

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name

    def runtest(self) -> None:
        raise AssertionError("run by pytest_runtest_protocol")

    def run_in_child(self) -> Iterator[pytest.TestReport]:
        """The reports of the tests in the file, and one more if the child ended in another way than by running them."""
        command = [sys.executable, "-m", "pytest", str(self.path), f"--rootdir={self.config.rootpath}"]
        command += ["-p", "no:cacheprovider"]
        for flag, value in (("-k", self.config.option.keyword), ("-m", self.config.option.markexpr)):
            command += [flag, value] if value else []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_INTERPRET"))}
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as reports:
            environment = {**kept, REPORTS: reports.name}
            child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            for line in reports:
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
                if report.skipped and isinstance(report.longrepr, list):
                    report.longrepr = tuple(report.longrepr)
                yield report
        if child.returncode not in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            text = f"exit status {child.returncode} of {' '.join(command)}\n{child.stdout}\n{child.stderr}"
            yield pytest.TestReport(self.nodeid, self.location, {}, "failed", text, "call")
