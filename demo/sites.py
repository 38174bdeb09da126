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
        market: the market file that the rehearsal cloud replays; its list prices become the sites'.
    """
    path = home / "sites.yaml"
    write_private(path, yaml.safe_dump({"sites": rehearsal_sites(json.loads(market.read_text()), addresses["s3"])}))
    return path


def rehearsal_sites(market: Mapping[str, Any], store: str) -> list[dict[str, Any]]:
    """A site for each region of a rehearsal: its zones and types, nodes that reach the store at `store`."""
    regions = dict.fromkeys(region for kind in market["instance_types"] for region in kind["on_demand"])
    return [
        {
            "provider": "aws",
            "region": region,
            "image": "ami-0123456789abcdef0",
            "zones": [zone["name"] for zone in market["zones"] if zone["name"][:-1] == region],
            "role": "gpucost-node",
            "instance_types": {
                kind["name"]: {
                    "price": f"{kind['on_demand'][region]['usd_per_hour']} USD",
                    "source": kind["on_demand"][region]["source"],
                    "as_of": NOTED,
                }
                for kind in market["instance_types"]
                if region in kind["on_demand"]
            },
            "store": {"url": f"s3://{BUCKET}", "endpoint": store, "region": region},
        }
        for region in regions
    ]
