"""What if there is no cloud here? An EC2 stand-in on loopback that plain boto3 can buy from.

    python -m gpucost.rehearsal --port 15000 --state-dir .gpucost/rehearsal \\
        --market include/market/three_zones.json --speed 120

The rooms within: `market` (what is sold, at which price, when), `timekeeping` (one clock for a state folder,
however often the cloud is started on it), `book` with `records` (who owns which instance;
the one owner of fleet and instance state), `hypervisor` and `processes` (an instance's user data as a real local
process group; `guard` ends them when the cloud itself is killed), `imds` (what an instance knows about itself),
`ec2_api` with `fleet`, `filters` and `views` (the EC2 actions that are ours), `wire` (parameters and answers by
botocore's model), `moto_side` (everything that moto does well), `script` (interruptions at a job's progress),
`invoice` (what it cost, by AWS's published rules), `control` (the rehearsal's own endpoints) and `server` (which
request goes where).

Nothing of gpucost uses this package but the command line and tests; it shares no billing code with the ledger.
"""
