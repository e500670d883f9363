"""The configuration of a run: frozen, strict plain data. An unknown key or an impossible value is an error."""

import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fimaq.errors import InputError

Method = Literal["rtn", "qdrop", "brecq", "diag", "rank1", "lowrank", "fima-q"]
Preset = Literal["deploy", "released"]
Averages = Literal["signed", "absolute"]
Heads = Literal["learned", "searched"]
Precision = Literal["fp32", "tf32", "bf16"]
Task = Literal["classification", "detection"]

METHODS: tuple[str, ...] = get_args(Method)
FISHER_METHODS = ("brecq", "diag", "rank1", "lowrank", "fima-q")
GROWING_METHODS = ("lowrank", "fima-q")

ITERATIONS_PER_RANK = 40
"""Without an explicit rank, a new perturbation is collected at most this often, so that short runs spend
their time on reconstruction."""

LARGEST_LR_FACTOR = 50.0
COMPILED_FROM = 1000
LARGEST_IMAGE = 2**15
LEAST_BUDGET = 1000
"""Bytes that somebody can have meant who typed a budget; less is a number without its unit."""
MOST_CONTENT = 1_000_000
"""Values and characters in a configuration file, after its aliases were followed."""


class Config(BaseModel):
    """Everything `fimaq.quantize` can be told. Paths are kept as given; defaults are the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: Task = "classification"
    model: str | None = Field(None, description="timm model name; None for a model object")
    weights: Path | None = Field(None, description="safetensors file or plain torch state dict")
    model_args: dict[str, Any] = Field(default_factory=dict, description="goes to timm.create_model")
    num_classes: int | None = Field(None, ge=1)
    calib: Path | None = Field(None, description="folder of unlabelled calibration images")
    val: Path | None = Field(None, description="folder of validation images, one folder per class")
    calib_size: int = Field(1024, ge=1)
    val_size: int | None = Field(None, ge=1, description="images evaluated at the end; None: all")
    crop_pct: float | None = Field(None, gt=0, le=1)
    class_map: Path | None = Field(None, description="JSON file: validation folder name -> class index")
    image_size: tuple[int, int] = Field(
        (800, 1333), description="detection: short and long side that images are resized to fit"
    )

    heads: Heads = Field(
        "learned", description="detection: box and mask heads are learned; searched: their ranges alone"
    )

    bits: str = "w4a4"
    method: Method = "fima-q"
    preset: Preset = "deploy"
    rank: int | None = Field(None, ge=1, description="k; None: 15, fewer for short runs")
    alpha: float = Field(0.5, ge=0, le=1, description="weight of the low-rank term in DPLR")
    damping: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the squared error in a Fisher loss; None: 0.5 in detection, else 0",
    )
    averages: Averages = Field("absolute", description="reading of the paper's averages over samples")
    iters: int = Field(20000, ge=1, le=10**9, description="reconstruction iterations per unit")
    batch_size: int = Field(32, ge=1)
    parts: int | None = Field(
        None, ge=1, description="parts of a batch whose gradients are added up; None: one per process"
    )
    search_size: int = Field(128, ge=1, description="calibration images used by the range search")
    fisher_size: int | None = Field(None, ge=1, description="images in a Fisher refresh; None: all")
    drop_probability: float = Field(0.5, ge=0, le=1, description="QDrop: share of values left unquantized")
    rounding_lr: float | None = Field(None, gt=0, description="None: 1e-3 at 20000 iterations, see lr_factor")
    scale_lr: float | None = Field(
        None, ge=0, description="relative to each scale; None: 1e-4 at 20000 iterations"
    )
    rounding_weight: float = Field(0.01, ge=0)
    warmup: float = Field(0.2, ge=0, lt=1, description="share of iterations without the rounding penalty")
    temperature: float = Field(20.0, gt=0, description="logits are divided by it before the KL divergence")
    bit_exact: bool = Field(False, description="compute the same bits in every library, see quant/exact.py")
    allow_float: bool = Field(False, description="quantize the rest where an attention cannot be opened")

    device: str = "auto"
    precision: Precision | None = Field(
        None, description="of products on a GPU; None: bf16, in detection tf32; a CPU computes in fp32"
    )
    compile: bool | None = Field(None, description="fuse operators; None: on a GPU from 1000 iterations on")
    memory_budget: int | None = Field(None, gt=0, description="bytes, or text such as 4GiB; None: all there is")
    host_budget: int | None = Field(
        None, gt=0, description="bytes of host memory that the process may take beside a GPU; more goes to disk"
    )
    seed: int = Field(0, ge=0, lt=2**31)
    tensorboard: bool = Field(False, description="write curves for TensorBoard into the run directory")

    @model_validator(mode="before")
    @classmethod
    def _few_images_are_one_batch(cls, values: Any) -> Any:
        """A batch that was not asked for is no reason to refuse a small calibration set."""
        few = values.get("calib_size")
        if "batch_size" in values or type(few) is not int or few < 1:
            return values
        return {**values, "batch_size": min(few, cls.model_fields["batch_size"].default)}

    @field_validator("memory_budget", "host_budget", mode="before")
    @classmethod
    def _sizes_have_units(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return _plausible(value, value)
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b?", value.strip().lower())
        if match is None:
            raise ValueError(f"{value!r} is not an amount of memory, such as 4GiB or 800MB")
        number, prefix, binary = match.groups()
        return _plausible(int(float(number) * (1024 if binary else 1000) ** ["", *"kmgt"].index(prefix)), number)

    @field_validator("bits")
    @classmethod
    def _bits_can_be_read(cls, value: str) -> str:
        match = re.fullmatch(r"w([2-8])a([2-8])", value.lower())
        if match is None:
            raise ValueError(f"{value!r} is not of the form wXaY with X and Y from 2 to 8, such as w4a4")
        return value.lower()

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "Config":
        if self.rank is not None and self.method in GROWING_METHODS and self.rank > self.iters:
            raise ValueError(
                f"rank {self.rank} is larger than iters {self.iters}: "
                f"a rank is added every iters/rank iterations; give a rank of at most {self.iters}"
            )
        short, long = self.image_size
        if not 32 <= short <= long <= LARGEST_IMAGE:
            raise ValueError(
                f"image_size {short},{long}: give a short side of 32 at least, then the long one, "
                f"at most {LARGEST_IMAGE}"
            )
        if self.bit_exact and self.preset != "deploy":
            raise ValueError(f"bit_exact is for what is exported: give preset deploy instead of {self.preset}")
        if self.bit_exact and self.task == "detection":
            raise ValueError("bit_exact is for what is exported, and detectors are not: leave it out")
        if self.batch_size > self.calib_size:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than calib_size {self.calib_size}: "
                f"give a batch of at most {self.calib_size} images"
            )
        if self.parts is not None and self.parts > self.batch_size:
            raise ValueError(f"parts {self.parts}: a batch of {self.batch_size} has at most that many parts")
        return self

    @property
    def weight_bits(self) -> int:
        return int(self.bits[1])

    @property
    def activation_bits(self) -> int:
        return int(self.bits[3])

    @property
    def resolved_rank(self) -> int:
        """The rank reconstruction really uses: 1 where the method has no rank to grow."""
        if self.method not in GROWING_METHODS:
            return 1
        if self.rank is not None:
            return self.rank
        return min(15, max(1, self.iters // ITERATIONS_PER_RANK))

    @property
    def resolved_damping(self) -> float:
        """Half for a detector: its Fisher information comes from its proposals alone, and what box and mask heads
        read of the same maps must not get lost. Nothing elsewhere."""
        if self.damping is not None:
            return self.damping
        return 0.5 if self.task == "detection" else 0.0

    @property
    def relative_errors(self) -> bool:
        """Whether the range search counts errors relative to the size of each token's output.

        Not for `qdrop`, whose reconstruction minimises plain errors; and not in a detector, most of whose tokens
        show background.
        """
        return self.method != "qdrop" and self.task != "detection"

    @property
    def lr_factor(self) -> float:
        """How much faster a shorter run learns: rate times iterations stays what it is at 20000 iterations.

        With the rates meant for 20000 iterations, 700 would hardly move a scale or flip a weight: DeiT-Tiny at
        W3A3 then reaches 46 % top-1 instead of 55 % (docs/accuracy.md).
        """
        return min(LARGEST_LR_FACTOR, max(1.0, 20000 / self.iters))

    @property
    def resolved_rounding_lr(self) -> float:
        return 1e-3 * self.lr_factor if self.rounding_lr is None else self.rounding_lr

    @property
    def resolved_scale_lr(self) -> float:
        return 1e-4 * self.lr_factor if self.scale_lr is None else self.scale_lr

    def resolved(self) -> dict[str, Any]:
        """All settings as JSON knows them, with the values that those left open stand for."""
        rates = {"rounding_lr": self.resolved_rounding_lr, "scale_lr": self.resolved_scale_lr}
        return {**self.model_dump(mode="json"), "rank": self.resolved_rank, **rates}

    def compiles(self, device: str) -> bool:
        """Whether steps are compiled on a device of this type.

        On a GPU that costs a quarter of a minute for each kind of unit and saves about 2 ms in each iteration of
        each. On a CPU it needs a C++ compiler and saves nothing, so it is not done unasked.
        """
        return device == "cuda" and self.iters >= COMPILED_FROM if self.compile is None else self.compile

    @classmethod
    def create(cls, **values: Any) -> "Config":
        """Build a Config, turning pydantic's report into one InputError that names each bad key."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise InputError("; ".join(_explain(item) for item in error.errors())) from None


def _plausible(size: Any, number: Any) -> Any:
    """A number of bytes as it is, unless its unit must have been forgotten."""
    if isinstance(size, int | float) and 0 < size < LEAST_BUDGET:
        raise ValueError(f"{number} means {size} bytes: name the unit, as in {number}GiB")
    return size


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown setting {name!r}: known are {', '.join(Config.model_fields)}"
    message = item["msg"].removeprefix("Value error, ")
    if not name:
        return message
    return f"{name}: {message} (got {item['input']!r})" if item["type"] != "value_error" else f"{name}: {message}"


def _refuse_bomb(values: Any) -> None:
    """Aliases make a few lines of YAML stand for billions of values, or for one that holds itself."""
    open_, size = [values], 0
    while open_:
        value = open_.pop()
        if isinstance(value, dict):
            open_ += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            open_ += value
        size += len(value) + 1 if isinstance(value, str | bytes | list | dict) else 1
        if size > MOST_CONTENT:
            raise ValueError(f"it stands for more than {MOST_CONTENT} values and characters")


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML configuration file. It holds the same keys as the command's flags."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        _refuse_bomb(values)
    # A date of month 13 is a ValueError of Python's own, and not the only such case.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"configuration file {path} cannot be read: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"configuration file {path} must hold 'key: value' lines, not {type(values).__name__}")
    return {key.replace("-", "_"): value for key, value in values.items()}
