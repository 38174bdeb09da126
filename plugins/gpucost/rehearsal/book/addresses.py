"""Which address and name does an instance have? The same in the API and in its metadata.

Source of the names: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-naming.html, "IP name".
"""

from __future__ import annotations

from gpucost.rehearsal.book.records import Instance


def private_address(instance: Instance) -> str:
    """An address of its own on loopback, where the instance's programs can really listen."""
    number = instance.number + 1
    return f"127.{64 + (number >> 16) % 64}.{(number >> 8) & 255}.{number & 255}"


def private_dns(instance: Instance) -> str:
    """The private name, from the address: ip-10-0-0-1.ec2.internal in us-east-1, with the region in others."""
    domain = "ec2.internal" if instance.region == "us-east-1" else f"{instance.region}.compute.internal"
    return f"ip-{private_address(instance).replace('.', '-')}.{domain}"
