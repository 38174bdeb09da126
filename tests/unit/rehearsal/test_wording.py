"""What is wrong with a file or an option is told in one line for each field, with the value and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpucost.rehearsal.settings import Settings
from gpucost.rehearsal.wording import FAULTS_TOLD, LONGEST_VALUE, faults, in_one_line, read_model


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1)
    name: str = Field(default="a", min_length=1)

    @field_validator("name")
    @classmethod
    def _small(cls, name: str) -> str:
        if name.isupper():
            raise ValueError(f"got {name}, expected small letters")
        return name


class Outer(BaseModel):
    rules: list[Inner]


def told(model: type[BaseModel], text: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(text)
    return faults(caught.value)


def test_each_field_has_its_line_with_value_and_expectation() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(state_dir=Path(), market=Path(), speed=0.0, port=99_999, boot_s=-1)
    assert sorted(faults(caught.value)) == [
        "boot_s: got -1, expected greater than or equal to 0",
        "port: got 99999, expected less than or equal to 65535",
        "speed: got 0.0, expected greater than 0",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{}", "rules: is missing"),
        ("[]", "file: got [], expected an object"),
        ('{"rules": [{}, {"count": "x"}]}', "rules.1.count: got 'x', expected a valid integer, unable to parse"),
        ('{"rules": [{"count": 0}]}', "rules.0.count: got 0, expected greater than or equal to 1"),
        ('{"rules": [{"colour": "red"}]}', "rules.0.colour: got 'red', expected no such field"),
        ('{"rules": [{"name": ""}]}', "rules.0.name: got '', expected at least 1 character"),
        ('{"rules": [{"name": "A"}]}', "rules.0.name: got A, expected small letters"),
        ('{"rules": [', "file: invalid JSON: EOF while parsing"),
    ],
)
def test_the_words(text: str, line: str) -> None:
    (only,) = told(Outer, text)
    assert only.startswith(line)


def test_a_long_value_is_shortened() -> None:
    (only,) = told(Outer, f'{{"rules": "{"x" * 500}"}}')
    assert len(only) < LONGEST_VALUE + 50
    assert "…, expected a valid" in only


def test_of_many_faults_the_first_are_told_and_the_rest_counted() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"rules": [{"count": 0}] * (FAULTS_TOLD + 3)})
    line = in_one_line(caught.value)
    assert line.count("got 0") == FAULTS_TOLD
    assert line.endswith("; and 3 more")


def test_a_file_is_named_with_its_option_and_form(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    with pytest.raises(ValueError, match=r"script: cannot read .*rules\.json: No such file"):
        read_model(path, Outer, "script")
    path.write_text('{"rules": 3}')
    with pytest.raises(
        ValueError, match=r'script: .*rules\.json is not \{"rules"\}: rules: got 3, expected a valid array'
    ):
        read_model(path, Outer, "script", '{"rules"}')
    path.write_text('{"rules": [{}]}')
    assert read_model(path, Outer, "script").rules == [Inner()]
