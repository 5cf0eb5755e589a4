"""Machines that are namespaces: each has its own network, pids, /dev/shm and host name.

    with Cluster(nodes=2, ranks=4) as cluster:
        cluster.start(fn)                # fn(world) in every rank, as under torchrun --nnodes 2
        results = cluster.results()      # by rank: what fn returned, or the exception

The machines hang on a bridge in a namespace of its own, by veth pairs; `rate` limits them (tc tbf).
With a relay they have TUN devices instead, and a process here carries every packet, after a delay,
or resets connections.
Nothing is left when the processes are gone. Processes are forked: torch is imported once.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sundog

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 1 << 30
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_PR_SET_PDEATHSIG = 1
_PORT = 29400

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why machines can't be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun, which the relay of a slow network needs"
    reason = _in_child(_try_machine)
    if reason:
        return f"namespaces are forbidden here ({reason})"
    probe = "ip link add veth0 type veth peer name veth1 && ip link add bridge0 type bridge"
    reason = _in_child(partial(_try_network, probe))
    return f"no veth pairs or bridges here ({reason})" if reason else ""


def _try_network(probe: str) -> None:
    _unshare(_CLONE_NEWNET)
    _command(["sh", "-c", probe])


def _wait_apart() -> None:
    """Be a network namespace, until killed."""
    _unshare(_CLONE_NEWNET)
    signal.pause()


def _try_machine() -> None:
    """Do what the process of a machine does first."""
    _unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWPID | _CLONE_NEWNET)
    reason = _in_child(_own_mounts)  # the first process of the new pid namespace
    if reason:
        raise OSError(reason)


def _in_child(call: Callable[[], Any]) -> str:
    """Call it in a forked process; return the error that it raises."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except BaseException as error:
            os.write(write, str(error).strip().encode() or b"failed")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")


def _own_mounts() -> None:
    """Give the first process of a machine its own /proc and /dev/shm."""
    assert _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    _mount("proc", "/proc")
    _mount("tmpfs", "/dev/shm")


def _mount(kind: str, where: str, flags: int = 0) -> None:
    if _libc.mount(kind.encode(), where.encode(), kind.encode(), flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind} on {where}")


def _command(words: list[str], given: str = "") -> str:
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Machine:
    """A namespace: `outside` is the process that made it, `init` its process 1."""

    number: int
    outside: int = 0
    init: int = 0  # as seen from here
    order: int = -1  # a pipe: what its ranks shall run; its end ends them
    pids: list[int] = field(default_factory=list)  # of its ranks, as seen from here
    tun: int = -1

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"


class Cluster:
    """Several machines with as many ranks each."""

    def __init__(
        self, nodes: int, ranks: int, rate: str = "", relay: bool = False, timeout: float = 30
    ) -> None:
        self.nodes, self.ranks, self.timeout = nodes, ranks, timeout
        self._rate, self._is_relayed = rate, relay
        self.machines = [Machine(n) for n in range(nodes)]
        self._answers: dict[int, int] = {}  # a pipe by rank
        self._switch = 0
        self.relay = Relay()
        self._told, self._tell = os.pipe()  # a byte from each rank that calls `tell`
        Cluster._current = self

    _current: Cluster

    @staticmethod
    def tell() -> None:
        """In a rank: tell the test that it has come here. Not over the network."""
        os.write(Cluster._current._tell, b"x")

    def wait_until_told(self, limit: float = 60) -> None:
        """Until all ranks have called `tell`."""
        deadline = time.monotonic() + limit
        for _ in range(self.nodes * self.ranks):
            left = deadline - time.monotonic()
            assert select.select([self._told], [], [], max(left, 0))[0], (
                f"a rank is late: {limit} s"
            )
            os.read(self._told, 1)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.relay.stop()
        for pid in [*(m.init for m in self.machines), *(m.outside for m in self.machines)]:
            _kill(pid)
        _kill(self._switch)
        for pid in [*(m.outside for m in self.machines), self._switch]:
            if pid:
                os.waitpid(pid, 0)
        pipes = [*self._answers.values(), self._told, self._tell]
        for fd in [*pipes, *(m.tun for m in self.machines)]:
            if fd >= 0:
                os.close(fd)

    # running

    def start(self, fn: Callable[[Any], Any]) -> None:
        """Make the machines and start fn(world) on every rank."""
        if not self._is_relayed:
            self._switch = _forked(_wait_apart)[0]
            _wait_for(lambda: _net_of(self._switch) != _net_of(os.getpid()))
            self._in(self._switch, "link add bridge0 type bridge", "link set bridge0 up")
        gates = [self._open(machine, fn) for machine in self.machines]
        for gate in gates:
            os.write(gate, b"go")
            os.close(gate)

    def _open(self, machine: Machine, fn: Callable[[Any], Any]) -> int:
        """Make a machine, whose ranks wait until the pipe that this returns says go."""
        ours, theirs = socket.socketpair()
        gate = os.pipe()
        pipes = {machine.number * self.ranks + i: os.pipe() for i in range(self.ranks)}
        body = _Body(self, machine, fn, theirs, gate[0], pipes)
        machine.outside = _forked(body.run)[0]
        theirs.close()
        os.close(gate[0])
        for rank, (read, write) in pipes.items():
            os.close(write)
            self._answers[rank] = read
        data, fds, _, _ = socket.recv_fds(ours, 4, 1)
        assert data == b"here", "the machine could not be made"
        if fds:
            machine.tun = fds[0]
            self.relay.ports[machine.address] = fds[0]
        machine.init = _child_of(machine.outside)
        if not self._is_relayed:
            self._join(machine)
        ours.close()
        return gate[1]

    def _join(self, machine: Machine) -> None:
        port = f"port{machine.number}"
        _command(["nsenter", "-t", str(self._switch), "-n", "ip", "link", "add", port, "type",
                  "veth", "peer", "name", "eth0", "netns", str(machine.outside)])  # fmt: skip
        self._in(self._switch, f"link set {port} master bridge0", f"link set {port} up")
        self._in(
            machine.outside,
            "link set lo up",
            f"addr add {machine.address}/24 dev eth0",
            "link set eth0 up",
        )
        if self._rate:
            limit = f"qdisc add dev eth0 root tbf rate {self._rate} burst 64kb latency 400ms"
            _command(["nsenter", "-t", str(machine.outside), "-n", "tc", *limit.split()])

    def _in(self, pid: int, *lines: str) -> None:
        _command(["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"], "\n".join(lines) + "\n")

    def results(self, among: set[int] | None = None, limit: float = 60) -> dict[int, Any]:
        """Answers of these ranks (default: all); None of one that ended without an answer."""
        waiting = {self._answers[r]: r for r in (among or self._answers)}
        found: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        parts: dict[int, bytes] = {fd: b"" for fd in waiting}
        while waiting:
            left = deadline - time.monotonic()
            assert left > 0, f"rank {sorted(waiting.values())} did not answer in {limit} s"
            for fd in select.select(list(waiting), [], [], left)[0]:
                data = os.read(fd, 1 << 20)
                parts[fd] += data
                if not data:
                    whole = parts[fd]
                    found[waiting.pop(fd)] = pickle.loads(whole) if whole else None
        return found

    # what happens to machines

    def kill_rank(self, rank: int) -> None:
        node, local = divmod(rank, self.ranks)
        pids = _children_of(self.machines[node].init)
        os.kill(pids[local], signal.SIGKILL)

    def kill_machine(self, node: int) -> None:
        """Its processes end; its network still answers that they are gone."""
        _kill(self.machines[node].init)

    def cut_off(self, node: int) -> None:
        """No packet reaches it or leaves it any more; then its processes end."""
        self._in(self._switch, f"link set port{node} down")
        self.kill_machine(node)


@dataclass
class _Body:
    """What runs in a machine."""

    cluster: Cluster
    machine: Machine
    fn: Callable[[Any], Any]
    told: socket.socket
    gate: int
    pipes: dict[int, tuple[int, int]]

    def run(self) -> None:
        _unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWPID | _CLONE_NEWNET)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            os._exit(0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        assert os.getpid() == 1
        _own_mounts()
        self._name_hosts()
        socket.sethostname(f"machine{self.machine.number}")
        fds = [_tun(self.machine.address)] if self.cluster._is_relayed else []
        socket.send_fds(self.told, [b"here"], fds)
        assert os.read(self.gate, 2) == b"go"
        for rank in self.pipes:
            _forked(partial(self._rank, rank))
        for _ in self.pipes:
            os.wait()

    def _name_hosts(self) -> None:
        """So that nobody asks a name server, which can't be reached: torch's store would."""
        lines = [f"{m.address} machine{m.number}\n" for m in self.cluster.machines]
        texts = {"/etc/hosts": "127.0.0.1 localhost\n" + "".join(lines), "/etc/resolv.conf": ""}
        path = Path("/dev/shm/text")
        for place, text in texts.items():
            path.write_text(text)
            assert _libc.mount(bytes(path), place.encode(), None, _MS_BIND, None) == 0
            path.unlink()

    def _rank(self, rank: int) -> None:
        for other, pipe in self.pipes.items():
            if other != rank:
                os.close(pipe[1])  # else it would not end with its rank
        try:
            answer = self._answer(rank)
        except BaseException as error:
            if error.__traceback__ is not None:
                traceback.clear_frames(error.__traceback__)
            answer = error
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps(RuntimeError(repr(answer)))
        while data:
            data = data[os.write(self.pipes[rank][1], data) :]
        os._exit(0)  # at once: gloo's threads may wait for machines that are gone

    def _answer(self, rank: int) -> Any:
        cluster = self.cluster
        os.environ["GLOO_SOCKET_IFNAME"] = "tun0" if cluster._is_relayed else "eth0"
        platform._uname_cache = None  # type: ignore[attr-defined]  # of another machine
        torch.set_num_threads(1)
        # Below sundog's: a group that can't be made must not hide who is missing.
        limit = timedelta(seconds=2 * cluster.timeout)
        store = dist.TCPStore(
            cluster.machines[0].address,
            _PORT,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
        )
        size = cluster.nodes * cluster.ranks
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        world = sundog.init("shm", timeout=cluster.timeout)
        with world:
            return self.fn(world)


def sent_bytes() -> int:
    """What this machine's interface has sent; asked inside it."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


class Relay:
    """Carries packets between TUN devices, each after `delay` seconds, in a process of its own."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}  # by address
        self._pid = 0

    def start(self, delay: float, resets: bool = False) -> None:
        """Carry from here on. With `resets` every connection that is open now is reset, once."""
        self.stop()
        self._pid = _forked(lambda: self._carry(delay, resets))[0]

    def stop(self) -> None:
        if self._pid:
            _kill(self._pid)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _carry(self, delay: float, resets: bool) -> None:
        queue: list[tuple[float, bytes]] = []  # in the order of arrival, which is that of the times
        kept: set[tuple[bytes, bytes]] = set()  # connections that began after the reset
        while True:
            left = max(queue[0][0] - time.monotonic(), 0) if queue else None
            for fd in select.select(list(self.ports.values()), [], [], left)[0]:
                packet = os.read(fd, 65536)
                if resets and _is_older(packet, kept):
                    for reset in _resets(packet):
                        self._deliver(reset)
                else:
                    queue.append((time.monotonic() + delay, packet))
            while queue and queue[0][0] <= time.monotonic():
                self._deliver(queue.pop(0)[1])

    def _deliver(self, packet: bytes) -> None:
        to = self.ports.get(socket.inet_ntoa(packet[16:20])) if len(packet) >= 20 else None
        if to is not None:
            os.write(to, packet)


_TCP, _SYN, _RST = 6, 2, 4


def _is_older(packet: bytes, kept: set[tuple[bytes, bytes]]) -> bool:
    """Whether a packet is of a TCP connection whose begin was not seen."""
    if len(packet) < 40 or packet[0] != 0x45 or packet[9] != _TCP:
        return False
    ends = packet[12:16] + packet[20:22], packet[16:20] + packet[22:24]
    key = min(ends), max(ends)
    if packet[33] & _SYN:
        kept.add(key)
    return key not in kept and not packet[33] & _RST


def _resets(packet: bytes) -> Iterator[bytes]:
    """A reset for each end, at the place in the stream that it expects next."""
    source, target, ports = packet[12:16], packet[16:20], packet[20:24]
    place, due = packet[24:28], packet[28:32]
    yield _reset(source, target, ports, place)
    yield _reset(target, source, ports[2:] + ports[:2], due)


def _reset(source: bytes, target: bytes, ports: bytes, place: bytes) -> bytes:
    def segment(check: int) -> bytes:
        return ports + place + struct.pack("!IBBHHH", 0, 5 << 4, _RST, 0, check, 0)

    def header(check: int) -> bytes:
        return struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, _TCP, check) + source + target

    pseudo = source + target + struct.pack("!HH", _TCP, 20)
    return header(_checksum(header(0))) + segment(_checksum(pseudo + segment(0)))


def _checksum(data: bytes) -> int:
    """The Internet's: the complement of the sum of 16-bit words, with the carry added."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _tun(address: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
    lines = ["link set lo up", f"addr add {address}/24 dev tun0", "link set tun0 up"]
    _command(["ip", "-batch", "-"], "\n".join(lines) + "\n")
    return fd


def _forked(body: Callable[[], Any]) -> tuple[int]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if parent != 1 and os.getppid() != parent:
                os._exit(1)
            body()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return (pid,)


def _kill(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    text = _command(["cat", f"/proc/{pid}/task/{pid}/children"])
    return [int(each) for each in text.split()]


def _child_of(pid: int) -> int:
    _wait_for(lambda: len(_children_of(pid)) == 1)
    return _children_of(pid)[0]


def _net_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_there():
        assert time.monotonic() < deadline, "a process did not get ready in 30 s"
        time.sleep(1e-3)
