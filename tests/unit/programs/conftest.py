"""The programs' own modules can be imported, as they are when python runs a program from its folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "include" / "programs" / "ctr"))
