"""What does DescribeLaunchTemplates answer? From moto's templates; moto shows the first 15, with their first tags.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeLaunchTemplates.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID

from gpucost.rehearsal.protocol import filters
from gpucost.rehearsal.protocol.wire import Ec2Error
from gpucost.rehearsal.services.memory import ec2_backend

PAGE = range(1, 201)


def _templates(request: Mapping[str, Any], region: str) -> dict[str, Any]:
    backend = ec2_backend(region)
    chosen = filters.select(_named(request, backend), request.get("Filters"), _FILTERS, _tags)
    shown, token = filters.page(chosen, request, sizes=PAGE)
    return {"LaunchTemplates": [_shown(one) for one in shown], "NextToken": token}


def _named(request: Mapping[str, Any], backend: Any) -> list[Any]:
    ids, names = request.get("LaunchTemplateIds") or [], request.get("LaunchTemplateNames") or []
    if ids and names:
        raise Ec2Error("InvalidParameterCombination", "Name launch templates by id or by name, not by both.")
    for one in ids:
        if one not in backend.launch_templates:
            raise Ec2Error(
                "InvalidLaunchTemplateId.NotFound",
                f"The specified launch template, with template ID {one}, does not exist.",
            )
    for one in names:
        if one not in backend.launch_template_name_to_ids:
            raise Ec2Error(
                "InvalidLaunchTemplateName.NotFoundException",
                f"The specified launch template, with template name {one}, does not exist.",
            )
    ids = ids or [backend.launch_template_name_to_ids[one] for one in names]
    return [backend.launch_templates[one] for one in ids or backend.launch_templates]


def _tags(template: Any) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in template.get_tags()}


def _shown(template: Any) -> dict[str, Any]:
    return {
        "CreateTime": template.create_time.replace(tzinfo=UTC),
        "CreatedBy": f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:root",
        "DefaultVersionNumber": template.default_version_number,
        "LatestVersionNumber": template.latest_version_number,
        "LaunchTemplateId": template.id,
        "LaunchTemplateName": template.name,
        "Tags": [{"Key": key, "Value": value} for key, value in _tags(template).items()],
    }


_FILTERS: dict[str, Callable[[Any], Iterable[str]]] = {
    "create-time": lambda one: [one.create_time.isoformat()],
    "launch-template-name": lambda one: [one.name],
}

ACTIONS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {"DescribeLaunchTemplates": _templates}
"""What this action answers to a request of a region."""
