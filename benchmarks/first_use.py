"""What does the first use of a client cost a process? Prints seconds and memory, each in a fresh process.

    python benchmarks/first_use.py

Produces the table of docs/decisions/0003-mlflow-client.md.
"""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import psutil, time
me = psutil.Process()
before, begun = me.memory_info().rss, time.perf_counter()
{statement}
print(f"{{time.perf_counter() - begun:.2f}} {{(me.memory_info().rss - before) / 1e6:.0f}}")
"""

CLIENTS = {
    "MlflowClient": "from mlflow.tracking import MlflowClient; MlflowClient('http://127.0.0.1:9')",
    "httpx": "import httpx; httpx.Client()",
}


def main() -> None:
    """Measure every client three times and print the best."""
    for name, statement in CLIENTS.items():
        runs = [
            subprocess.run(
                [sys.executable, "-c", PROBE.format(statement=statement)], capture_output=True, text=True, check=True
            ).stdout.split()
            for _ in range(3)
        ]
        seconds, megabytes = min(float(run[0]) for run in runs), min(float(run[1]) for run in runs)
        sys.stdout.write(f"{name:14} {seconds:5.2f} s  {megabytes:4.0f} MB\n")


if __name__ == "__main__":
    main()
