"""`python -m gpucost.rehearsal`: run the rehearsal cloud until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gpucost.rehearsal.settings import Settings

if TYPE_CHECKING:
    from types import FrameType


def parse(arguments: list[str]) -> Settings:
    """Settings from the command line; exits with 2 and a sentence on the fault when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m gpucost.rehearsal", description="An EC2 stand-in on loopback.")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 takes any free one")
    parser.add_argument("--state-dir", type=Path, required=True, help="instances' folders, the journal, the clock")
    parser.add_argument("--market", type=Path, required=True, help="market file, see include/market")
    parser.add_argument("--speed", type=float, default=1.0, help="rehearsal seconds per real second")
    parser.add_argument("--origin", type=datetime.fromisoformat, help="what a new clock shows, ISO 8601")
    parser.add_argument("--role-credentials", type=Path, help='mode-600 JSON {"access_key", "secret_key"}')
    parser.add_argument("--image-path", default="", help="folders that the image puts on PATH, joined by ':'")
    parser.add_argument("--script", type=Path, help='JSON {"rules": [...]}: interruptions at a job\'s progress')
    parser.add_argument("--boot-s", type=float, help="pending -> running, rehearsal seconds (30)")
    given = vars(parser.parse_args(arguments))
    given["image_path"] = tuple(Path(part) for part in given["image_path"].split(":") if part)
    try:
        return Settings.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    """Run until told to end; 0 after a clean end, 1 when it could not start."""
    settings = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s rehearsal: %(message)s")
    for noisy in ("botocore", "werkzeug", "moto"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # moto and the EC2 model take a second to import: only now that the arguments are good
    from gpucost.rehearsal.server import RehearsalCloud, write_endpoint

    try:
        cloud = RehearsalCloud(settings)
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).error("cannot start: %s", error)  # noqa: TRY400 (the sentence, not the stack)
        return 1

    def end(_signal: int, _frame: FrameType | None) -> None:
        cloud.request_stop()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    write_endpoint(settings.state_dir, cloud.url)
    cloud.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
