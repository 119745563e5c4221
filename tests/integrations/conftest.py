"""The versions of the packages that the tests ran with; with `TEST_INTEGRATIONS` no test may be skipped.

`make test` has the packages of the extra `dev` alone: modules that need others skip themselves. `make
test-integrations` installs all of them and sets `TEST_INTEGRATIONS`: a module that cannot import its package is an
error then.
"""

import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

_PACKAGES = (
    *("areal", "slime"),
    *("torch", "transformers", "trl", "verl", "ray", "openai", "verifiers", "renderers", "skyrl"),
    *("vllm-router", "sglang-router", "agentlightning", "litellm", "anthropic", "openai-agents", "tinker"),
    "tinker-cookbook",
)


def _all_must_run() -> bool:
    return bool(os.environ.get("TEST_INTEGRATIONS"))


def _fail(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome, report.longrepr = "failed", f"{report.nodeid} did not run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    if report.skipped and _all_must_run():
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.skipped and not hasattr(report, "wasxfail") and _all_must_run():
        _fail(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _all_must_run():
        installed = {name.metadata["Name"].lower(): name.version for name in metadata.distributions()}
        versions = [f"{name} {installed[name]}" for name in _PACKAGES if name in installed]
        terminalreporter.write_line(f"ran with {', '.join(versions)}")


@pytest.fixture
def vllm_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module of a client for vLLM's server. The client imports nothing of vLLM, but asks whether it is there."""
    module = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    return module
