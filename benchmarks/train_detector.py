"""Train a narrow Mask R-CNN or Cascade Mask R-CNN from scratch on textured shapes, in minutes of one GPU.

    python benchmarks/make_shapes.py SHAPES
    python benchmarks/train_detector.py mask_rcnn_swin_t --data SHAPES --out detector.safetensors --minutes 4

Where the GPU is on another machine, the training images and objects travel in one file of about 50 MB:

    python benchmarks/train_detector.py --prepare --data SHAPES --cache shapes.safetensors
    python benchmarks/train_detector.py mask_rcnn_swin_t --cache shapes.safetensors --out detector.safetensors \\
        --no-evaluate

Training needs no pycocotools, evaluation (on the val split) does. The learning rate follows the clock, so that a
faster machine takes more steps in the same minutes; with --steps it follows the steps, and the same seed gives
the same weights on a CPU.
"""

import argparse
import copy
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detector_losses import Truth, detector_losses
from PIL import Image
from torch import Tensor, nn

from fimaq.artifact.files import read_tensors, write_tensors
from fimaq.cli.values import parse_pairs
from fimaq.data.coco import CocoSet, find_coco, pycocotools, run_lengths
from fimaq.data.detection_image import MEAN, STD, DetectionPreprocessing
from fimaq.detection.accuracy import evaluate_detectors
from fimaq.detection.build import DETECTORS, build_detector
from fimaq.detection.detector import Detector
from fimaq.errors import FimaqError, InputError
from fimaq.progress import Lines

NARROW: dict[str, Any] = {"embed_dim": 48, "depths": (2, 2, 4, 2), "channels": 96, "fc_channels": 256}
WARM_UP = 0.05  # share of the training
WEIGHT_DECAY = 0.05
LARGEST_GRADIENT = 1.0
AVERAGE_DECAY = 0.998
PREDICTOR_STDS = {"rpn_cls": 0.01, "rpn_reg": 0.01, "fc_cls": 0.01, "fc_reg": 0.001}
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_COPIES = 10.0, 60.0

Tensors = dict[str, Tensor]


def gather_set(coco: CocoSet) -> tuple[Tensors, list[str]]:
    """A data set of square images of one size as few tensors, and its class names; `ShapesSet` unpacks them.

    JPEGs and run lengths (columns first, beginning with zeros) lie one after another; the offsets (count + 1,)
    tell where each begins. Crowds and boxes without extent, which train nothing, are left out.
    """
    sizes = {(image.width, image.height) for image in coco.images.values()}
    if len(sizes) != 1 or len(set(*sizes)) != 1:
        raise InputError(f"images are of the sizes {sorted(sizes)[:4]}: expected one size, and square")
    jpegs, objects, runs = [], [], []
    for id, image in coco.images.items():
        jpegs.append(np.fromfile(image.path, dtype=np.uint8))
        kept = [a for a in coco.annotations[id] if not a.crowd and min(a.box[2:]) > 0]
        objects.append(kept)
        for annotation in kept:
            if not isinstance(annotation.segmentation, dict):
                raise InputError(f"annotation {annotation.id} has no run lengths: expected as of make_shapes.py")
            counts = annotation.segmentation["counts"]
            runs.append(np.array(run_lengths(counts) if isinstance(counts, str) else counts, dtype=np.int32))
    if not runs:
        raise InputError("no image shows an object: there is nothing to learn")
    flat = [annotation for kept in objects for annotation in kept]
    corners = [(x, y, x + width, y + height) for x, y, width, height in (annotation.box for annotation in flat)]
    tensors = {
        "jpegs": torch.from_numpy(np.concatenate(jpegs)),
        "jpeg_offsets": offsets([len(jpeg) for jpeg in jpegs]),
        "object_offsets": offsets([len(kept) for kept in objects]),
        "boxes": torch.tensor(corners),
        "labels": torch.tensor([annotation.label for annotation in flat]),
        "runs": torch.from_numpy(np.concatenate(runs)),
        "run_offsets": offsets([len(run) for run in runs]),
    }
    return tensors, [category.name for category in coco.categories]


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


class ShapesSet:
    """The training images and their objects, decoded once and kept on the device."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        jpegs, ends = tensors["jpegs"].numpy(), tensors["jpeg_offsets"].tolist()
        with ThreadPoolExecutor() as pool:  # Pillow lets go of the interpreter while it decodes
            pixels = list(pool.map(decode_jpeg, (jpegs[a:b] for a, b in pairwise(ends))))
        size = pixels[0].shape[0]
        runs, ends = tensors["runs"].numpy(), tensors["run_offsets"].tolist()
        masks = [mask_of_runs(runs[a:b], size) for a, b in pairwise(ends)]
        self.images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().to(device)
        self.masks = torch.from_numpy(np.stack(masks)).to(device)
        """(objects, size, size) bool."""
        self.boxes, self.labels = tensors["boxes"].to(device), tensors["labels"].to(device)
        begin, counts = tensors["object_offsets"][:-1, None], tensors["object_offsets"].diff()
        places = torch.arange(int(counts.max()))
        self.objects = torch.where(places < counts[:, None], begin + places, -1).to(device)
        """(images, most objects in one): indices of each image's objects, -1 where there are no more."""

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor) -> tuple[Tensor, Truth]:
        """Images (n, 3, size, size) uint8 and their objects."""
        present = self.objects[indices] >= 0
        objects = self.objects[indices].clamp(min=0)
        boxes = self.boxes[objects] * present.unsqueeze(2)
        return self.images[indices], Truth(boxes, self.labels[objects], present, self.masks[objects])

    def batches(self, size: int) -> Iterator[Tensor]:
        """Indices of random batches without end; no image comes twice before all (but a remainder) came once."""
        size = min(size, len(self))
        while True:
            order = torch.randperm(len(self), device=self.images.device)
            yield from order[: len(self) // size * size].split(size)


def decode_jpeg(content: np.ndarray) -> np.ndarray:
    with Image.open(io.BytesIO(content.tobytes())) as image:
        return np.array(image.convert("RGB"))


def mask_of_runs(runs: np.ndarray, size: int) -> np.ndarray:
    """Runs of zeros and ones in turn, down the columns -> (size, size) bool."""
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(size, size).T


def augmented(images: Tensor, truth: Truth) -> tuple[Tensor, Truth]:
    """Each image turned and mirrored in one of the 8 ways of a square, in other colours, normalised to float."""
    n, size, device = len(images), images.shape[-1], images.device
    images, masks, boxes = images.float(), truth.masks, truth.boxes
    transposed, mirrored, flipped = (torch.rand(3, n, 1, 1, 1, device=device) < 0.5).unbind()
    images = torch.where(transposed, images.mT, images)
    masks = torch.where(transposed, masks.mT, masks)
    boxes = torch.where(transposed[:, 0], boxes[..., [1, 0, 3, 2]], boxes)
    for chosen, axis in ((mirrored, 0), (flipped, 1)):
        images = torch.where(chosen, images.flip(3 - axis), images)
        masks = torch.where(chosen, masks.flip(3 - axis), masks)
        turned = boxes.clone()
        turned[..., axis], turned[..., axis + 2] = size - boxes[..., axis + 2], size - boxes[..., axis]
        boxes = torch.where(chosen[:, 0], turned, boxes)
    channels = torch.rand(n, 3, device=device).argsort(dim=1).view(n, 3, 1, 1)
    images = images.gather(1, channels.expand_as(images))
    gain = torch.empty(n, 3, 1, 1, device=device).uniform_(0.8, 1.2)
    shift = torch.empty(n, 3, 1, 1, device=device).uniform_(-25, 25)
    images = (images * gain + shift).clamp(0, 255)
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    boxes = boxes * truth.present.unsqueeze(2)  # what is no object stays without extent
    return (images - mean) / std, Truth(boxes, truth.labels, truth.present, masks)


def narrow_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a narrow detector; heads are 16 channels wide, or as near above that as divides `embed_dim`."""
    values = NARROW | given
    width = values["embed_dim"]
    if "num_heads" not in values and isinstance(width, int) and width > 0:
        heads = next(h for h in range(max(1, width // 16), 0, -1) if width % h == 0)
        values["num_heads"] = tuple(heads * 2**stage for stage in range(4))
    return values


def initialise(detector: Detector) -> None:
    """Random weights to start from: small ones in the Transformer and where logits and deltas are made."""
    for name, module in detector.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            continue
        std = PREDICTOR_STDS.get(name.rsplit(".", 1)[-1])
        if std is not None:
            nn.init.normal_(module.weight, std=std)
        elif name.startswith("backbone."):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif name.startswith("neck."):
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Average:
    """A moving average of a detector's weights, which after a short training is better than the weights."""

    def __init__(self, detector: Detector) -> None:
        self.detector = copy.deepcopy(detector).eval()
        # state_dict gives views, which training writes through: listed once, they stay up to date.
        pairs = list(zip(*(module.state_dict().values() for module in (self.detector, detector)), strict=True))
        self.averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights that the detector has now."""
        self.updates += 1
        weight = max(1 - AVERAGE_DECAY, 9 / (self.updates + 9))  # the start is soon forgotten
        own, new = ([pair[side] for pair in self.averaged] for side in (0, 1))
        torch._foreach_lerp_(own, new, weight)
        for kept, current in self.copied:
            kept.copy_(current)


def optimiser(detector: Detector, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that leaves norms, biases and position biases without decay."""
    decayed, free = [], []
    for name, parameter in detector.named_parameters():
        (free if parameter.dim() < 2 or "relative_position_bias" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=decayed[0].is_cuda)


@dataclass(frozen=True)
class Budget:
    """How long to train: so many steps, or else so many seconds."""

    steps: int | None
    seconds: float

    def share(self, step: int, elapsed: float) -> float:
        """How much of it is spent, in 0..1."""
        return min(1.0, elapsed / self.seconds if self.steps is None else step / self.steps)


def rate_factor(share: float) -> float:
    """Of the learning rate after a share of the training: up in a line, down in half a cosine."""
    return min(1.0, (share + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))


def train(
    detector: Detector,
    data: ShapesSet,
    budget: Budget,
    batch: int,
    learning_rate: float,
    keep: Callable[[Detector], object] = lambda detector: None,
) -> Detector:
    """Train `detector`; the average of its weights, in evaluation mode. `keep` is given it every minute."""
    device = data.images.device
    optimizer, average = optimiser(detector, learning_rate), Average(detector)
    detector.train()
    parameters = list(detector.parameters())
    start = last = kept = time.perf_counter()
    for step, indices in enumerate(data.batches(batch)):
        now = time.perf_counter()
        share = budget.share(step, now - start)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate_factor(share)
        images, truth = augmented(*data.batch(indices))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = detector_losses(detector, images, truth)
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        optimizer.step()
        average.update()
        if step == 0 or now - last > SECONDS_BETWEEN_LINES:
            last = now
            report(step, now - start, total, losses)
        if now - kept > SECONDS_BETWEEN_COPIES:
            kept = now
            keep(average.detector)
    elapsed = time.perf_counter() - start
    print(f"{step} steps in {elapsed:.0f} s, {1000 * elapsed / max(step, 1):.0f} ms each; ", end="")
    print(f"every image seen {step * min(batch, len(data)) / len(data):.1f} times", flush=True)
    return average.detector


def report(step: int, elapsed: float, total: Tensor, losses: dict[str, Tensor]) -> None:
    if not math.isfinite(total.item()):
        raise FimaqError(f"the loss is {total.item()} at step {step}: give a lower --learning-rate")
    parts = ", ".join(f"{name} {value.item():.3f}" for name, value in losses.items())
    print(f"step {step}, {elapsed:.0f} s: loss {total.item():.3f} ({parts})", flush=True)


def in_16_bits(state: Tensors) -> Tensors:
    """Matrices and kernels as float16; what is one number per channel costs little and stays as it is."""
    return {name: value.half() if value.dim() > 1 else value for name, value in state.items()}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help=", ".join(DETECTORS))
    parser.add_argument("--data", type=Path, help="folder made by make_shapes.py")
    parser.add_argument("--cache", type=Path, help="training set in one file, read instead of --data's")
    parser.add_argument("--prepare", action="store_true", help="write --cache from --data, and end")
    parser.add_argument("--out", type=Path, help="weights file to write")
    parser.add_argument("--half", action="store_true", help="store matrices and kernels in 16 bits")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training")
    parser.add_argument("--steps", type=int, help="of training, instead of --minutes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--model-arg", action="append", default=[], help="key=value, such as embed_dim=32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help="on the val split")
    options = parser.parse_args()
    if options.prepare and not (options.data and options.cache):
        parser.error("--prepare needs --data to read and --cache to write")
    if not options.prepare and not (options.model and options.out and (options.data or options.cache)):
        parser.error("give a model, --out, and --data or --cache")
    if not options.prepare and options.evaluate and not options.data:
        parser.error("--evaluate needs --data with the val split; give it, or --no-evaluate")
    if options.batch < 1 or options.minutes <= 0 or (options.steps is not None and options.steps < 1):
        parser.error("--batch, --minutes and --steps must be more than 0")
    return options


def run(options: argparse.Namespace) -> None:
    if options.prepare:
        tensors, classes = gather_set(CocoSet.open(*find_coco(options.data, "train")))
        write_tensors(options.cache, tensors, {"classes": json.dumps(classes)})
        print(f"{options.cache}: {options.cache.stat().st_size / 1e6:.1f} MB")
        return
    if options.evaluate:
        pycocotools("cocoeval")  # what is missing should be said now, not after the training
        val = CocoSet.open(*find_coco(options.data, "val"))
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    if options.cache:
        tensors, metadata = read_tensors(options.cache)
        classes = json.loads(metadata["classes"])
    else:
        tensors, classes = gather_set(CocoSet.open(*find_coco(options.data, "train")))
    data = ShapesSet(tensors, device)
    args = narrow_arguments(parse_pairs(options.model_arg, "--model-arg"))
    detector = build_detector(options.model, len(classes), args)
    initialise(detector)
    count = sum(parameter.numel() for parameter in detector.parameters())
    print(f"{options.model} {args}: {count / 1e6:.2f} million parameters", flush=True)
    print(f"training on {len(data)} images, on {device}", flush=True)
    budget = Budget(options.steps, 60 * options.minutes)
    metadata = {"model": options.model, "args": json.dumps(args), "classes": json.dumps(classes)}

    def store(detector: Detector) -> Tensors:
        weights = in_16_bits(detector.state_dict()) if options.half else detector.state_dict()
        write_tensors(options.out, weights, metadata)
        return weights

    trained = train(detector.to(device), data, budget, options.batch, options.learning_rate, store)
    trained.load_state_dict(store(trained))  # measure the weights as they are stored
    if options.evaluate:
        size = data.images.shape[-1]
        scores = evaluate_detectors({"trained": trained}, val, DetectionPreprocessing(size, size), device, Lines())
        for kind, values in scores["trained"].items():
            listed = ", ".join(f"{name} {value:.1f}" for name, value in values.items() if value is not None)
            print(f"{kind}: {listed}")


def main() -> None:
    try:
        run(parsed())
    except FimaqError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
