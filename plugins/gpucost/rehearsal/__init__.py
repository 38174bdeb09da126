"""What if there is no cloud here? An EC2 stand-in on loopback that plain boto3 can buy from.

    python -m gpucost.rehearsal --port 15000 --state-dir .gpucost/rehearsal \\
        --market include/market/three_zones.json --speed 120

The rooms within: `market` (what is sold, at which price, when), `book` (who owns which instance; the one owner of
fleet and instance state), `machines` (an instance's user data as a real local process group, and what it knows about
itself), `interruptions` (which instance is taken back, and who is told before), `api` (the EC2 actions that are ours),
`protocol` (how requests and answers look on the wire), `services` (everything that moto does well), `faults` (what
goes wrong on the way), `invoice` (what it cost, by AWS's published rules); and beside them `cloud` (how they make one),
`server` (which request goes where), `control` (the rehearsal's own endpoints), `timekeeping` and `folder` (one clock
and one cloud for a state folder, however often it is started). How to use it: docs/how-to/rehearse.md.

Nothing of gpucost uses this package but the command line and tests; it shares no billing code with the ledger.
"""
