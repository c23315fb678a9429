"""Whatever bytes arrive between a supervisor and an agent, they are frames or a ValueError that says what is wrong."""

from __future__ import annotations

import random

import pytest

from ring_notebook.launch.remote.frames import LONGEST, MAGIC, Frame, Kind, Parser, encode

SEEDS = range(300)


def some_frames(dice: random.Random) -> list[Frame]:
    return [
        Frame(dice.choice(list(Kind)), dice.randrange(-5, 100), dice.randbytes(dice.choice((0, 1, 30, 5000))))
        for _ in range(dice.randrange(1, 8))
    ]


def fed(parser: Parser, data: bytes, dice: random.Random) -> list[Frame]:
    found = []
    while data:
        size = dice.randrange(1, 4000)
        found += list(parser.feed(data[:size]))
        data = data[size:]
    return found


@pytest.mark.parametrize("magic", [True, False])
def test_frames_come_out_whole_in_whatever_pieces_they_arrive(magic: bool) -> None:
    for seed in SEEDS:
        dice = random.Random(seed)
        frames = some_frames(dice)
        noise = b"Welcome!\n" * dice.randrange(3) + MAGIC if magic else b""
        parser = Parser(magic)
        assert fed(parser, noise + b"".join(encode(*frame) for frame in frames), dice) == frames
        assert parser.noise == (noise.removesuffix(MAGIC) if magic else b"")


def test_damaged_bytes_are_frames_or_an_error() -> None:
    errors = 0
    for seed in SEEDS:
        dice = random.Random(seed)
        data = bytearray(b"".join(encode(*frame) for frame in some_frames(dice)))
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            for frame in fed(Parser(magic=False), bytes(data), dice):
                assert isinstance(frame.kind, Kind)
                assert len(frame.payload) <= LONGEST
        except ValueError:
            errors += 1
    assert errors, "no damage is noticed"


def test_no_length_makes_a_parser_wait_for_ever() -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes, expected at most"):
        list(Parser(magic=False).feed(b"\x09" + b"\xff" * 8))
    with pytest.raises(ValueError, match="the output of another program"):
        list(Parser(magic=True).feed(b"\n" * (1 << 17)))
