"""Real schedulers for tests, in places of their own: no job, no table and no mail of the machine is touched."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]

#: $1 the daemon, $2 a crontab, $3 a folder that mails go to. Runs in a mount namespace of its own.
_IN_A_PLACE_OF_ITS_OWN = """
set -e
mount --make-rprivate /
for folder in /run /var/spool /usr/sbin /etc/cron.d; do
    [ ! -d $folder ] || mount -t tmpfs none $folder
done
[ ! -f /etc/crontab ] || mount --bind /dev/null /etc/crontab
mkdir -p /var/spool/cron/crontabs
cp "$2" /var/spool/cron/crontabs/root
chmod 600 /var/spool/cron/crontabs/root
printf '#!/bin/sh\\ncat > "%s/$$.partial" && mv "%s/$$.partial" "%s/$$.mail"\\n' "$3" "$3" "$3" > /usr/sbin/sendmail
chmod +x /usr/sbin/sendmail
exec "$1" -f
"""


class Missing(Exception):
    """A scheduler cannot be had on this machine. Where the project's own checks run, that is a failure."""


def debian_cron() -> Path:
    """Debian's cron, unpacked into ``build`` where it was not; installed is nothing.

    Raises
    ------
    Missing
        There is no Debian to take it from, or it may not run in a place of its own.
    """
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise Missing("cron in a place of its own needs root, and unshare")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        raise Missing("mount namespaces are not allowed here")
    program = ROOT / "build" / "schedulers" / "cron"
    if not program.exists():
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            raise Missing("Debian's cron comes from Debian's archive, and there is no apt-get here")
        with tempfile.TemporaryDirectory() as folder:
            unpacked = _unpacked("cron", Path(folder)) / "usr" / "sbin" / "cron"
            program.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(unpacked, program.with_suffix(".partial"))
        program.with_suffix(".partial").rename(program)
    return program


def _unpacked(package: str, folder: Path) -> Path:
    def apt_get(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["apt-get", *arguments], cwd=folder, capture_output=True, text=True, check=False
        )

    if apt_get("download", package).returncode:  # a new machine has no lists
        apt_get("update")
        again = apt_get("download", package)
        if again.returncode:
            raise Missing(f"`apt-get download {package}` failed: {again.stderr.strip()}")
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", archive, folder / "unpacked"], check=True)
    return folder / "unpacked"


@contextmanager
def running_cron(crontab: Path, mails: Path) -> Iterator["subprocess.Popen[Any]"]:
    """Cron with ``crontab`` as root's, and no other; what it mails comes as a file into ``mails``.

    At the end its jobs are waited for.
    """
    mails.mkdir()
    arguments = ["/bin/sh", "-c", _IN_A_PLACE_OF_ITS_OWN, "sh", debian_cron(), crontab, mails]
    with subprocess.Popen(
        ["unshare", "--mount", *arguments], env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL
    ) as daemon:
        try:
            yield daemon
        finally:
            jobs = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
            daemon.terminate()
            psutil.wait_procs(jobs, timeout=30)


def systemd_analyze() -> str:
    """The program that checks units, installed where that can be done.

    Raises
    ------
    Missing
        There is none.
    """
    program = shutil.which("systemd-analyze")
    if program is None and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run("apt-get update && apt-get install -y systemd", shell=True, check=True)
        program = shutil.which("systemd-analyze")
    if program is None:
        raise Missing("there is no systemd-analyze here")
    return program
