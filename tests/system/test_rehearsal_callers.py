"""Who may talk to the rehearsal cloud, by plain HTTP, and in which forms."""

from __future__ import annotations

import http.client
import json
import socket
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.system.rehearsal import TYPE, Cloud, expect_error

BUY = {"Action": "RunInstances", "Version": "2016-11-15", "ImageId": "ami-0", "InstanceType": TYPE,
       "MinCount": "1", "MaxCount": "1"}  # fmt: skip
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=AKIA/20261130/us-east-1/ec2/aws4_request, Signature=0"}


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    """Every test leaves the shared cloud empty."""


def ask(cloud: Cloud, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    """Status and text of an answer; `Host` is the server's unless it is given."""
    connection = http.client.HTTPConnection(urlsplit(cloud.url).netloc, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def living(cloud: Cloud) -> int:
    return sum(one["state"] in {"pending", "running"} for one in cloud.get("status")["instances"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example", "Origin": "https://evil.example"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/"), ("POST", "/rehearsal/script"), ("GET", "/imds/i-0/latest/")]
)
def test_web_pages_can_do_nothing(cloud: Cloud, headers: dict[str, str], method: str, path: str) -> None:
    body = urlencode(BUY) if path == "/" else '{"rules": []}'
    kind = FORM if path == "/" else {"Content-Type": "application/json"}
    status, text = ask(cloud, method, path, body, **SIGNED, **kind, **headers)
    assert status == 403
    assert "got" in json.loads(text)["error"]
    assert living(cloud) == 0
    status, text = ask(cloud, "GET", "/rehearsal/status", **headers)
    assert (status, "instances" in json.loads(text)) == (403, False), "it cannot look either"


def test_without_these_headers_the_same_request_buys(cloud: Cloud) -> None:
    status, _ = ask(cloud, "POST", "/", urlencode(BUY), **SIGNED, **FORM)
    assert (status, living(cloud)) == (200, 1)


def test_the_controls_take_json_only(cloud: Cloud) -> None:
    for kind in ({}, FORM, {"Content-Type": "text/plain"}):
        status, text = ask(cloud, "POST", "/rehearsal/script", '{"rules": []}', **kind)
        assert status == 415
        assert "expected application/json" in json.loads(text)["error"]
    status, _ = ask(cloud, "POST", "/rehearsal/script", '{"rules": []}', **{"Content-Type": "application/json"})
    assert status == 200


def test_a_query_in_the_address_is_answered_as_ec2(cloud: Cloud) -> None:
    one = cloud.ec2.run_instances(ImageId="ami-0", InstanceType=TYPE, MinCount=1, MaxCount=1)["Instances"][0]
    query = urlencode({"Action": "DescribeInstances", "Version": "2016-11-15"})
    status, text = ask(cloud, "GET", f"/?{query}", **SIGNED)
    assert (status, one["InstanceId"] in text) == (200, True)
    request = AWSRequest("GET", f"{cloud.url}/?{query}")
    SigV4QueryAuth(Credentials("AKIAREHEARSAL", "rehearsal"), "ec2", "us-east-1").add_auth(request)
    status, text = ask(cloud, "GET", request.url.removeprefix(cloud.url))
    assert (status, one["InstanceId"] in text) == (200, True), "presigned"
    status, text = ask(cloud, "GET", f"/?{query}")
    root = ElementTree.fromstring(text)  # noqa: S314 (the answer of our own server)
    assert (status, root.findtext("Errors/Error/Code")) == (403, "MissingAuthenticationToken")


def test_a_body_in_chunks_is_read_whole(cloud: Cloud) -> None:
    body = urlencode({"Action": "DescribeInstances", "Version": "2016-11-15", "MaxResults": "4"}).encode()
    where = urlsplit(cloud.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:  # type: ignore[arg-type]
        head = {**SIGNED, **FORM, "Host": where.netloc, "Transfer-Encoding": "chunked", "Connection": "close"}
        lines = ["POST / HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode())
        for part in (body[:20], body[20:]):
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert "maxResults" in answer.read().decode()


def test_what_no_answer_could_show_is_not_taken(cloud: Cloud) -> None:
    bad = [{"ResourceType": "launch-template", "Tags": [{"Key": "bell", "Value": "\x07"}]}]
    data = {"ImageId": "ami-0"}
    expect_error(
        "InvalidCharacter",
        lambda: cloud.ec2.create_launch_template(
            LaunchTemplateName="bell", LaunchTemplateData=data, TagSpecifications=bad
        ),
    )
    subnet = cloud.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    expect_error("InvalidCharacter", lambda: cloud.ec2.create_tags(Resources=[subnet], Tags=bad[0]["Tags"]))
    cloud.ec2.describe_launch_templates()
    cloud.ec2.describe_tags()


def test_what_moto_does_not_have_is_an_error_in_the_services_form(cloud: Cloud) -> None:
    expect_error("InternalError", lambda: cloud.ec2.describe_fast_launch_images())
    expect_error("InternalFailure", lambda: cloud.client("sts").decode_authorization_message(EncodedMessage="x"))
