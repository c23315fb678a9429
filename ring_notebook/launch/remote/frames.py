"""What a supervisor and the agent of another host send each other: framed messages over the agent's standard streams.

A frame is its kind (1 byte), a number (4), the length of its payload (4), the payload and a newline, because srun
passes on whole lines only. The agent's first frame follows `MAGIC`: what a login shell prints before is skipped.

Where the streams are not those of ssh, both sides first introduce themselves, and all further frames are those of TLS.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from ring_notebook.analysis.job_failure import judge_silence
from ring_notebook.launch.connections.connections import Unsent
from ring_notebook.launch.remote.peer_certificate import UnprovenPeerError, Way, certificate_in, own_certificate
from ring_notebook.machine.os_calls import Wake
from ring_notebook.rank.secure_streams import Tls, own_identity, tls_context

MAGIC = b"\x00ring-agent\x00"
LONGEST = 1 << 24
"""Bytes of a payload; the largest is the environment of the job."""
_NOISE = 1 << 16  # bytes that a login shell may print before MAGIC
_HEADER = struct.Struct("!BiI")
_CAPACITY = 1 << 18
WINDOW = 1 << 20
"""Bytes of a stream on their way, besides the piece that fills the window."""


class Kind(enum.IntEnum):
    """Kinds of frames; the number of each is named in brackets."""

    HELLO = 1
    """From the agent: its versions and its host."""
    ASSIGNMENT = 2
    """To the agent: what its ranks have to run."""
    START = 3
    """To the agent: start a rank [rank]. With a payload, the ranks of host and job now, it joins running ones."""
    STARTED = 4
    """To the agent: all ranks have been started."""
    REFUSED = 5
    """From the agent: why a rank could not be started [rank]."""
    MESSAGE = 6
    """Bytes between a rank and the supervisor [rank]; empty when one side has closed."""
    EXIT = 7
    """From the agent: how a rank ended [rank]."""
    SIGNAL = 8
    """To the agent: a signal for all ranks [signal]."""
    OUTPUT = 9
    """From the agent: what ranks have printed [1: stdout, 2: stderr]."""
    INPUT = 10
    """To the agent: standard input of rank 0; empty at its end."""
    TAKEN = 11
    """So many bytes of a stream have been passed on [0: input, 1: stdout, 2: stderr]; none when its reader has gone."""
    END = 12
    """To the agent: all ranks have exited, so exit [1: and end the processes that they left]."""
    ALIVE = 13
    """From both sides, every few seconds."""
    KILL = 14
    """To the agent: kill a rank [rank]."""
    INTERRUPT = 15
    """To the agent: interrupt a rank, if it still executes what the payload names [rank]."""
    CERTIFICATE = 16
    """From both sides, first: the sender's certificate, and its proof."""
    SEALED = 17
    """Bytes of TLS, which carries frames of all other kinds."""


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    number: int
    payload: bytes


def encode(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, number, len(payload)) + payload + b"\n"


class Parser:
    """Takes a stream of bytes apart; with ``magic``, bytes before `MAGIC` are no frames."""

    def __init__(self, magic: bool) -> None:
        self.noise = b""
        """What came before MAGIC."""
        self._data = b""
        self._magic = magic

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises ValueError for what no agent sends."""
        self._data += data
        if self._magic:
            self.noise, found, rest = self._data.partition(MAGIC)
            if not found:
                if len(self._data) > _NOISE:
                    raise ValueError(f"the output of another program: {self._data[:60]!r}...")
                return
            self._data, self._magic = rest, False
        at = 0
        while len(self._data) - at >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._data, at)
            end = at + _HEADER.size + length
            if length > LONGEST:
                raise ValueError(f"a frame of {length} bytes, expected at most {LONGEST}")
            if len(self._data) <= end:
                break
            if self._data[end] != ord("\n"):
                raise ValueError("a frame without its end")
            yield Frame(Kind(kind), number, self._data[at + _HEADER.size : end])
            at = end + 1
        self._data = self._data[at:]


class _Sealed:
    """Frames within TLS, whose server is the agent. ``way`` says how both sides prove who they are."""

    def __init__(self, way: Way, agent: bool) -> None:
        self._way = way
        self._agent = agent
        self._tls: Tls | None = None  # once the other side has introduced itself
        self._waiting = b""
        self._parser = Parser(magic=False)

    @property
    def known(self) -> bool:
        return self._tls is not None and self._tls.known

    def seal(self, frame: bytes) -> bytes:
        """What to send so that the other side gets ``frame``."""
        if self._tls is None:
            self._waiting += frame
            return b""
        return _in_frames(self._tls.seal(frame))

    def open(self, outer: Frame) -> tuple[list[Frame], bytes]:
        """The frames that ``outer`` completes, and what to send back.

        Raises UnprovenPeerError where nothing proves who the other side is, ValueError for what no agent sends, and
        ssl.SSLError.
        """
        if self._tls is None and outer.kind == Kind.CERTIFICATE:
            certificate = certificate_in(outer.payload, self._way)
            context = tls_context(own_identity(), [certificate], server=self._agent)
            self._tls = Tls(context, server=self._agent)
            return [], _in_frames(self._tls.begin() + self._tls.seal(self._waiting))
        if self._tls is None and outer.kind == Kind.HELLO:  # of an older version; its reader reports that
            return [outer], b""
        if self._tls is None or outer.kind != Kind.SEALED:
            raise ValueError(f"a frame of kind {outer.kind.name} that is not encrypted")
        data, back = self._tls.open(outer.payload)
        return list(self._parser.feed(data)), _in_frames(back)


def _in_frames(sealed: bytes) -> bytes:
    pieces = (sealed[at : at + WINDOW] for at in range(0, len(sealed), WINDOW))
    return b"".join(encode(Kind.SEALED, payload=piece) for piece in pieces)


class FrameStream:
    """Frames over two descriptors, neither of which ever blocks. Any thread may send.

    ``way`` says how they are protected; ``agent`` that this process is the agent.
    """

    def __init__(self, source: int, sink: int, way: Way, *, agent: bool) -> None:
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._parser = Parser(magic=not agent)
        self._sealed = None if way == "plain" else _Sealed(way, agent)
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()
        self._unsent = bytearray(MAGIC if agent else b"")
        self._wake = Wake()
        self._selector: selectors.BaseSelector | None = None
        self._waits_to_write = False
        self._heard = self._spoke = time.monotonic()
        if self._sealed is not None:
            self._unsent += encode(Kind.CERTIFICATE, payload=own_certificate(way))

    def watch(
        self, selector: selectors.BaseSelector, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> None:
        """Have ``selector``, whose keys carry functions to call, deliver frames.

        ``on_end`` takes why there are no more: nothing when the other side has closed the stream.
        """
        self._selector = selector
        self._on_frame = on_frame
        self._on_end = on_end
        selector.register(self._source, selectors.EVENT_READ, self._read)
        selector.register(self._wake, selectors.EVENT_READ, self._arm)
        self._arm()

    def unwatch(self) -> None:
        """Deliver no frames until `watch` is called again."""
        if self._selector is not None:
            for descriptor in (self._source, self._wake.fileno(), *([self._sink] if self._waits_to_write else [])):
                self._selector.unregister(descriptor)
            self._selector = None
            self._waits_to_write = False

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Send a frame, later when the other side does not read."""
        frame = encode(kind, number, payload)
        with self._lock:
            self._unsent += frame if self._sealed is None else self._sealed.seal(frame)
            self._write()
            if self._unsent:
                self.wake()

    def check(self, silence: float) -> str:
        """Send a sign of life when one is due. Returns why the other side is lost, if silent for so many seconds.

        It is not lost while bytes from it are unread: this process may have been busy for longer.
        """
        now = time.monotonic()
        lost, speaks = judge_silence(self._heard, self._spoke, now, silence)
        if speaks:
            self._spoke = now
            self.send(Kind.ALIVE)
        return "" if lost and self._has_unread else lost

    @property
    def _has_unread(self) -> bool:
        """Whether bytes of the other side, or its end, wait to be read."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        return bool(poll.poll(0))

    def wake(self) -> None:
        self._wake.set()

    @property
    def known(self) -> bool:
        """Whether the other side has proven who it is, or ssh has for it."""
        return self._sealed is None or self._sealed.known

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    del self._unsent[: os.write(self._sink, self._unsent[:_CAPACITY])]
            except BrokenPipeError:  # the end of the other direction says so
                self._unsent.clear()

    def _arm(self) -> None:
        """Wait until the other side takes what is unsent, if anything is."""
        self._wake.clear()
        if self._selector is None:
            return
        with self._lock:
            self._write()
            waits = bool(self._unsent)
        if waits and not self._waits_to_write:
            self._selector.register(self._sink, selectors.EVENT_WRITE, self._arm)
        elif self._waits_to_write and not waits:
            self._selector.unregister(self._sink)
        self._waits_to_write = waits

    def _read(self) -> None:
        try:
            data = os.read(self._source, _CAPACITY)
        except BlockingIOError:
            return
        except OSError as error:
            self._stop(str(error.strerror))
            return
        try:
            for outer in self._parser.feed(data):
                self._heard = time.monotonic()
                for frame in [outer] if self._sealed is None else self._open(self._sealed, outer):
                    if self._selector is None:  # a frame before has ended it
                        return
                    self._on_frame(frame)
        except UnprovenPeerError as error:
            self._stop(str(error))
            return
        except (ValueError, KeyError, TypeError, RecursionError, ssl.SSLError) as error:
            self._stop(f"it sent what no agent sends: {error}")
            return
        if not data:
            self._stop("")

    def _open(self, sealed: _Sealed, outer: Frame) -> list[Frame]:
        """The frames that ``outer`` completes."""
        with self._lock:
            frames, back = sealed.open(outer)
            self._unsent += back
        self.wake()  # frames may have waited until the other side is known
        return frames

    def _stop(self, why: str) -> None:
        if self._selector is not None:
            self.unwatch()
            self._on_end(why)


def take_streams() -> tuple[int, int]:
    """Descriptors of standard input and output, for frames alone: what this process prints goes to standard error."""
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return source, sink


class Dialogue:
    """Texts between this process and one on another host, in frames of kind HELLO; the arguments of `FrameStream`."""

    def __init__(self, source: int, sink: int, way: Way, *, agent: bool) -> None:
        self._stream = FrameStream(source, sink, way, agent=agent)
        self._selector = selectors.DefaultSelector()
        self._heard: list[str] = []
        self._ended: str | None = None
        self._stream.watch(self._selector, lambda frame: self._heard.append(frame.payload.decode()), self._end)

    def _end(self, why: str) -> None:
        self._ended = why

    def say(self, text: str) -> None:
        """Send ``text``, before `hear` or `close` returns."""
        self._stream.send(Kind.HELLO, payload=text.encode())

    def hear(self, seconds: float = inf) -> str:
        """The next text of the other side. Raises EOFError, with a reason if known, when none comes in time."""
        until = time.monotonic() + seconds
        while not self._heard:
            if self._ended is not None:
                raise EOFError(self._ended)
            if (left := until - time.monotonic()) <= 0:
                raise EOFError(f"no answer within {seconds:g} s")
            for key, _ in self._selector.select(None if left == inf else left):
                key.data()
        return self._heard.pop(0)

    def close(self) -> None:
        """Return when the other side has taken everything, or has gone."""
        while self._stream.unsent and self._ended is None:
            for key, _ in self._selector.select():
                key.data()
        self._stream.unwatch()
        self._selector.close()


class Channels:
    """Sockets of ranks, whose bytes cross in frames of kind MESSAGE both ways."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._sockets: dict[int, socket.socket] = {}
        self._unsent = Unsent()

    def add(self, rank: int, channel: socket.socket, selector: selectors.BaseSelector) -> None:
        """Pass on what comes from ``channel``, which `selector` watches from now on."""
        self.close(rank)
        channel.setblocking(False)
        self._sockets[rank] = channel
        self._selector = selector
        selector.register(channel, selectors.EVENT_READ, lambda: self._serve(rank))

    def _serve(self, rank: int) -> None:
        self._send(rank)
        self.pass_on(rank)

    def _send(self, rank: int, data: bytes = b"") -> None:
        channel = self._sockets[rank]
        self._unsent.send(rank, channel, data)
        key = self._selector.get_key(channel)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank in self._unsent else 0)
        if key.events != events:
            self._selector.modify(channel, events, key.data)

    def pass_on(self, rank: int) -> bool:
        """Send a frame with what has come from the socket of ``rank``. Returns whether there was something."""
        if rank not in self._sockets:
            return False
        try:
            data = self._sockets[rank].recv(_CAPACITY)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._stream.send(Kind.MESSAGE, rank, data)
        if not data:
            self.close(rank)
        return bool(data)

    def take(self, rank: int, data: bytes) -> None:
        """A frame has come; one without ``data`` is the end."""
        if rank in self._sockets and data:
            self._send(rank, data)
        else:
            self.close(rank)

    def close(self, rank: int) -> None:
        """Pass nothing on for ``rank`` any more."""
        self._unsent.pop(rank, None)
        if channel := self._sockets.pop(rank, None):
            self._selector.unregister(channel)
            channel.close()


class Window:
    """The sending side: `take` waits while too much is on its way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._on_the_way = 0
        self._closed = False

    def take(self, size: int) -> None:
        """``size`` bytes are about to be sent. Raises BrokenPipeError when nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._on_the_way < WINDOW or self._closed)
            if self._closed:
                raise BrokenPipeError("the reader of the output has gone")
            self._on_the_way += size

    def give(self, size: int) -> None:
        """The other side has passed ``size`` bytes on."""
        with self._changed:
            self._on_the_way -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody reads any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Inlet(threading.Thread):
    """The receiving side: passes pieces on to ``sink``, which may block, and tells ``taken`` how much it has taken.

    ``taken`` gets 0, once, when the sink raises OSError: its reader has gone. ``end`` is called after the last piece.
    """

    def __init__(
        self, sink: Callable[[bytes], object], taken: Callable[[int], object], end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(name="ring-inlet", daemon=True)
        self._sink = sink
        self._taken = taken
        self._end = end
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.start()

    def put(self, piece: bytes) -> None:
        """The next piece; an empty one is the end."""
        self._pieces.put(piece)

    def run(self) -> None:
        open_ = True
        while piece := self._pieces.get():
            try:
                if open_:
                    self._sink(piece)
                    self._taken(len(piece))
            except OSError:
                open_ = False
                self._taken(0)
        self._end()
