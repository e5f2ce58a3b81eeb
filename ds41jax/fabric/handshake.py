"""The control connection: one JSON line each way, then a heartbeat until either side ends.

Rows never travel here. Every line is bounded and every wait has an end; whatever does not fit is
an error that names the field.
"""

import base64
import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

MAX_LINE = 64 << 10
PROTOCOL = 3
HEARTBEAT = b"ping\n"


class HandshakeError(RuntimeError):
    """The other side is not what it should be; the message names what differs."""


@dataclass(frozen=True)
class Identity:
    """What both ends must have in common.

    Attributes:
      engine: version of ds41jax.
      model: see `identity.model_revision`.
      topology: name; placement: its version, in hexadecimal.
      rank: of the worker.
    """

    engine: str
    model: str
    topology: str
    placement: str
    rank: int

    def check(self, other: dict[str, Any]) -> None:
        """Raises `HandshakeError` naming the first field in which the other end differs."""
        for name, mine in asdict(self).items():
            theirs = other.get(name)
            if theirs != mine or type(theirs) is not type(mine):
                raise HandshakeError(f"{name} is {mine!r} here and {repr(theirs)[:80]} there")


@dataclass(frozen=True)
class Hello:
    """A coordinator's first line: who it is, how many rows its frames have, where to answer."""

    identity: Identity
    rows: int
    address: bytes

    def to_json(self) -> dict[str, Any]:
        address = base64.b64encode(self.address).decode()
        return {
            "protocol": PROTOCOL,
            **asdict(self.identity),
            "rows": self.rows,
            "address": address,
        }


def check_hello(message: dict[str, Any], identity: Identity, most_rows: int) -> tuple[int, bytes]:
    """Rows and transport address of a coordinator that belongs to this worker.

    Raises:
      HandshakeError: naming the field that is wrong.
    """
    if message.get("protocol") != PROTOCOL:
        raise HandshakeError(f"protocol is {PROTOCOL} here, {message.get('protocol')!r} there")
    identity.check(message)
    rows = message.get("rows")
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= most_rows:
        raise HandshakeError(
            f"rows must be 1 to {most_rows} (start the worker with a larger --rows), not {rows!r}"
        )
    return rows, decode_address(message)


def decode_address(message: dict[str, Any]) -> bytes:
    """The transport address in a line."""
    try:
        address = base64.b64decode(message.get("address", ""), validate=True)
    except (ValueError, TypeError) as error:
        raise HandshakeError("address is no base64") from error
    if not 16 <= len(address) <= MAX_LINE // 4:
        raise HandshakeError(f"address has {len(address)} bytes, which is no transport's address")
    return address


def check_reply(message: dict[str, Any]) -> tuple[int, bytes]:
    """Token and transport address in a worker's reply.

    Raises:
      HandshakeError: with the worker's reason, or naming the field that is wrong.
    """
    if "error" in message:
        raise HandshakeError(f"refused: {str(message['error'])[:500]}")
    token = message.get("token")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 < token < 1 << 64:
        raise HandshakeError(f"token must be a positive 64-bit number, not {str(token)[:40]!r}")
    return token, decode_address(message)


def reply(token: int, address: bytes) -> dict[str, Any]:
    """A worker's line that lets a coordinator in."""
    return {"token": token, "address": base64.b64encode(address).decode()}


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> bytes:
    """One line without its end. Raises `HandshakeError` if it is too long or the peer left."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = connection.recv(1 if line else MAX_LINE, socket.MSG_PEEK)
        if not piece:
            raise HandshakeError("the other side closed the connection")
        end = piece.find(b"\n")
        line += connection.recv(len(piece) if end < 0 else end + 1)
        if len(line) > MAX_LINE:
            raise HandshakeError(f"a line of more than {MAX_LINE} bytes")
    return bytes(line[:-1])


def read_message(connection: socket.socket) -> dict[str, Any]:
    """One JSON object. Raises `HandshakeError` for anything else."""
    line = read_line(connection)
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HandshakeError(f"no JSON: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise HandshakeError("a line that is no JSON object")
    return message


def set_options(connection: socket.socket, seconds: float) -> None:
    """A bound on every wait, and no delay of small lines."""
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "HOST:PORT" as a pair. Raises `ValueError` saying what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"a worker's address must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)
