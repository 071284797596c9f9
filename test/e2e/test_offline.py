"""A host without any network but its own loopback, where nothing can be fetched or asked."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from platform_under_test import BIN, Platform
from test_images import alpine


# G5
def test_a_platform_without_a_network(tmp_path: Path) -> None:
    """From an empty directory to a command's output, and back to nothing."""
    with tarfile.open(tmp_path / "alpine.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        alpine(tar)
    with Platform() as p:
        where = f"--data-dir {p.data} --run-dir {p.run}"
        script = f"""
            set -e
            ip link set lo up
            {BIN}/dsec up -d {where} --listen 127.0.0.1:{p.port} --pool-size 1g
            trap '{BIN}/dsec down --purge {where}' EXIT
            {BIN}/dsec image create alpine-like:1 --from-tar {tmp_path}/alpine.tar
            {BIN}/dsec run alpine-like:1 echo it works
        """
        command = ["unshare", "--net", "sh", "-c", script]
        done = subprocess.run(command, env=p.env, check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and "it works\n" in done.stdout, done
