"""A recipe says how to train on whatever GPU is bought; what is wrong or cannot be done is said before anything is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpucost import gpus
from gpucost.fitness import NEEDED, refusal, remarks, strange_sections, unfit
from gpucost.gpus import kind_of
from gpucost.job import TrainingJob
from gpucost.recipe import Options, Recipe
from gpucost.recipe_file import load_recipe
from tests.fakes.rooms import wanted

INCLUDE = Path(__file__).parents[2] / "include"
SHIPPED = sorted(path.name for path in (INCLUDE / "recipes").glob("*.yaml"))


def faults(given: Any) -> dict[str, str]:
    """Option -> what is said about it."""
    with pytest.raises(ValidationError) as wrong:
        Recipe.model_validate(given)
    return {".".join(map(str, error["loc"])): error["msg"] for error in wrong.value.errors()}


# What a recipe may say


def test_what_is_left_out_stays_as_the_program_has_it() -> None:
    assert Recipe().for_gpu("T4").chosen() == {}
    assert Recipe(workers=0, compile=False).for_gpu("T4").chosen() == {"workers": 0, "compile": False}


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("precision", "bfloat16", "got 'bfloat16', expected fp32, tf32, bf16 or fp16"),
        ("batch", 0, "got 0, expected samples per optimizer step, 1 or more"),
        ("batch", True, "got True, expected samples per optimizer step, 1 or more"),
        ("accumulate", "many", "got 'many', expected parts per batch, 1 (none) or more"),
        ("clip_norm", 0, "got 0, expected the most that the norm of all gradients may be, more than 0, such as 1.0"),
        ("clip_norm", float("inf"), "got inf, expected the most that the norm of all gradients may be, more than 0"),
        ("gradient_checkpointing", [], "got [], expected true, false, or names of modules such as ['layers.*']"),
        ("gradient_checkpointing", "layers.*", "got 'layers.*', expected true, false, or names of modules"),
        ("workers", -1, "got -1, expected processes that load data, 0 (none) or more"),
        ("compile", "max", "got 'max', expected true, false, default, reduce-overhead or max-autotune"),
        ("checkpoint_every_steps", 0, "got 0, expected optimizer steps, 1 or more"),
        ("checkpoint_min_seconds", -1, "got -1, expected seconds, 0 or more"),
        ("checkpoint_max_seconds", 0, "got 0, expected seconds, more than 0"),
        ("nccl_timeout_seconds", 0, "got 0, expected seconds, more than 0"),
        ("per_gpu", ["T4"], "got ['T4'], expected a mapping such as {T4: {precision: fp16}}"),
        ("per_memory", 40, "got 40, expected a list such as [{at_least_gib: 40, accumulate: 1}]"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_was_expected(option: str, value: Any, expected: str) -> None:
    [(where, words)] = faults({option: value}).items()
    assert where == option
    assert words.startswith(expected)


def test_every_option_says_what_it_expects() -> None:
    nothing = object()
    for option in Recipe.model_fields:
        assert "expected" in faults({option: nothing})[option], option


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("precison", "precision"),
        ("amp", "precision"),
        ("batch_size", "batch"),
        ("gradient_accumulation_steps", "accumulate"),
        ("max_grad_norm", "clip_norm"),
        ("num_workers", "workers"),
        ("activation_checkpointing", "gradient_checkpointing"),
        ("nccl_timeout", "nccl_timeout_seconds"),
    ],
)
def test_a_name_that_is_not_known_gets_the_nearest_one(name: str, meant: str) -> None:
    assert faults({name: 1}) == {name: f"there is no option {name!r}; did you mean {meant}?"}


def test_a_name_that_is_near_to_none_gets_all_of_them() -> None:
    words = faults({"zzz": 1})["zzz"]
    assert all(option in words for option in Recipe.model_fields)


def test_a_key_that_is_no_text_is_no_option() -> None:
    assert faults({4090: {}})["4090"].startswith("there is no option 4090; expected one of precision")


def test_every_wrong_option_is_named_at_once_wherever_it_stands() -> None:
    wrong = {
        "batch": 0,
        "precison": "bf16",
        "per_gpu": {"T4": {"workers": -1}, "L4": "fp16"},
        "per_memory": [{"at_least_gib": 40, "compile": "fast"}, {"batch": 2}],
    }
    assert set(faults(wrong)) == {
        "batch",
        "precison",
        "per_gpu.T4.workers",
        "per_gpu.L4",
        "per_memory.0.compile",
        "per_memory.1.at_least_gib",
    }
    assert faults("bf16") == {"": "got 'bf16', expected a mapping of options such as {precision: bf16}"}


@pytest.mark.parametrize(
    ("recipe", "where", "words"),
    [
        (
            {"checkpoint_min_seconds": 60, "checkpoint_max_seconds": 30},
            "checkpoint_max_seconds",
            "got 30, expected checkpoint_min_seconds (60) or more",
        ),
        ({"batch": 4, "accumulate": 8}, "accumulate", "got 8 parts of a batch of 4, expected 4 or fewer"),
        ({"batch": 4, "per_gpu": {"T4": {"accumulate": 8}}}, "per_gpu.T4.accumulate", "got 8 parts of a batch of 4"),
        (
            {"accumulate": 8, "per_memory": [{"at_least_gib": 40, "batch": 4}]},
            "per_memory.0.accumulate",
            "got 8 parts of a batch of 4",
        ),
        (
            {"per_memory": [{"at_least_gib": 40, "batch": 4}], "per_gpu": {"A100": {"accumulate": 8}}},
            "per_gpu.A100.accumulate",
            "got 8 parts of a batch of 4",
        ),
        ({"per_memory": [{"at_least_gib": 40}] * 2}, "per_memory.1.at_least_gib", "got 40 twice"),
        ({"per_gpu": {"RTX4090": {}, "RTX 4090": {}}}, "per_gpu.RTX4090", "which are one kind of GPU"),
    ],
)
def test_options_that_do_not_go_together_are_refused(recipe: dict[str, Any], where: str, words: str) -> None:
    assert words in faults(recipe)[where]


def test_a_section_and_a_rule_that_never_meet_may_differ() -> None:
    recipe = {"per_memory": [{"at_least_gib": 40, "batch": 4}], "per_gpu": {"T4": {"accumulate": 8}}}
    assert Recipe.model_validate(recipe).for_gpu("T4").chosen() == {"accumulate": 8}


# One recipe, many GPUs

TIERED = Recipe.model_validate(
    {
        "batch": 256,
        "precision": "bf16",
        "accumulate": 8,
        "per_memory": [{"at_least_gib": 80, "accumulate": 1}, {"at_least_gib": 24, "accumulate": 4, "workers": 2}],
        "per_gpu": {"T4": {"precision": "fp16"}, "A10G": {"accumulate": 2}, "cpu": {"precision": "fp32"}},
    }
)


@pytest.mark.parametrize(
    ("kind", "memory_gib", "expected"),
    [
        ("T4", None, {"precision": "fp16", "accumulate": 8}),
        ("Tesla T4", 14.6, {"precision": "fp16", "accumulate": 8}),
        ("L4", 22.0, {"accumulate": 4, "workers": 2}),
        ("A10G", 22.1, {"accumulate": 2, "workers": 2}),
        ("A100", 39.4, {"accumulate": 4, "workers": 2}),
        ("A100", 79.2, {"accumulate": 1}),
        ("A100", None, {"accumulate": 4, "workers": 2}),
        ("A100-80GB", None, {"accumulate": 1}),
        ("a card of next year", 95.0, {"accumulate": 1}),
        ("a card of next year", None, {"accumulate": 8}),
        (None, None, {"precision": "fp32", "accumulate": 8}),
        ("cpu", None, {"precision": "fp32", "accumulate": 8}),
    ],
)
def test_a_gpu_takes_the_highest_rule_that_its_memory_meets_and_then_its_section(
    kind: str | None, memory_gib: float | None, expected: dict[str, Any]
) -> None:
    assert TIERED.for_gpu(kind, memory_gib).chosen() == {"batch": 256, "precision": "bf16"} | expected


def test_a_section_may_be_for_a_kind_with_so_much_memory() -> None:
    recipe = Recipe.model_validate(
        {"per_gpu": {"A100": {"batch": 1}, "A100-80GB": {"batch": 80}, "V100-16GB": {"batch": 16}}}
    )
    of = {
        (kind, memory): recipe.for_gpu(kind, memory).batch for kind in ("A100", "V100") for memory in (15.8, 31.7, 79.2)
    }
    assert of["A100", 31.7] == 1
    assert of["A100", 79.2] == 80
    assert (of["V100", 15.8], of["V100", 31.7]) == (16, None)


options = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
        "batch": st.integers(8, 1000),
        "accumulate": st.integers(1, 8),
        "clip_norm": st.floats(0.1, 10),
        "gradient_checkpointing": st.booleans() | st.just(("layers.*",)),
        "workers": st.integers(0, 4),
        "compile": st.booleans() | st.just("max-autotune"),
    },
)
recipes = st.builds(
    lambda base, sections, rule: Recipe.model_validate(
        {**base, "per_gpu": sections, "per_memory": [{"at_least_gib": 40, **rule}]}
    ),
    options,
    st.dictionaries(st.sampled_from(["T4", "A100", "cpu"]), options),
    options,
)


@given(recipes)
def test_a_recipe_survives_the_job_s_file(recipe: Recipe) -> None:
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert "null" not in recipe.model_dump_json()


@given(recipes, options, st.sampled_from(["T4", "A100", None]))
def test_a_change_holds_on_every_gpu(recipe: Recipe, change: dict[str, Any], kind: str | None) -> None:
    before, after = recipe.for_gpu(kind).chosen(), recipe.changed(change).for_gpu(kind).chosen()
    assert after == before | change


def test_a_change_takes_an_option_back_and_names_what_is_wrong() -> None:
    recipe = Recipe.model_validate({"batch": 8, "per_gpu": {"T4": {"batch": 4, "workers": 1}}})
    assert recipe.changed({"batch": None}).for_gpu("T4").chosen() == {"workers": 1}
    with pytest.raises(ValidationError, match="there is no option 'batchs'; did you mean batch"):
        recipe.changed({"batchs": 4})


# What a GPU can do


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA T4G", "T4g"),
        ("Tesla K80", "K80"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA X1 of next year", None),
        ("", None),
    ],
)
def test_a_device_is_of_the_kind_that_clouds_sell(device: str, kind: str | None) -> None:
    assert kind_of(device) == kind


@pytest.mark.parametrize("kind", gpus.KINDS)
def test_a_kind_is_found_by_its_own_name_and_by_how_others_write_it(kind: str) -> None:
    assert kind_of(kind) == kind
    assert kind_of(kind.lower().replace("-", " ")) == kind


def test_kinds_of_the_offers_in_reach_are_known() -> None:
    told = "A10 A100 A100-80GB A10G A40 A6000 B200 B300 GH200 H100 H100-SXM H200 H200-SXM K80 L4 L40 L40S P100 P4"
    told += " RTX-6000-Ada RTX-PRO-6000 RTX3090 RTX4000-Ada RTX4090 RTX5090 RTX6000 RTXPRO6000 T4 T4g V100 V100-32GB"
    assert [kind for kind in (*told.split(), "Radeon Pro V520", "Gaudi HL-205") if gpus.find(kind) is None] == []


def test_generations_of_tensor_cores() -> None:
    kinds = ("P100", "V100", "T4", "A100", "A10G", "L4", "H100", "B200", "RTX5090")
    assert [getattr(gpus.find(kind), "tensor_cores", None) for kind in kinds] == [0, 1, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("T4", {"precision": "bf16"}, "precision: got bf16, which needs compute capability 8.0 (Ampere) or newer"),
        ("V100", {"precision": "tf32"}, "and V100 has 7.0; use fp16 or fp32"),
        ("M60", {"precision": "fp16"}, "which needs compute capability 5.3 (late Maxwell) or newer, and M60 has 5.2"),
        ("P100", {"compile": True}, "compile: got True, which needs compute capability 7.0 (Volta)"),
        ("K80", {"workers": 2}, "torch 2.13 has wheels from 5.0 on; take it out of gpu.kinds"),
        ("Radeon Pro V520", {"precision": "fp16"}, "is no GPU for CUDA"),
        ("cpu", {"precision": "fp16"}, "precision: got fp16, which a CPU cannot do; use bf16 or fp32"),
        (None, {"precision": "tf32"}, "precision: got tf32, which a CPU cannot do"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_with_the_reason(kind: str | None, asked: dict[str, Any], words: str) -> None:
    assert words in str(refusal(Options.model_validate(asked), kind))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("T4", {"precision": "fp16", "compile": True}),
        ("P4", {"precision": "fp16"}),
        ("A10G", {"precision": "bf16", "compile": "max-autotune"}),
        ("RTX3090", {"precision": "tf32"}),
        ("K80", {}),
        (None, {"precision": "bf16", "compile": True, "nccl_timeout_seconds": 60}),
        ("a card of next year", {"precision": "bf16"}),
    ],
)
def test_what_a_gpu_can_do_or_may_is_not(kind: str | None, asked: dict[str, Any]) -> None:
    assert refusal(Options.model_validate(asked), kind) is None


def test_the_device_s_own_word_counts_more_than_the_table() -> None:
    bf16 = Options(precision="bf16")
    assert "and a card of next year has 7.2" in str(refusal(bf16, "a card of next year", (7, 2)))
    assert refusal(bf16, "a card of next year", (13, 0)) is None
    assert refusal(bf16, "T4", (8, 0)) is None


@given(st.sampled_from(sorted(NEEDED)), st.tuples(st.integers(5, 13), st.integers(0, 9)))
def test_a_newer_gpu_does_what_an_older_one_does(what: str, capability: tuple[int, int]) -> None:
    asked = Options(compile=True) if what == "compile" else Options.model_validate({"precision": what})
    able = refusal(asked, "a card", capability) is None
    assert able == (capability >= NEEDED[what][0])
    assert not able or refusal(asked, "a card", (capability[0] + 1, 0)) is None


def test_what_helps_less_than_one_may_hope_is_remarked_and_not_refused() -> None:
    assert remarks(Options(precision="bf16"), "A100") == []
    assert "slower than fp32" in remarks(Options(precision="bf16"), None)[0]
    assert "P4 has no fast fp16" in remarks(Options(precision="fp16"), "P4")[0]
    assert "one process trains alone" in remarks(Options(nccl_timeout_seconds=60), None)[0]
    assert remarks(Options(nccl_timeout_seconds=60), None, world_size=2) == []
    assert "100 samples do not divide into 8 equal parts" in remarks(Options(batch=100, accumulate=4), "T4", 2)[0]
    assert remarks(Options(batch=96, accumulate=4), "T4", 2) == []


# Before anything is bought


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as wrong:
        wanted(**changes)
    [error] = wrong.value.errors()
    assert error["loc"] == ("gpu",)
    return str(error["msg"])


def test_a_job_is_refused_whose_recipe_none_of_its_gpus_can_do() -> None:
    words = refused(recipe={"precision": "bf16"}, gpu={"kinds": ["T4"]})
    assert "recipe: T4: precision: got bf16" in words
    assert "Give them sections of their own in recipe.per_gpu" in words


def test_one_of_its_gpus_that_cannot_is_enough_for_it_may_be_the_one_that_is_bought() -> None:
    words = refused(recipe={"precision": "bf16"}, gpu={"kinds": ["T4", "A10G", "V100"]})
    assert "T4: precision" in words
    assert "V100: precision" in words
    assert "A10G can do it: leave the others out of gpu.kinds" in words


def test_a_section_of_its_own_makes_a_gpu_fit() -> None:
    job = wanted(recipe={"precision": "bf16", "per_gpu": {"T4": {"precision": "fp16"}}}, gpu={"kinds": ["T4", "A10G"]})
    assert [job.recipe.for_gpu(kind).precision for kind in job.gpu.kinds] == ["fp16", "bf16"]


def test_a_job_without_gpus_is_held_to_what_a_cpu_can_do() -> None:
    assert "a CPU cannot do" in refused(recipe={"precision": "fp16"}, gpu={"count": 0, "kinds": ["T4"]})
    assert wanted(recipe={"precision": "bf16"}, gpu={"count": 0}).recipe.precision == "bf16"


def test_where_any_gpu_is_accepted_the_node_finds_out() -> None:
    assert wanted(recipe={"precision": "bf16"}, gpu={"kinds": []}).recipe.precision == "bf16"


def test_memory_that_is_asked_for_rules_out_the_rules_for_less() -> None:
    recipe = {"precision": "bf16", "per_memory": [{"at_least_gib": 32, "precision": "fp16"}]}
    assert unfit(Recipe.model_validate(recipe), ("V100",)).keys() == {"V100"}
    assert unfit(Recipe.model_validate(recipe), ("V100",), 32.0) == {}
    assert wanted(recipe=recipe, gpu={"kinds": ["V100"], "memory_gib": 30}).recipe.precision == "bf16"


def test_a_section_for_a_gpu_that_nobody_knows_is_taken_for_a_slip_of_the_pen() -> None:
    words = refused(recipe={"per_gpu": {"A100G": {"batch": 2}}})
    assert re.search(r"there is no GPU 'A100G'; did you mean .*A100\b", words)
    job = wanted(recipe={"per_gpu": {"N1": {"batch": 2}}}, gpu={"kinds": ["N1"]})
    assert job.recipe.for_gpu("N1").batch == 2
    assert strange_sections(Recipe.model_validate({"per_gpu": {"cpu": {}, "T4": {}, "X9": {}}}), ()) == ["X9"]


def test_an_option_that_is_wrong_is_named_as_the_recipe_s() -> None:
    with pytest.raises(ValidationError) as wrong:
        wanted(recipe={"batch": 0, "per_gpu": {"T4": {"precison": "fp16"}}})
    assert {error["loc"] for error in wrong.value.errors()} == {
        ("recipe", "batch"),
        ("recipe", "per_gpu", "T4", "precison"),
    }


def test_a_job_with_a_recipe_survives_json() -> None:
    job = wanted(recipe=TIERED, gpu={"kinds": ["T4", "A100"]})
    assert TrainingJob.model_validate_json(job.model_dump_json()) == job
    assert json.loads(job.model_dump_json())["recipe"]["per_gpu"]["T4"] == {"precision": "fp16"}


# Recipes in files


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_can_be_done_by_what_a_newcomer_would_buy(name: str) -> None:
    recipe = load_recipe(name, INCLUDE)
    assert recipe == load_recipe(f"recipes/{name}", INCLUDE) == load_recipe(name.removesuffix(".yaml"), INCLUDE)
    assert recipe.for_gpu("T4").chosen()
    assert wanted(recipe=recipe, gpu={"kinds": ["T4", "V100", "A10G", "L4", "A100", "H100", "RTX4090"]})
    assert wanted(recipe=recipe, gpu={"count": 0})


def test_there_are_recipes_and_their_names_are_those_of_the_form() -> None:
    form = (INCLUDE.parent / "dags/spot_training.py").read_text()
    assert SHIPPED
    assert [name for name in SHIPPED if f"recipes/{name}" not in form] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch: [", "is not YAML"),
        ("- batch", "expected a mapping of options"),
        ("batch: 0\nper_gpu: {T4: {amp: true}}", r"batch: got 0.*per_gpu\.T4\.amp: there is no option 'amp'"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong_in_it(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)recipe: .*mine\.yaml.*{words}"):
        load_recipe("mine.yaml", tmp_path)


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# nothing yet\n")
    assert load_recipe("mine", tmp_path) == Recipe()


def test_a_name_without_a_file_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "fast.yaml").write_text(yaml.safe_dump({"precision": "bf16"}))
    with pytest.raises(ValueError, match=r"got 'quick', expected the name of a YAML file.*there are: fast"):
        load_recipe("quick", tmp_path)


def test_a_recipe_lies_below_the_include_folder(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "secret.yaml").write_text("batch: 1")
    for name in ("../secret.yaml", str(tmp_path / "secret.yaml")):
        with pytest.raises(ValueError, match="expected the name of a YAML file below"):
            load_recipe(name, tmp_path / "include")
