"""What is wanted? One `TrainingJob`: what to train, by when, for how much.

Every field says what it means and in which unit; a wrong value is refused with the field, the value and
the remedy, before anything is bought. A job is identified by `JobId`: clearing a failed Airflow task
continues the same job, clearing a succeeded one starts its next generation.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpucost import fitness, gpus
from gpucost.money import InstanceHourPrice, Money
from gpucost.recipe import CPU, Recipe

DATA_REFERENCE = re.compile(r"\{data\.([^{}]*)\}")
"""In an argument: stands for the path of the data of that name, on the node."""

Hours = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]


class _Frozen(BaseModel):
    # Templates render "12" to a number; where text is wanted, that is no reason to refuse it.
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class JobId(_Frozen):
    """Which job this is, over all its interruptions, retries and clears.

    `generation` grows by one when a job that had succeeded is cleared and so starts again.
    """

    dag_id: str = Field(min_length=1)
    run_id: str = Field(min_length=1)
    task_id: str = Field(min_length=1)
    map_index: int = Field(default=-1, ge=-1, description="Airflow's map index; -1 for a task that is not mapped.")
    generation: int = Field(default=1, ge=1)

    @property
    def key(self) -> str:
        """A short name that is safe in an object key, a tag and a host name, and unique to this job."""
        parts = (self.dag_id, self.run_id, self.task_id, str(self.map_index))
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        # A label of a host name holds 63 characters.
        readable = "-".join(_slug(part)[:18].strip("-") for part in (self.dag_id, self.task_id))
        return f"{readable}-{digest}-g{self.generation}"

    def next_generation(self) -> JobId:
        """The same task's following job."""
        return self.model_copy(update={"generation": self.generation + 1})


class GpuNeed(_Frozen):
    """The GPUs that one node of the job needs."""

    kinds: tuple[str, ...] = Field(default=(), description="Accepted GPU kinds, e.g. ('T4', 'A10G'); empty: any.")
    count: int = Field(default=1, ge=0, description="GPUs per node; 0 trains on CPU.")
    memory_gib: float | None = Field(default=None, gt=0, description="Least memory per GPU, GiB.")


class Environment(_Frozen):
    """Where the program's packages come from: the machine image, or wheels in the object store."""

    image: str | None = Field(default=None, description="Image of the site to use instead of the site's default.")
    wheels: tuple[str, ...] = Field(default=(), description="URIs of wheels that the agent installs first.")


class CheckpointPlan(_Frozen):
    """How often to save, and how many saves to keep."""

    every_steps: int = Field(default=200, ge=1, description="Optimizer steps between two checkpoints.")
    keep: int = Field(default=2, ge=2, description="Whole checkpoints kept; two at least, in case one is torn.")


class FolderSync(_Frozen):
    """For a program that saves by itself: its folder is kept in the object store, and is there again after a restart.

    The program is told the folder in `GPUCOST_FOLDER`; it ends with exit code 0 when it is done, and saves on SIGTERM.
    """

    folder: str = Field(default="saves", description="Relative path; the folder whose files are kept.")
    every_seconds: float = Field(default=60.0, ge=1, description="Real seconds between two looks for changed files.")


class HangWatch(_Frozen):
    """When a program counts as hung: it is asked for its stack, and ended."""

    times: float = Field(default=50.0, gt=1, description="No step for so many times the usual time of one.")
    at_least_seconds: float = Field(default=600.0, gt=0, description="And for so many real seconds at least.")
    start_seconds: float = Field(default=3600.0, gt=0, description="Real seconds until the first step.")


class TrainingJob(_Frozen):
    """What to train, by when, for how much; see each field.

    Raises:
        pydantic.ValidationError: naming each wrong field, its value and what was expected.
    """

    name: str = Field(min_length=1, max_length=100, description="What people call this training.")
    project: str = Field(
        default="default", pattern=r"^[\w.-]{1,64}$", description="Whose budget; the MLflow experiment."
    )
    team: str = Field(default="default", pattern=r"^[\w.-]{1,64}$")

    code: str = Field(min_length=1, description="Folder with the program; zipped and named by its digest.")
    program: str = Field(default="train.py", description="The file in `code` that is run, a relative path.")
    arguments: tuple[str, ...] = Field(
        default=(), description="Arguments for the program; {data.clicks} becomes the path of the data `clicks`."
    )
    environment: Environment = Environment()
    data: dict[str, str] = Field(
        default_factory=dict,
        description="Name -> URI of the data that the program reads: s3://bucket/key, s3://bucket/folder/ or "
        "file:///path on the machine. #sha256=<hex> after a single file's URI: it must have that digest.",
    )
    recipe: Recipe = Field(default=Recipe(), description="How to train; see `gpucost.recipe`.")
    seed: int = Field(default=0, ge=0, le=2**32 - 1)

    gpu: GpuNeed = Field(default=GpuNeed(), validate_default=True)
    world_size: int = Field(default=1, ge=1, le=4096, description="Processes in all; fixed by the job, not the node.")
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads per process; part of exact resumption.")

    work_hours: Hours = Field(description="Hours of training left at the start, on the slowest GPU that is accepted.")
    launch_hours: float = Field(default=0.1, ge=0, le=24, description="Hours from buying a machine to its first step.")
    deadline: AwareDatetime = Field(description="Done by then, with a time zone.")
    budget: Money | None = Field(default=None, description="Most that the job may cost in all; None: no limit.")
    price_cap: InstanceHourPrice | None = Field(
        default=None, description="Wait rather than pay more than this for spot; never forces a dearer purchase."
    )
    priority: int = Field(default=50, ge=0, le=100, description="Higher goes first where capacity is short.")
    sensitivity: Literal["public", "internal", "confidential"] = Field(
        default="internal", description="Who may see the data; confidential jobs stay on sites that allow it."
    )
    checkpoint: CheckpointPlan = CheckpointPlan()
    folder_sync: FolderSync | None = Field(default=None, description="For a program that saves by itself.")
    hang: HangWatch = HangWatch()

    @field_validator("program")
    @classmethod
    def _relative(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/") or not value.strip():
            raise ValueError(f"got {value!r}, expected a path inside the code folder such as 'train.py'")
        return value

    @field_validator("data")
    @classmethod
    def _names_for_folders_and_variables(cls, value: dict[str, str]) -> dict[str, str]:
        seen: dict[str, str] = {}
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
                raise ValueError(
                    f"got the name {name!r}, expected letters, digits, _ and -, the first a letter or digit"
                )
            if (other := seen.setdefault(name.upper().replace("-", "_"), name)) != name:
                raise ValueError(f"{other!r} and {name!r} are one name as an environment variable; rename one")
        return value

    @model_validator(mode="after")
    def _arguments_name_data(self) -> Self:
        if unknown := unknown_data(self.arguments, self.data):
            known = ", ".join(self.data) or "none"
            raise ValueError(f"arguments: {unknown[0]!r} is no name in data; known: {known}")
        return self

    @model_validator(mode="after")
    def _recipe_reaches_the_program(self) -> Self:
        if self.folder_sync and self.recipe != Recipe():
            raise ValueError(
                "recipe: got options beside folder_sync, expected one of the two; a recipe is applied by "
                "checkpointed(...), which a program that saves by itself does not call"
            )
        return self

    @field_validator("gpu")
    @classmethod
    def _can_do_the_recipe(cls, need: GpuNeed, given: ValidationInfo) -> GpuNeed:
        """Whatever is bought must do what the recipe asks; with any GPU accepted, the node finds out."""
        recipe: Recipe | None = given.data.get("recipe")
        if recipe is None:
            return need
        if strange := fitness.strange_sections(recipe, need.kinds):
            raise ValueError(
                f"recipe.per_gpu: there is no GPU {strange[0]!r}; {_nearest(strange[0])} If it is a new one, add it to "
                "gpu.kinds"
            )
        kinds = need.kinds if need.count else (CPU,)
        unfit = fitness.unfit(recipe, kinds, need.memory_gib)
        if unfit:
            fit = [kind for kind in kinds if kind not in unfit]
            others = (
                f"{', '.join(fit)} can do it: leave the others out of gpu.kinds, or give them" if fit else "Give them"
            )
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in unfit.items())
            raise ValueError(f"recipe: {reasons}. {others} sections of their own in recipe.per_gpu")
        return need

    @model_validator(mode="after")
    def _one_currency(self) -> Self:
        if self.budget and self.price_cap and self.budget.currency != self.price_cap.currency:
            raise ValueError(
                f"price_cap: got {self.price_cap.currency}, expected {self.budget.currency} as in budget; "
                "state both in one currency"
            )
        return self


def unknown_data(arguments: Iterable[str], data: Mapping[str, str]) -> list[str]:
    """Names that arguments refer to as {data.<name>} and that `data` has not."""
    names = (name for argument in arguments for name in DATA_REFERENCE.findall(argument))
    return [name for name in dict.fromkeys(names) if name not in data]


def _nearest(kind: str) -> str:
    near = difflib.get_close_matches(kind, (*gpus.KINDS, CPU), cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are cpu, {', '.join(gpus.KINDS)}."


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
