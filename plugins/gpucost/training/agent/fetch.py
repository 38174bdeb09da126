"""How do data and packages get onto the node? From the object store, or by a link to what lies there already.

    s3://bucket/key          one object                 data/<name>/<last part of the key>
    s3://bucket/folder/      all objects below it       data/<name>/...
    file:///path             a file or folder           a link, so that nothing is copied

Packages are wheels, which pip installs into a folder of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucost.job import DATA_REFERENCE
from gpucost.jobstore import JobSpec
from gpucost.reasons import Reason
from gpucost.training.agent.download import CannotFetch, Fetcher, Say, Source, Wanted, check_digest, refused, size_text
from gpucost.training.workdir import Workdir

__all__ = ["CannotFetch", "arguments", "fetch_data", "install_wheels", "path_of", "variables"]

PIP_LINES = 15


def fetch_data(
    data: Mapping[str, str],
    into: Path,
    environ: Mapping[str, str],
    say: Say,
    *,
    fetcher: Fetcher | None = None,
) -> None:
    """Put the job's data where the program finds them, see `path_of`.

    Args:
        data: name -> URI.
        into: the folder of all data.
        environ: names the store's endpoint and region.
        say: takes a line for people.
        fetcher: for tests.

    Raises:
        CannotFetch: with the reason for the exit record.
        one of `store_errors()`: the store was away for too long.
    """
    fetcher = fetcher or Fetcher(environ, say)
    into.mkdir(parents=True, exist_ok=True)
    sources = {name: Source.read(f"data.{name}", uri) for name, uri in data.items()}
    wanted: list[Wanted] = []
    for name, source in sources.items():
        if source.bucket is None:
            _link(source, into / name)
            continue
        found = fetcher.look(source, into / name)
        _keep_only(into / name, {one.target for one in found})
        say(f"{source.field}: {len(found)} files, {size_text(sum(one.stat.size for one in found))}, {source.uri}")
        wanted += found
    fetcher.fetch(wanted)


def path_of(name: str, uri: str, into: Path) -> Path:
    """Where the data called `name` lie: the single file, or the folder."""
    folder = into / name
    source = Source.read(f"data.{name}", uri)
    return folder if folder.is_symlink() or source.is_folder else folder / Path(source.path).name


def arguments(spec: JobSpec, workdir: Workdir) -> list[str]:
    """The program's arguments, with the path of its data in place of `{data.<name>}`.

    Raises:
        ValueError: an argument names data that the job has not.
    """

    def path(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in spec.data:
            known = ", ".join(spec.data) or "none"
            raise ValueError(f"arguments: {match.group(0)} names no data of the job; known: {known}")
        return str(path_of(name, spec.data[name], workdir.data))

    return [DATA_REFERENCE.sub(path, argument) for argument in spec.arguments]


def variables(spec: JobSpec, workdir: Workdir) -> dict[str, str]:
    """`GPUCOST_DATA_<NAME>` -> path, for programs that read their data's place from the environment."""
    return {
        "GPUCOST_DATA_" + re.sub(r"\W", "_", name).upper(): str(path_of(name, uri, workdir.data))
        for name, uri in spec.data.items()
    }


def install_wheels(
    wheels: Sequence[str],
    site: Path,
    environ: Mapping[str, str],
    say: Say,
    *,
    fetcher: Fetcher | None = None,
    python: str = sys.executable,
) -> None:
    """Install the job's wheels, and nothing else, into the folder `site`.

    Args:
        wheels: URIs; all that is needed must be among them, as nodes reach no package index.
        site: replaced.
        environ: names the store's endpoint and region.
        say: takes a line for people.
        fetcher: for tests.
        python: whose pip is used.

    Raises:
        CannotFetch: with the reason for the exit record; of pip's output, the end.
        one of `store_errors()`: the store was away for too long.
    """
    if not wheels:
        return
    folder = site.with_name(f".{site.name}.wheels")
    fetched = {str(index): uri for index, uri in enumerate(wheels)}
    for index, uri in fetched.items():
        if not Path(Source.read(f"environment.wheels.{index}", uri).path).name.endswith(".whl"):
            raise refused(f"environment.wheels.{index}", uri, "expected a file whose name ends with .whl")
    fetch_data(fetched, folder, environ, say, fetcher=fetcher)
    files = [str(path_of(index, uri, folder)) for index, uri in fetched.items()]
    fresh = site.with_name(f".{site.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    _pip([python, "-m", "pip", "--isolated", "install", *_PIP_OPTIONS, "--target", str(fresh), *files], environ)
    shutil.rmtree(site, ignore_errors=True)
    fresh.rename(site)
    say(f"environment.wheels: installed {', '.join(Path(file).name for file in files)}")


_PIP_OPTIONS = ("--no-index", "--no-deps", "--no-input", "--no-cache-dir", "--disable-pip-version-check", "--quiet")


def _pip(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        words = (done.stdout + done.stderr).decode(errors="replace").splitlines()
        end = "\n".join(words[-PIP_LINES:])
        raise CannotFetch(
            Reason.BAD_REQUEST,
            f"environment.wheels: pip could not install them (exit code {done.returncode}); the end of its words:\n"
            f"{end}\ngive wheels for this machine's python, or use an image that has the packages",
        )


def _keep_only(folder: Path, files: set[Path]) -> None:
    """Remove what an earlier attempt left, and the source has not."""
    if folder.is_symlink():
        folder.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if path in files:
                shutil.rmtree(path)
        elif path not in files:
            path.unlink()


def _link(source: Source, place: Path) -> None:
    origin = Path(source.path)
    if not origin.exists():
        raise refused(source.field, source.uri, "there is no such file or folder on this machine; correct the path")
    if not os.access(origin, os.R_OK):
        why = "this machine's user may not read it; change its permissions"
        raise CannotFetch(Reason.NOT_AUTHORIZED, f"{source.field}: {source.uri}: {why}")
    _keep_only(place, set())
    if origin.is_dir():
        if source.sha256:
            raise refused(source.field, source.uri, "a folder has no digest; leave #sha256=... out")
        if not any(origin.iterdir()):
            raise refused(source.field, source.uri, "the folder is empty; correct the path, or fill it")
        shutil.rmtree(place, ignore_errors=True)
        place.symlink_to(origin, target_is_directory=True)
        return
    place.mkdir(parents=True, exist_ok=True)
    (place / origin.name).symlink_to(origin)
    check_digest(source, origin)
