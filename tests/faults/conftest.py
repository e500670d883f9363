"""What every test of a fault starts from: the tiny world, an undisturbed run and an unfinished one, a count."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import World, fimaq, make_world
from runs import stop_at_unit
from tally import Tally


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts for the summary; a complaint is an error of the test."""
    counted = Tally()
    request.node.user_properties.append(("tally", counted.counts))
    yield counted
    assert counted.complaints == []


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every disturbed one has to equal."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    outcome = fimaq(*world.quantize(out))
    assert outcome.code == 0, outcome.err
    return out


@pytest.fixture(scope="session")
def unfinished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, interrupted before its third unit."""
    out = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.MonkeyPatch.context() as patch:
        stop_at_unit(2, patch)
        assert fimaq(*world.quantize(out)).code == 130
    return out
