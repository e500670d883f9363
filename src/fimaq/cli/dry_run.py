"""What `fimaq quantize --dry-run` does: it tells what the run would take, and writes nothing."""

from typing import Any

from fimaq.cli import options
from fimaq.cli.classifier import preprocessing_of
from fimaq.config import Config


def dry_run(config: Config, as_json: bool) -> None:
    """Print the prediction for a classifier's run; without a GPU also that for one."""
    import torch

    from fimaq.device import choose_device
    from fimaq.errors import InputError
    from fimaq.models.build import build_architecture
    from fimaq.predict.prediction import predict

    if config.task == "detection":
        raise InputError("--dry-run predicts classifiers only; a detector's run is not predicted")
    assert config.model is not None
    device = choose_device(config.device)
    with torch.device("meta"):
        model = build_architecture(config.model, config.num_classes, config.model_args)
    shape = preprocessing_of(model, config).input_size
    places = {"this machine": device}
    if device.type == "cpu" and config.device == "auto":
        places["an H200"] = torch.device("cuda")
    found = dict(zip(places, predict(config, tuple(shape), list(places.values())), strict=True))
    if as_json:
        options.print_json({where: prediction.as_dict() for where, prediction in found.items()})
        return
    for where, prediction in found.items():
        print_prediction(where, prediction, config)


def print_prediction(where: str, prediction: Any, config: Config) -> None:
    from rich.console import Console

    from fimaq.pace import clock

    say = Console(highlight=False, soft_wrap=True, markup=False).print
    say(
        f"{prediction.model} {config.bits} {config.method}, {config.calib_size} images, {config.iters} "
        f"iterations, {prediction.precision}, on {where} ({prediction.device}); predicted, not measured:"
    )
    parts = ", ".join(f"{stage} {clock(value)}" for stage, value in prediction.seconds.items() if value >= 0.5)
    say(f"  time         {clock(prediction.total_seconds)} ({parts}), {prediction.basis}")
    if prediction.gpu_bytes:
        say(f"  GPU memory   {_gib(prediction.gpu_bytes)}")
    say(f"  host memory  {_gib(prediction.host_bytes)}")
    say(f"  disk         {_gib(prediction.disk_bytes)}")
    places = ", ".join(f"{_gib(size)} in {place}" for place, size in prediction.lists.items())
    say(f"  of these, cached activations: {places}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
