"""Reconstruction of single units of the demo model: what a step reads and drops, integers, and that it helps."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_walk import BLOCK, COUNT, configured, demo_step, first_block, linear_step, module_step, run, same
from torch import Tensor, nn

from fimaq.quant.layers import activation_quantizers, quantized_layers
from fimaq.quant.masks import mask_size
from fimaq.reconstruct import algorithm
from fimaq.reconstruct.objectives import MeanSquaredError
from fimaq.reconstruct.step import ORDERED, ReconstructionStep, _order, _part


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class PlainFetch:
    """What `Prefetch` promises, without a GPU: `take` puts the rows that were fetched last into `batch`."""

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self.stored = stored
        self.batch: dict[str, Tensor] = {}

    def fetch(self, images: list[int]) -> None:
        self.coming = {name: tensor[images] for name, tensor in self.stored.items()}
        self.batch = self.batch or {name: torch.empty_like(rows) for name, rows in self.coming.items()}

    def take(self) -> None:
        for name, rows in self.coming.items():
            self.batch[name].copy_(rows)


def elsewhere(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> ReconstructionStep:
    """A step that has to fetch its batches of these cached tensors."""
    step = demo_step()
    fetch = PlainFetch({f"{name} 0": step.cache.stored(name)[0] for name in names})
    fetch.fetch([0] * step.config.batch_size)
    step._prefetch = fetch  # type: ignore[assignment]
    monkeypatch.setattr(step, "_cached", lambda: type(step)._cached(step) | fetch.batch)
    return step


@pytest.mark.parametrize("names", [("raw inputs", "quantized inputs", "outputs"), ("outputs",)])
def test_batches_fetched_from_elsewhere_give_the_same_bits(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, fetching = demo_step(), elsewhere(names, monkeypatch)
    assert same(run(here, 6), run(fetching, 6))
    assert here.loss == fetching.loss


@pytest.mark.parametrize("batch", [8, 16, 32, COUNT])
def test_every_image_is_seen_once_in_each_epoch(batch: int) -> None:
    order = _order(COUNT, batch)
    assert order.shape == (ORDERED, batch)
    epochs = order.view(-1, COUNT)
    assert torch.equal(epochs.sort(1).values, torch.arange(COUNT).expand_as(epochs))
    assert not torch.equal(epochs[0], epochs[1])


def test_what_does_not_fill_a_batch_is_left_to_the_next_epoch() -> None:
    epochs = _order(50, 16)[: 3 * 100].view(100, 48)
    assert all(len(epoch.unique()) == 48 for epoch in epochs)
    assert len(epochs.unique()) == 50


def test_a_step_reads_the_images_that_are_next(monkeypatch: pytest.MonkeyPatch) -> None:
    step = linear_step()
    seen: list[Tensor] = []
    batch = step._batch

    def recorded(*given: Any) -> list[list[Tensor]]:
        lists = batch(*given)
        seen.append(lists[0][0])
        return lists

    monkeypatch.setattr(step, "_batch", recorded)
    run(step, 5)
    assert len(seen) == 5
    for rows, images in zip(seen, step.order, strict=False):
        assert torch.equal(rows, step.cache.stored("raw inputs")[0][images])


def test_dropping_is_over_after_a_step() -> None:
    step = demo_step(drop_probability=0.5)
    run(step, 1)
    assert len(step.quantizers) == 8
    assert all(quantizer.dropping is None for quantizer in step.quantizers.values())
    assert all(quantizer.leaves is None for quantizer in step.quantizers.values())


def scale_gradients(step: ReconstructionStep) -> tuple[Tensor, Tensor]:
    """Those of a step without masks, and those of autograd with the scales themselves as leaves."""
    found, learned = step._gradients(step.tensors), step._learned_parts(step.tensors)
    raw, quantized, targets, _ = step._batch(step.tensors, slice(None))
    assert torch.equal(raw[0], quantized[0])  # nothing before is quantized, so that masks of inputs change nothing
    with torch.enable_grad():
        outputs = step.unit.with_tensors(_part(step.tensors, "unit.") | learned, raw)
        loss = step.objective(outputs[0].flatten(1) - targets[0].flatten(1), targets[0])
        expected = torch.autograd.grad(loss, [learned[name] for name in step.learned["scales"]])
    start = step.tensors["roundings"].numel()
    return found[start:-1], torch.cat([gradient.flatten() for gradient in expected])


@pytest.mark.parametrize("preset", ["deploy", "released"])
def test_gradients_by_rows_add_up_to_those_of_the_scales(preset: str) -> None:
    step = demo_step(drop_probability=0.0, preset=preset)
    run(step, 1)
    torch.testing.assert_close(*scale_gradients(step), rtol=1e-4, atol=1e-6)


def test_a_layer_that_is_called_twice_learns_from_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x.square())

    step = module_step(Twice(), torch.randn(COUNT, 5, 12), drop_probability=0.0)
    run(step, 1)
    torch.testing.assert_close(*scale_gradients(step), rtol=1e-4, atol=1e-6)


def test_every_quantizer_drops_by_a_mask_of_its_own_and_another_in_each_step() -> None:
    step = demo_step(drop_probability=0.5)
    masks: list[Tensor] = []
    learning = step._learning

    def recorded(bits: Any, positions: Any) -> Any:
        given = list(bits)
        with learning(given, positions):
            masks.extend(q.dropping[0][:4096].clone() for q in step.quantizers.values() if q.dropping)
        return learning(given, positions)

    step._learning = recorded  # type: ignore[method-assign]
    run(step, 3)
    assert len(masks) == 3 * 8
    equal = torch.stack([(one == other).double().mean() for one, other in combinations(masks, 2)])
    assert (equal - 0.5).abs().max() < 0.05


def test_masks_have_bits_for_every_element_and_no_more() -> None:
    step = demo_step(drop_probability=0.5)
    read: dict[str, int] = {}
    for name, quantizer in step.quantizers.items():

        def note(module: Any, given: Any, name: str = name) -> None:
            read[name] = mask_size(given[0])

        quantizer.register_forward_pre_hook(note)
    run(step, 1)
    inputs, *own = step.mask_bits
    assert 0 <= inputs - step.config.batch_size * step.cache.rows("raw inputs", 0, 1)[0].numel() < 32
    assert all(0 <= bits - read[name] < 32 for bits, name in zip(own, step.quantizers, strict=True))


def test_the_unit_sees_what_is_learned_while_it_is_learned() -> None:
    """A refresh of the Fisher information runs the unit between two steps."""
    step = demo_step(scale_lr=1e-2)
    inputs = step.cache.rows("raw inputs", 0, 4)
    with torch.no_grad():
        outputs = []
        for times in (0, 3):
            run(step, times)
            outputs.append(step.unit(inputs)[0])
    assert not torch.equal(*outputs)
    scales = [quantizer.scale.flatten() for _, quantizer in activation_quantizers(step.unit.module)]
    assert torch.equal(torch.cat(scales), step.tensors["scales"])


def test_a_finished_step_leaves_what_was_learned_and_lets_go_of_it() -> None:
    step = demo_step(scale_lr=1e-2)
    roundings, scales = run(step, 3)
    assert step.finish()
    step.tensors["scales"].zero_()
    kept = [quantizer.scale.flatten() for _, quantizer in activation_quantizers(step.unit.module)]
    assert torch.equal(torch.cat(kept), scales)
    layers = [layer.weight_quantizer.rounding for _, layer in quantized_layers(step.unit.module)]
    assert torch.equal(torch.cat([rounding.flatten() for rounding in layers if rounding is not None]), roundings)


def test_reconstructed_weights_lie_on_the_integer_grid() -> None:
    reconstruction, _ = first_block(configured())
    layers = dict(quantized_layers(reconstruction.chain.units[BLOCK].module))
    assert len(layers) == 4
    for layer in layers.values():
        quantizer = layer.weight_quantizer
        codes = (layer.weight / quantizer.scale + quantizer.zero_point).double()
        assert (codes - codes.round()).abs().max() < 1e-4
        assert codes.round().min() >= 0
        assert codes.round().max() <= 7
        assert torch.equal(codes.round(), layer.codes.double())


def test_losses_are_reported_relative_to_the_start_up_to_the_last_iteration() -> None:
    seen: list[tuple[int, float]] = []
    _, result = first_block(configured(), lambda i, loss: seen.append((i, loss)))
    assert result.losses == seen
    assert [i for i, _ in seen] == list(range(10))


def output_error(method: str) -> float:
    """Mean squared error of what the second block is given, behind two quantized units."""
    reconstruction, _ = first_block(configured(method=method, iters=150, batch_size=32, rounding_lr=1e-2))
    reconstruction.advance(BLOCK)
    quantized, raw = (reconstruction.cache.rows(f"{p} inputs", 0, COUNT)[0] for p in ("quantized", "raw"))
    return (quantized - raw).square().mean().item()


def test_reconstruction_lowers_the_output_error_of_rounding_to_nearest() -> None:
    assert output_error("qdrop") < 0.9 * output_error("rtn")


@pytest.fixture
def runaway(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_a_number(self: object, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return deltas.sum() * torch.nan

    monkeypatch.setattr(algorithm.FisherLoss, "forward", not_a_number)


@pytest.mark.usefixtures("runaway")
def test_a_loss_that_is_not_finite_is_reported() -> None:
    _, result = first_block(configured(method="diag"))
    assert result.finite is False


@pytest.mark.usefixtures("runaway")
def test_a_loss_that_is_not_finite_keeps_the_range_search() -> None:
    units = [first_block(configured(method=m))[0].chain.units[BLOCK].module for m in ("diag", "rtn")]
    for (_, kept), (_, searched) in zip(*map(quantized_layers, units), strict=True):
        assert torch.equal(kept.codes, searched.codes)
        assert torch.equal(kept.weight, searched.weight)
    for (_, kept), (_, searched) in zip(*map(activation_quantizers, units), strict=True):
        assert torch.equal(kept.scale, searched.scale)


def test_brecq_on_fewer_gradients_than_images_reads_no_memory_it_never_wrote() -> None:
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    try:
        _, result = first_block(configured(method="brecq", fisher_size=16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.finite


def test_a_walk_on_disk_gives_the_bits_of_one_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def weights() -> list[Tensor]:
        module = first_block(configured())[0].chain.units[BLOCK].module
        return [layer.weight for _, layer in quantized_layers(module)]

    in_memory = weights()
    monkeypatch.setattr("fimaq.reconstruct.cache.free_bytes", lambda device: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert same(weights(), in_memory)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_batch_add_up_to_the_whole(parts: int) -> None:
    """The same images and masks, other last bits; a wrong weight of a part would change the second digit."""
    whole, summed = (run(demo_step(parts=given, scale_lr=1e-2), 4) for given in (None, parts))
    assert not same(whole, run(demo_step(scale_lr=1e-2), 3))
    for one, other in zip(whole, summed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def with_errors_before() -> ReconstructionStep:
    """A step behind units whose quantization is far off: its raw inputs are ones, its quantized ones zeros."""
    step = linear_step(drop_probability=0.25)
    step.cache.stored("raw inputs")[0].fill_(1)
    step.cache.stored("quantized inputs")[0].fill_(0)
    return step


def test_inputs_and_activations_are_left_unquantized_with_the_probability_of_dropping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = with_errors_before()
    seen: list[Tensor] = []
    given = step.unit.with_tensors

    def recorded(tensors: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        seen.append(inputs[0])
        return given(tensors, inputs)

    monkeypatch.setattr(step.unit, "with_tensors", recorded)
    drawn: list[Tensor] = []
    for _ in range(20):
        run(step, 1)
        drawn.append(step.tensors["mask 1"].clone())
    assert torch.stack(seen).mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.stack(drawn).double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_another_seed_drops_others() -> None:
    masks = []
    for seed in (0, 1):
        drawn = linear_step(drop_probability=0.5)
        torch.manual_seed(seed)
        step = ReconstructionStep(drawn.unit, drawn.objective, drawn.config, drawn.cache)
        run(step, 1)
        masks.append(step.bits.clone())
    assert 0.4 < (masks[0] == masks[1]).double().mean() < 0.6


def test_the_objective_is_given_errors_and_full_precision_outputs_and_its_loss_is_told() -> None:
    given: list[tuple[Tensor, Tensor, Tensor]] = []

    class RecordedError(MeanSquaredError):
        def forward(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
            loss = super().forward(deltas, targets, weights)
            given.append((deltas.detach(), targets, loss.detach()))
            return loss

    step = linear_step(drop_probability=0.0, rounding_weight=1.0, warmup=0.0)
    step.objective = RecordedError(torch.ones(1))
    images, inputs, outputs = step.order[0], *(step.cache.stored(n)[0] for n in ("quantized inputs", "outputs"))
    with torch.no_grad():
        quantized = step.unit([inputs[images]])[0].flatten(1)
    run(step, 1)
    ((deltas, targets, loss),) = given
    expected = outputs[images].flatten(1)
    assert torch.equal(targets, expected)
    # Soft weights are the real ones at first, so that errors are those of activations alone.
    assert deltas.abs().max() > 0
    assert (deltas + targets - quantized).abs().mean() < quantized.abs().mean()
    assert step.loss == loss.item() == pytest.approx(deltas.square().mean().item(), rel=1e-5)
