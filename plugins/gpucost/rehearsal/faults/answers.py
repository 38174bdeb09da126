"""How does a service write an error, so that SDKs read its code? One form for each protocol.

Sources: EC2, https://docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html (example error response);
SQS, https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-json-api-responses.html
(x-amzn-query-error); the others as botocore's parsers for the protocols query and json read them.
"""

from __future__ import annotations

import json
import uuid
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

from gpucost.rehearsal.faults.catalogue import Failure

_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'


def error_response(service: str, failure: Failure, *, as_json: bool) -> Response:
    """The answer that says `failure` in the service's protocol.

    Args:
        service: ec2, sts, sqs, events ... or imds.
        failure: code, message and status.
        as_json: whether the request was in a JSON protocol (it has X-Amz-Target).
    """
    request_id = str(uuid.uuid4())
    if service == "imds":
        response = Response(f"{failure.code}: {failure.message}\n", content_type="text/plain")
    elif as_json:
        response = _json(service, failure)
    elif service == "ec2":
        response = Response(_ec2(failure, request_id), content_type="text/xml;charset=UTF-8")
    else:
        response = Response(_query(failure, request_id), content_type="text/xml")
    response.status_code = failure.status
    response.headers["x-amzn-RequestId"] = request_id
    return response


def _ec2(failure: Failure, request_id: str) -> str:
    return (
        f"{_DECLARATION}<Response><Errors><Error><Code>{escape(failure.code)}</Code>"
        f"<Message>{escape(failure.message)}</Message></Error></Errors>"
        f"<RequestID>{request_id}</RequestID></Response>"
    )


def _query(failure: Failure, request_id: str) -> str:
    return (
        f"{_DECLARATION}<ErrorResponse><Error><Type>{_who(failure)}</Type><Code>{escape(failure.code)}</Code>"
        f"<Message>{escape(failure.message)}</Message></Error><RequestId>{request_id}</RequestId></ErrorResponse>"
    )


def _json(service: str, failure: Failure) -> Response:
    version = "1.0" if service == "sqs" else "1.1"
    body = json.dumps({"__type": failure.code, "message": failure.message})
    response = Response(body, content_type=f"application/x-amz-json-{version}")
    response.headers["x-amzn-ErrorType"] = failure.code
    if service == "sqs":
        # SQS kept the codes of its old XML protocol in this header; SDKs prefer it to __type
        response.headers["x-amzn-query-error"] = f"{failure.code};{_who(failure)}"
    return response


def _who(failure: Failure) -> str:
    return "Sender" if failure.status < 500 else "Receiver"
