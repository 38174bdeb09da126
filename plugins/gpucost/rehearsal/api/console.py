"""GetConsoleOutput: the last 64 KiB of what a machine has printed.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetConsoleOutput.html.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from gpucost.rehearsal.api.context import Context
from gpucost.rehearsal.guests import read_end
from gpucost.rehearsal.protocol.wire import Ec2Error


def get(context: Context, request: Mapping[str, Any], region: str) -> dict[str, Any]:
    """GetConsoleOutput; what is printed is there at once, so `Latest` says nothing new."""
    if not request.get("InstanceId"):
        raise Ec2Error("MissingParameter", "The request must contain the parameter InstanceId")
    (one,) = context.named([request["InstanceId"]], region)
    printed = read_end(context.console(one.id)) or b""
    return {"InstanceId": one.id, "Output": base64.b64encode(printed).decode(), "Timestamp": context.book.now()}
