"""Tests that are marked `namespaces` are skipped, with the reason, where those are forbidden."""

from __future__ import annotations

import pytest

from tests.support.namespaces import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("namespaces")]
    reason = why_not() if marked else ""
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
