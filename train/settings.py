"""What `draftcache train` was asked to do: the flags as one frozen configuration, and what a resumed run may change."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftcache.common.errors import CheckpointError, UsageError
from draftcache.common.layout import DEFAULT_TOKEN_BUDGET
from draftcache.train.model.anchors import check_seed
from draftcache.train.model.loss import LossConfig
from draftcache.train.optim import OptimConfig
from draftcache.train.warm_start import released_options

MATMULS = ("bf16", "fp8")
REDUCE_DTYPES = ("float32", "bfloat16")
_WIDTHS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "sliding_window", "block_size")
_FLAGS = {"num_heads": "heads", "num_kv_heads": "kv_heads", "intermediate_size": "intermediate"}
FREE_ON_RESUME = (
    *("store", "out", "save_every", "keep", "log_every", "validate_every", "patience", "tensorboard", "graph"),
)
"""Settings that change neither the weights nor their order of change. Of the device, only the kind must stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryOptions:
    """The drafter's geometry as asked for; None means: the target's."""

    num_layers: int = 5
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    layer_types: str = "full"  # one of LAYER_PATTERNS, or a comma-separated list of full and sliding
    sliding_window: int = 2048
    block_size: int = 16
    mask_token_id: int | None = None  # None: the first embedding row that the tokenizer does not use

    def __post_init__(self) -> None:
        _check_positive({name: getattr(self, name) for name in _WIDTHS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationOptions:
    """Which samples are held out, how often they are looked at, and when a run stops by them."""

    validation_share: float = 0.01
    validate_every: int = 500  # steps; at the end in any case
    patience: int | None = None  # validations without a better accepted length; None: never stop early

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise UsageError(
                f"--validation-share {self.validation_share}", needed="within [0, 1)", do="correct --validation-share"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What `draftcache train` was asked to do."""

    store: Path
    out: Path
    geometry: GeometryOptions = field(default_factory=GeometryOptions)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    init_from: Path | None = None  # a released drafter whose weights the run begins with
    batching: str = "bucket"
    token_budget: int = DEFAULT_TOKEN_BUDGET
    rows: int | None = None
    anchors: int = 512  # at most; never more than a micro-batch can have
    accumulate: int = 1  # micro-batches of a step in each process
    steps: int | None = None
    epochs: int = 6  # used where steps is None
    seed: int = 0
    save_every: int | None = None  # steps; None: at the end, and at every better validation
    keep: int = 3  # newest checkpoints that stay; the best one stays in any case
    log_every: int = 10  # steps between two reads of the device
    tensorboard: bool = False
    matmul: str = "bf16"  # "fp8": products with the head and in the MLPs in 8 bits
    reduce_dtype: str = "float32"  # in which gradients travel between processes
    deterministic: bool = False
    graph: bool | None = None  # None: where the device can
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")

    def __post_init__(self) -> None:
        positive = ("anchors", "accumulate", "steps", "epochs", "save_every", "keep", "log_every")
        values = {name: getattr(self, name) for name in positive}
        values |= {name: getattr(self.validation, name) for name in ("validate_every", "patience")}
        _check_positive(values)
        check_seed(self.seed)
        if self.graph and not self.device.startswith("cuda"):
            raise UsageError(f"--graph on {self.device}", needed="a CUDA device", do="use --no-graph")
        if self.matmul not in MATMULS or (self.matmul == "fp8" and not self.device.startswith("cuda")):
            raise UsageError(
                f"--matmul {self.matmul} on {self.device}",
                needed=f"one of {list(MATMULS)}, the latter on CUDA",
                do="correct --matmul",
            )
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise UsageError(
                f"--reduce-dtype {self.reduce_dtype}", needed=f"one of {list(REDUCE_DTYPES)}", do="correct it"
            )


def _check_positive(values: Mapping[str, int | None]) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            flag = "--" + _FLAGS.get(name, name).replace("_", "-")
            raise UsageError(f"{flag} {value}", needed="at least 1", do=f"correct {flag}")


_PARTS = {"geometry": GeometryOptions, "loss": LossConfig, "optim": OptimConfig, "validation": ValidationOptions}


def build_config(given: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a new run from the flags that were given, by their names; the parts' flags lie flat.

    Where the run begins with a released drafter, the geometry is that one's unless flags say otherwise.
    """
    for name in ("store", "out"):
        if name not in given:
            raise UsageError(f"no --{name}", needed="a store and a folder for the run", do=f"pass --{name}")
    if given.get("weighting") == "dpace" and "gamma" in given:
        raise UsageError(
            f"--gamma {given['gamma']} with --weighting dpace",
            needed="decay, which alone reads it",
            do="leave one away",
        )
    if "init_from" in given:
        given = released_options(given["init_from"]) | dict(given)
    parts = {part: cls(**_take(given, cls)) for part, cls in _PARTS.items()}
    inner = {f.name for cls in _PARTS.values() for f in dataclasses.fields(cls)}
    return TrainConfig(**{name: value for name, value in given.items() if name not in inner}, **parts)


def resumed_config(saved: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """A saved run's configuration with the flags given now. Raises CheckpointError naming every one that differs."""
    changed = []
    wanted = saved
    for name, asked in given.items():
        value: Any = asked.resolve() if isinstance(asked, Path) else asked
        part = next((part for part, cls in _PARTS.items() if name in {f.name for f in dataclasses.fields(cls)}), None)
        held = getattr(getattr(saved, part) if part else saved, name)
        same_kind = name == "device" and value.split(":")[0] == held.split(":")[0]
        if name not in FREE_ON_RESUME and not same_kind and value != held:
            changed.append(f"{name} {held} is now {value}")
        elif part:
            wanted = dataclasses.replace(wanted, **{part: dataclasses.replace(getattr(wanted, part), **{name: value})})
        else:
            wanted = dataclasses.replace(wanted, **{name: value})
    if changed:
        raise CheckpointError(
            f"{saved.out}: {', '.join(changed)}",
            needed="the settings that the run began with",
            do="resume without these flags, or begin a new run",
        )
    return wanted


def _take(given: Mapping[str, Any], cls: type[Any]) -> dict[str, Any]:
    return {f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given}
