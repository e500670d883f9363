"""The work ahead of a run: operations counted by hand, and refreshes as reconstruction really makes them."""

import pytest
from demo_walk import configured, walk

from fimaq.config import METHODS
from fimaq.data.demo import demo_calibration
from fimaq.quant.layers import quantized_layers
from fimaq.reconstruct.plan import REFRESH, plan, unit_operations


def test_operations_are_those_of_a_forward_pass() -> None:
    """Two for each multiplication: weights times positions of every layer, and both products of attention."""
    reconstruction = walk(configured())
    block, head = reconstruction.chain.units[1], reconstruction.chain.units[-1]
    tokens, width = block.output_shapes[0]
    layers = sum(layer.weight.numel() * tokens for _, layer in quantized_layers(block.module))
    products = 2 * tokens * tokens * width
    operations = unit_operations(reconstruction.chain, demo_calibration(1))
    assert operations[1] == 2 * (layers + products)
    assert operations[-1] == 2 * head.module.weight.numel()


@pytest.mark.parametrize("method", METHODS)
def test_as_many_refreshes_and_reports_are_planned_as_there_are(method: str) -> None:
    stages: list[str] = []
    reconstruction = walk(configured(method=method, iters=40))
    reconstruction.stage = stages.append
    units = len(reconstruction.chain)
    plans = plan([5] * units, [True] * units, reconstruction.config)
    reports: list[int] = []
    result = reconstruction.reconstruct(0, lambda iteration, loss: reports.append(iteration))
    assert stages.count(REFRESH) == plans[0].refreshes
    assert len(reports) == (25 if plans[0].iterations else 0)
    assert [iteration for iteration, _ in result.losses] == reports
    assert reports[:1] + reports[-1:] in ([], [0, 39])


def test_a_unit_that_is_only_searched_has_no_steps() -> None:
    first, second = plan([5, 5], [False, True], configured(method="fima-q"))
    assert (first.iterations, first.refreshes) == (0, 0)
    assert (second.iterations, second.refreshes) == (10, 0)  # the head, which minimises the divergence itself
