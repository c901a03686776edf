"""A fleet on this machine, for trying it out: one SuperLink, a SuperNode a device, TLS and a key for every node.

Plain processes on 127.0.0.1; everything lies in one folder, and everything ends with the program.
"""

import argparse
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedrolex.core import FedrolexError
from fedrolex.flower.certificates import certify, make_key
from fedrolex.slicing import exact

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing leaves this machine."""

NAME = "loopback"
PROGRAMS = Path(sys.executable).parent


class Loopback:
    """A SuperLink and its SuperNodes.

    Args:
        folder: for certificates, keys, Flower's files and logs.
        nodes: the node-config of every node.
        environment: variables for all processes.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.nodes = folder.absolute(), list(nodes)
        self.port = free_port()
        path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts its own by name
        own = {"FLWR_HOME": str(self.folder / "flwr"), "PATH": path, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
        self.environment = {**os.environ, **QUIET, **own, **(environment or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Loopback":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Make certificates and keys, then start everything."""
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        certify(self.folder)
        lines = [
            "[superlink]", f'default = "{NAME}"', f"[superlink.{NAME}]", f'address = "127.0.0.1:{self.port}"',
            f'root-certificates = "{self.folder / "ca.crt"}"',
        ]  # fmt: skip
        (self.folder / "flwr" / "config.toml").write_text("\n".join(lines) + "\n")
        self.start_superlink()
        with ThreadPoolExecutor() as registering:
            list(registering.map(self._join, range(len(self.nodes))))

    def _join(self, place: int) -> None:
        self.register(f"node{place}")
        self.start_node(place)

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it answers."""
        own = {key: str(self.folder / name) for key, name in (("cert", "server.pem"), ("key", "server.key"))}
        self._start(
            "superlink", "flower-superlink", "--ssl-ca-certfile", str(self.folder / "ca.crt"),
            "--ssl-certfile", own["cert"], "--ssl-keyfile", own["key"], "--enable-supernode-auth",
            "--database", str(self.folder / "state.db"), "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        trusted = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        ends = time.monotonic() + 60
        while time.monotonic() < ends and self.processes["superlink"].poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"https://127.0.0.1:{self.port}/health", context=trusted, timeout=2)
                return
            time.sleep(0.2)
        raise FedrolexError(f"the SuperLink did not start: see {self.log('superlink')}")

    def register(self, name: str) -> None:
        """Make a key for a node, and make it known to the SuperLink."""
        make_key(self.folder / name)
        self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), NAME)

    def start_node(self, place: int, name: str | None = None) -> None:
        """Start a SuperNode."""
        name = name or f"node{place}"
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in self.nodes[place].items())
        self._start(
            name, "flower-supernode", "--root-certificates", str(self.folder / "ca.crt"),
            "--superlink", f"127.0.0.1:{self.port}", "--auth-supernode-private-key", str(self.folder / name),
            "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def run(self, app: Path, config: Mapping[str, Any] | None = None, timeout: float = 600) -> str:
        """``flwr run`` an app until it ends; returns what it printed, raises where it fails."""
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in (config or {}).items())
        return self.flwr("run", str(app), NAME, "--stream", *(["--run-config", said] if said else []), timeout=timeout)

    def flwr(self, *words: str, timeout: float = 120) -> str:
        """A command of Flower; returns what it printed."""
        command = [str(PROGRAMS / "flwr"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=timeout)  # noqa: S603
        if done.returncode:
            raise FedrolexError(f"{' '.join(command[:3])} failed: {(done.stdout + done.stderr)[-500:]}")
        return done.stdout + done.stderr

    def kill(self, name: str) -> None:
        """Kill a process and all that it started, as a power cut would."""
        process = self.processes.pop(name)
        _kill(family(process.pid))
        process.wait()

    def stop(self) -> None:
        """End everything."""
        everyone = [each for process in self.processes.values() for each in family(process.pid)]
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        _kill(everyone)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def log(self, name: str) -> Path:
        """What a process printed."""
        return self.folder / f"{name}.log"

    def _start(self, name: str, program: str, *words: str) -> None:
        command = [str(PROGRAMS / program), *words]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(  # noqa: S603
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True, cwd=self.folder
            )


def family(process: int) -> list[int]:
    """A process and all that it started, as Linux knows them; a SuperLink's helpers have a session of their own."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [process]
    for each in found:  # which grows
        found += children.get(each, [])
    return found


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main() -> None:
    """Start a fleet, say how to use it, and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description="A SuperLink and its SuperNodes on this machine, with TLS and keys.")
    parser.add_argument("capacities", nargs="*", default=["1", "1/2", "1/4"], help="one node each; auto is measured")
    parser.add_argument("--folder", type=Path, default=Path("fleet"), help="for keys, certificates and logs")
    given = parser.parse_args()
    try:
        for capacity in given.capacities:
            if capacity != "auto":
                exact(capacity)
    except FedrolexError as error:
        parser.error(str(error))
    nodes = [{"client": place, "capacity": capacity} for place, capacity in enumerate(given.capacities)]
    with Loopback(given.folder, nodes) as fleet:
        print(f"{len(nodes)} devices are starting; their logs are {fleet.folder}/*.log. Ctrl-C ends them. Train with:")
        quiet = " ".join(f"{key}={value}" for key, value in {**QUIET, "FLWR_HOME": fleet.folder / "flwr"}.items())
        changes = f"fleet.clients={len(nodes)};fleet.cohort={len(nodes)};rounds=5"
        settings = f'set="{changes}" out="{Path("runs").absolute()}/flower"'
        print(
            f"  {quiet} {PROGRAMS / 'flwr'} run examples/flower {NAME} --stream --run-config '{settings}'", flush=True
        )
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            while all(process.poll() is None for process in fleet.processes.values()):
                time.sleep(1)
            print("a process has ended: see the logs")


if __name__ == "__main__":
    main()
