"""A count of the faults tried, and the run that every disturbed one has to equal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tally import Tally


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts for the summary; a complaint is an error of the test."""
    counted = Tally()
    request.node.user_properties.append(("tally", counted.counts))
    yield counted
    assert counted.complaints == []


@pytest.fixture(scope="session")
def undisturbed(finished: Path) -> Path:
    return finished
