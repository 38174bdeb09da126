"""The sites file of a rehearsal: where gpucost may buy, and what it needs there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .records import write_private

NOTED = "2026-11-30T00:00:00+00:00"
"""When the list prices of the market file were written down; the file names their source."""

BUCKET = "gpucost"


def write_sites(home: Path, addresses: Mapping[str, str], market: Path) -> Path:
    """Write HOME/sites.yaml for the services at `addresses` (name -> URL) and return its path.

    Args:
        market: the market file that the rehearsal cloud replays; its list prices become the site's.
    """
    path = home / "sites.yaml"
    write_private(path, yaml.safe_dump({"sites": [rehearsal_site(json.loads(market.read_text()), addresses["s3"])]}))
    return path


def rehearsal_site(market: Mapping[str, Any], store: str) -> dict[str, Any]:
    """The one site of a rehearsal: all zones and types of its market, nodes that reach the store at `store`."""
    return {
        "provider": "aws",
        "region": market["region"],
        "image": "ami-0123456789abcdef0",
        "zones": [zone["name"] for zone in market["zones"]],
        "role": "gpucost-node",
        "instance_types": {
            kind["name"]: {
                "price": f"{kind['on_demand']['usd_per_hour']} USD",
                "source": kind["on_demand"]["source"],
                "as_of": NOTED,
            }
            for kind in market["instance_types"]
        },
        "store": {"url": f"s3://{BUCKET}", "endpoint": store, "region": market["region"]},
    }
