"""A network of its own for a worker: a namespace behind a wire that delays, loses and is cut.

Two TUN devices, one in the namespace, and a thread that carries packets between them: it works
where the kernel has no netem.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
HERE, THERE = "10.77.41.1", "10.77.41.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def open_tun(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return handle


@dataclass
class Wire:
    """Carries packets both ways.

    Attributes:
      near, far: names of its devices, here and in the namespace.
      delay: seconds one way; loss: share of the packets that are dropped.
      cut: nothing passes.
      carried, lost: packets.
    """

    near: str
    far: str
    delay: float = 0.0
    loss: float = 0.0
    cut: bool = False
    carried: int = 0
    lost: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def carry(self, ends: tuple[int, int]) -> None:
        chance = random.Random(0)
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._stop.is_set():
            pause = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for end in select.select(ends, [], [], pause)[0]:
                packet = os.read(end, 65536)
                if self.cut or chance.random() < self.loss:
                    self.lost += 1
                    continue
                number += 1
                other = ends[1] if end == ends[0] else ends[0]
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(waiting)
                self.carried += 1
                with contextlib.suppress(BlockingIOError):
                    os.write(other, packet)


def available() -> bool:
    """Whether this process may make namespaces and devices."""
    return os.geteuid() == 0 and os.path.exists("/dev/net/tun")


@contextlib.contextmanager
def namespace(delay: float, loss: float) -> Iterator[tuple[str, Wire]]:
    """A namespace whose only way out is the wire; workers there listen at `THERE`."""
    name = f"ds41jax-{os.getpid()}"
    near, far = f"dsa{os.getpid() % 100000}", f"dsb{os.getpid() % 100000}"
    wire = Wire(near, far, delay, loss)
    ends = open_tun(near), open_tun(far)
    thread = threading.Thread(target=wire.carry, args=(ends,))
    try:
        ip("netns", "add", name)
        ip("link", "set", far, "netns", name)
        ip("address", "add", HERE, "peer", THERE, "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "address", "add", THERE, "peer", HERE, "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        thread.start()
        yield name, wire
    finally:
        wire._stop.set()
        if thread.is_alive():
            thread.join()
        for end in ends:
            os.close(end)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
