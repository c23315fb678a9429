"""Functions that are sent to ranks."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

from ring_notebook.protocol.sent_functions import dumps


def test_they_are_of_their_files_there() -> None:
    """Also one within: a traceback shows its line, and TensorFlow's AutoGraph reads it."""

    def outer() -> Callable[[], int]:
        def inner() -> int:
            return 1 // 0

        return inner

    sent = pickle.loads(dumps({"function": outer}))["function"]
    assert sent is not outer
    for one in (sent, sent()):
        assert one.__code__.co_filename == __file__
    assert inspect.getsource(sent) == inspect.getsource(outer)
