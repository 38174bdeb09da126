"""The sites file: what is wrong in it is named by file and field. The start script: no secret, and valid."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpucost.capacity.access import MAX_USER_DATA_BYTES, RoleAccess
from gpucost.capacity.sites import StoreSettings, load_sites
from tests.unit.capacity.test_ec2_shapes import SITE

GOOD = """
sites:
  - region: us-east-1
    image: ami-0abc
    zones: [us-east-1a, us-east-1b]
    subnets: {us-east-1a: subnet-a}
    role: gpucost-node
    instance_types:
      g4dn.xlarge: {price: 0.526 USD, source: AWS list price, as_of: 2026-11-30T00:00:00Z}
    store: {url: "s3://bucket/prefix"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sites.yaml"
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    sites = load_sites(write(tmp_path, GOOD))
    site = sites.site("aws", "us-east-1")
    assert (site.zones, str(site.instance_types["g4dn.xlarge"].price)) == (("us-east-1a", "us-east-1b"), "$0.5260/h")
    assert sites.of("gcp") == ()
    with pytest.raises(KeyError, match="no site for aws in eu-west-1; add one to the sites file"):
        sites.site("aws", "eu-west-1")


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("image: ami-0abc", "", r"sites\.0\.image: Field required"),
        ("0.526 USD", "0.526", r"sites\.0\.instance_types\.g4dn\.xlarge\.price.*expected text such as '12\.50 USD'"),
        ("0.526 USD", "0 USD", r"sites\.0\.instance_types\.g4dn\.xlarge\.price\.amount: .*greater than 0"),
        ("2026-11-30T00:00:00Z", "2026-11-30T00:00:00", r"sites\.0\.instance_types\.g4dn\.xlarge\.as_of: .*timezone"),
        ("s3://bucket", "ftp://bucket", r"sites\.0\.store\.url"),
        ("us-east-1a: subnet-a", "us-east-1z: subnet-z", r"sites\.0\.subnets: .*us-east-1z.*listed in zones"),
        ("role: gpucost-node", "rol: gpucost-node", r"sites\.0\.rol: Extra inputs are not permitted"),
        ("zones: [us-east-1a, us-east-1b]", "zones: []", r"sites\.0\.zones"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ValueError, match=field) as wrong:
        load_sites(path)
    assert str(path) in str(wrong.value)


@pytest.mark.parametrize("text", ["", "[]", "sites: []", "sites: {"])
def test_what_is_no_sites_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"sites\.yaml: "):
        load_sites(write(tmp_path, text))


def test_a_missing_file_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml.*set AIRFLOW__GPUCOST__SITES_FILE to it"):
        load_sites(tmp_path / "none.yaml")


STORES = [
    StoreSettings(url="s3://bucket/prefix"),
    StoreSettings(url="s3://bucket", endpoint="http://127.0.0.1:8333", region="eu-west-1"),
    StoreSettings(url="s3://b/a b/'$(reboot)'", endpoint="http://host/`id`"),
]


@pytest.mark.parametrize("store", STORES)
def test_the_start_script_is_valid_and_runs_nothing_but_its_own_commands(store: StoreSettings, tmp_path: Path) -> None:
    script = RoleAccess().start_script(SITE.model_copy(update={"store": store}), "agents/x.zip")
    assert len(script.encode()) <= MAX_USER_DATA_BYTES == 16 * 1024
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    said = run_with_stubs(script, tmp_path)
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    assert said == [
        f"python3 - {bucket} {prefix + '/' if prefix else ''}agents/x.zip",
        "python3 agent.zip",
        "shutdown -h now",
    ]


def test_a_node_whose_agent_fails_ends_all_the_same(tmp_path: Path) -> None:
    said = run_with_stubs(RoleAccess().start_script(SITE, "agents/x.zip"), tmp_path, python_fails=True)
    assert said == ["python3 - bucket prefix/agents/x.zip", "shutdown -h now"]


def test_the_agents_watchdog_gets_the_command_that_ends_the_machine(tmp_path: Path) -> None:
    run_with_stubs(RoleAccess().start_script(SITE, "agents/x.zip"), tmp_path)
    assert (tmp_path / "watchdog").read_text().splitlines()[-1] == "shutdown -h now"


def test_the_start_script_is_the_same_for_all_nodes_of_a_site_and_holds_no_secret() -> None:
    script = RoleAccess().start_script(SITE, "agents/x.zip")
    assert script == RoleAccess().start_script(SITE, "agents/x.zip")
    for word in ("secret", "password", "access_key", "token"):
        assert word not in script.lower()


def test_a_script_that_is_too_long_is_refused() -> None:
    site = SITE.model_copy(update={"store": StoreSettings(url="s3://bucket/" + "x" * 17_000)})
    with pytest.raises(ValueError, match=r"user data: .* expected at most 16384"):
        RoleAccess().start_script(site, "agents/x.zip")


def run_with_stubs(script: str, folder: Path, *, python_fails: bool = False) -> list[str]:
    """Run the script with commands that only say that they were called."""
    for name in ("python3", "shutdown"):
        stub = folder / name
        fails = "exit 1" if python_fails and name == "python3" else "exit 0"
        stub.write_text(
            f'#!/bin/bash\necho "{name} $*" >> {folder}/said\necho "$GPUCOST_SHUTDOWN" >> {folder}/watchdog\n{fails}\n'
        )
        stub.chmod(0o755)
    subprocess.run(
        ["bash", "-c", script], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, check=False
    )
    return (folder / "said").read_text().splitlines()
