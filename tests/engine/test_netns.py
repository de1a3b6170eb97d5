"""Real hosts on one machine: network namespaces with their own addresses on a bridge, which can be unplugged."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import forked
import pytest
from paths import ROOT, TOY

import growprune

pytestmark = pytest.mark.skipif("GROWPRUNE_NETNS" not in os.environ, reason="makes network namespaces: make netns")
NUM_HOSTS = 3
PORT = 29400
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class Hosts:
    """Namespaces that reach each other and nothing else: the bridge is in a namespace of its own."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def plug_in(self) -> None:
        switch = f"{self.name}-sw"
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for host in range(NUM_HOSTS):
            space = self.space(host)
            run("ip", "netns", "add", space)
            run(
                "ip", "-n", switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", space
            )
            run("ip", "-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
            run("ip", "-n", space, "address", "add", f"{address(host)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            # torchrun's own agent waits for a lost rendezvous until the system gives the connection up, in 15 minutes
            run("ip", "netns", "exec", space, "sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2")

    def space(self, host: int) -> str:
        return f"{self.name}-{host}"

    def unplug(self, host: int) -> None:
        run("ip", "-n", f"{self.name}-sw", "link", "set", f"port{host}", "down")

    def torchrun(self, *arguments: str, program: tuple[str, ...] = ("-m", "growprune")) -> None:
        """Start one process on each host, as one would by hand."""
        for host in range(NUM_HOSTS):
            shape = ("--nnodes", str(NUM_HOSTS), "--nproc-per-node", "1", "--local-addr", address(host))
            meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--rdzv-id", self.name)
            # all have the hostname of this machine, by which torchrun would know whether the endpoint is here
            hosting = ("--rdzv-conf", f"is_host={host == 0},read_timeout=5,close_timeout=5")
            command = (sys.executable, "-m", "torch.distributed.run", *shape, *meeting, *hosting, *program)
            with self.output(host).open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        ("ip", "netns", "exec", self.space(host), *command, *arguments),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
                        start_new_session=True,
                        cwd=self.folder,
                    )
                )

    def output(self, host: int) -> Path:
        return self.folder / f"host{host}.txt"

    def outputs(self) -> list[str]:
        return [self.output(host).read_text() for host in range(NUM_HOSTS)]

    def exit_codes(self) -> list[int]:
        """How the processes ended."""
        return [process.wait(forked.HANG_SECONDS) for process in self.processes]

    def remove(self) -> None:
        """End whatever still runs on these hosts, and take them away."""
        for space in (*map(self.space, range(NUM_HOSTS)), f"{self.name}-sw"):
            pids = subprocess.run(("ip", "netns", "pids", space), capture_output=True, text=True).stdout
            for pid in pids.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(("ip", "netns", "delete", space), capture_output=True)
        for process in self.processes:
            process.wait(forked.HANG_SECONDS)


def address(host: int) -> str:
    return f"10.87.0.{host + 1}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2) to make network namespaces")
    made = Hosts(f"growprune-{os.getpid()}", tmp_path)
    try:
        try:
            made.plug_in()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


def recipe_of(name: str) -> str:
    return f"{TOY}:{name}"


def events(run_folder: Path, log: str = "log.jsonl") -> list[dict[str, object]]:
    path = run_folder / log
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_three_hosts_give_the_bits_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    recipe = recipe_of("parallel")
    hosts.torchrun("train", recipe, "--out", str(tmp_path / "three"))
    one = (sys.executable, "-m", "growprune", "train", recipe, "--out", str(tmp_path / "one"))
    subprocess.run(one, check=True, capture_output=True, env=ENVIRONMENT)
    assert hosts.exit_codes() == [0] * NUM_HOSTS, hosts.outputs()
    three, alone = (tmp_path / name / "model.safetensors" for name in ("three", "one"))
    assert three.read_bytes() == alone.read_bytes()
    for log in ("log.jsonl", "log-1.jsonl", "log-2.jsonl"):
        assert [e["event"] for e in events(tmp_path / "three", log)].count("combined") == 2


@pytest.mark.parametrize(("host", "missed"), [(2, "Ranks 2 failed"), (0, "Ranks 1, 2 failed")])
def test_when_a_host_is_unplugged_mid_round_all_end_and_say_where(
    host: int, missed: str, hosts: Hosts, tmp_path: Path
) -> None:
    settings = ("--set", "timeout_seconds=10", "--set", "task.pause=0.1")
    hosts.torchrun("train", recipe_of("slow_parallel"), "--out", str(tmp_path / "run"), *settings)
    forked.wait_until(lambda: "stage 3: grow" in hosts.output(0).read_text())  # the second round
    hosts.unplug(host)
    codes = hosts.exit_codes()
    said = hosts.outputs()
    assert 0 not in codes, said
    for rank, text in enumerate(said):  # where the rendezvous is lost, torchrun may notice first, and end its process
        gave_up = rf"growprune: rank {rank} of 3 gave up in .* while waiting for the branches of stage 3"
        assert re.search(gave_up, text) or (rank > 0 and "RendezvousConnectionError" in text), text
    assert missed in said[0]
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_model_sharded_over_three_hosts_is_trained_saved_and_resumed(hosts: Hosts, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "train.py").write_text(code)
    for runs in (1, 2):
        hosts.torchrun(program=("train.py",))
        assert hosts.exit_codes() == [0] * (runs * NUM_HOSTS), hosts.outputs()
        assert growprune.manifest(tmp_path / "model.safetensors")["totals"]["prunable_nnz"] == 9832
        shutil.rmtree(tmp_path / "states" / "6")
