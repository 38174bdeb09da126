"""What did it cost? By rules of AWS that are published; shares no code with the ledger."""
