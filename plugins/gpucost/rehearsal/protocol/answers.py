"""How does a service write an error, so that SDKs read its code? One form for each protocol.

Sources: EC2, https://docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html (example error response);
SQS, https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-json-api-responses.html
(x-amzn-query-error); the others as botocore's parsers for the protocols query and json read them.
"""

from __future__ import annotations

import json
import uuid

from werkzeug.wrappers import Response

from gpucost.rehearsal.protocol.catalogue import Failure, failure
from gpucost.rehearsal.protocol.serializer import DECLARATION, ILLEGAL, error_body, escape

EC2_XML = "text/xml;charset=UTF-8"


def error_response(service: str, failed: Failure, *, as_json: bool) -> Response:
    """The answer that says `failed` in the service's protocol.

    Args:
        service: ec2, sts, sqs, events ... or imds.
        failed: code, message and status.
        as_json: whether the request was in a JSON protocol (it has X-Amz-Target).
    """
    request_id = str(uuid.uuid4())
    if service == "imds":
        response = Response(f"{failed.code}: {failed.message}\n", content_type="text/plain")
    elif as_json:
        response = _json(service, failed)
    elif service == "ec2":
        response = Response(error_body(failed.code, failed.message, request_id), content_type=EC2_XML)
    else:
        response = Response(_query(failed, request_id), content_type="text/xml")
    response.status_code = failed.status
    response.headers["x-amzn-RequestId"] = request_id
    return response


def _query(failed: Failure, request_id: str) -> str:
    message = ILLEGAL.sub("?", failed.message)
    return (
        f"{DECLARATION}<ErrorResponse><Error><Type>{_who(failed)}</Type><Code>{escape(failed.code)}</Code>"
        f"<Message>{escape(message)}</Message></Error><RequestId>{request_id}</RequestId></ErrorResponse>"
    )


def _json(service: str, failed: Failure) -> Response:
    version = "1.0" if service == "sqs" else "1.1"
    body = json.dumps({"__type": failed.code, "message": failed.message})
    response = Response(body, content_type=f"application/x-amz-json-{version}")
    response.headers["x-amzn-ErrorType"] = failed.code
    if service == "sqs":
        # SQS kept the codes of its old XML protocol in this header; SDKs prefer it to __type
        response.headers["x-amzn-query-error"] = f"{failed.code};{_who(failed)}"
    return response


def internal_error(service: str, *, as_json: bool) -> Response:
    """The answer for a mistake of ours: clients must take it for one of AWS's, they know what to do then."""
    return error_response(service, failure("InternalError" if service == "ec2" else "InternalFailure"), as_json=as_json)


def _who(failed: Failure) -> str:
    return "Sender" if failed.status < 500 else "Receiver"
