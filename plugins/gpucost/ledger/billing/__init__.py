"""How does each provider bill? Pure rules: times and prices that the provider's API shows, in; an amount, out."""

from __future__ import annotations

from gpucost.ledger.billing.aws import aws_bill
from gpucost.ledger.billing.rule import Bill, BillingRule, MachineUse

RULES: dict[str, BillingRule] = {"aws": aws_bill}
"""Provider, as in `Pool.provider` -> its rule."""

__all__ = ["RULES", "Bill", "BillingRule", "MachineUse", "rules_for"]


def rules_for(provider: str) -> BillingRule:
    """How `provider` bills.

    Raises:
        ValueError: no rule is known for it; nothing is billed by a guess.
    """
    rule = RULES.get(provider)
    if rule is None:
        known = ", ".join(sorted(RULES))
        raise ValueError(f"provider: got {provider!r}, expected one with a billing rule ({known}); add its rule here")
    return rule
