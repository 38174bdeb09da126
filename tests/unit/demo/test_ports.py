"""Which port a service gets, with a made-up machine."""

import random

import pytest

from demo.ports import INTERNAL_RANGE, PortChooser
from demo.settings import StackError, ports_from_environment


def chooser(busy: set[int], seed: int = 1) -> PortChooser:
    rng = random.Random(seed)
    return PortChooser(free=lambda port: port not in busy, listener=lambda port: f"nginx (pid {port})", rng=rng)


def test_defaults_are_taken_when_free():
    assert chooser(set()).public(["airflow", "s3"], {}, {}, set()) == {"airflow": 8080, "s3": 8333}


def test_a_busy_default_moves_to_the_next_free_port_and_says_so():
    ports = chooser({8080, 8081})
    assert ports.public(["airflow"], {}, {}, set()) == {"airflow": 8082}
    assert ports.moved == ["port 8080 for airflow is busy (nginx (pid 8080)): using 8082"]


def test_a_busy_port_of_the_user_is_an_error_that_names_variable_port_and_listener():
    with pytest.raises(StackError, match=r"GPUCOST_MLFLOW_PORT=7000 is busy: nginx \(pid 7000\) listens there"):
        chooser({7000}).public(["mlflow"], {"mlflow": 7000}, {}, set())


def test_two_services_cannot_be_given_one_port():
    with pytest.raises(StackError, match="GPUCOST_S3_PORT=7000: another service"):
        chooser(set()).public(["mlflow", "s3"], {"mlflow": 7000, "s3": 7000}, {}, set())


def test_a_port_that_our_running_service_holds_stays_with_it():
    ports = chooser({7000, 8090})
    chosen = ports.public(["mlflow", "airflow"], {"mlflow": 7000}, {"mlflow": 7000, "airflow": 8090}, {7000, 8090})
    assert chosen == {"mlflow": 7000, "airflow": 8090}


def test_a_service_in_mid_start_that_begins_to_listen_meanwhile_is_asked_for_again():
    ports = chooser({7000, 8090})
    remembered = {"mlflow": 7000, "airflow": 8090}
    chosen = ports.public(["mlflow", "airflow"], {"mlflow": 7000}, remembered, set(), again=lambda: {7000, 8090})
    assert chosen == remembered


def test_the_port_of_the_last_start_is_kept_when_free_and_given_up_when_somebody_else_has_it():
    assert chooser({8080}).public(["airflow"], {}, {"airflow": 8099}, set()) == {"airflow": 8099}
    assert chooser({8099}).public(["airflow"], {}, {"airflow": 8099}, set()) == {"airflow": 8080}


def test_internal_ports_are_free_distinct_and_out_of_the_range_of_outgoing_connections():
    busy = set(INTERNAL_RANGE[:6000])
    ports = chooser(busy)
    chosen = [ports.internal() for _ in range(50)]
    assert len(set(chosen)) == 50
    assert not set(chosen) & busy
    assert max(chosen) < 32768


def test_stacks_that_start_together_look_for_internal_ports_in_different_places():
    assert chooser(set(), seed=1).internal() != chooser(set(), seed=2).internal()


@pytest.mark.parametrize("text", ["http", "0", "65536", "-1", "²", "9" * 5000])
def test_a_port_variable_that_is_no_port_is_refused_by_name(text):
    with pytest.raises(StackError, match="GPUCOST_AIRFLOW_PORT"):
        ports_from_environment({"GPUCOST_AIRFLOW_PORT": text})


def test_port_variables_are_read_and_empty_ones_ignored():
    assert ports_from_environment({"GPUCOST_S3_PORT": "9000", "GPUCOST_MLFLOW_PORT": ""}) == {"s3": 9000}
