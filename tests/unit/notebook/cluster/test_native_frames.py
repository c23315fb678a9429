"""Native calls that the core has written, as those of interest to a user."""

from __future__ import annotations

from ring_notebook.notebook.cluster.stacks import NativeFrame, parse_native

WRITTEN = """a line that the cell has printed
Native stack (most recent call first):
  clock_nanosleep of /lib/x86_64-linux-gnu/libc.so.6
  sleep of /lib/x86_64-linux-gnu/libc.so.6
  ? of /usr/lib of ours/libffi.so.8
  ? of /usr/lib of ours/libffi.so.8
  std::vector<int> sum(long) of /usr/lib of ours/libffi.so.8
  ? of /usr/bin/python3
  long_pow of /usr/bin/python3
  _PyObject_MakeTpCall of /usr/bin/python3
  PyObject_Vectorcall of /usr/bin/python3
  _PyEval_EvalFrameDefault of /usr/bin/python3
  sleep of /outside.so
End of native stack
"""


def test_calls_within_the_innermost_of_python() -> None:
    assert parse_native(WRITTEN) == (
        NativeFrame("long_pow", "python3"),
        NativeFrame("std::vector<int> sum(long)", "libffi.so.8"),
        NativeFrame("", "libffi.so.8"),
        NativeFrame("sleep", "libc.so.6"),
        NativeFrame("clock_nanosleep", "libc.so.6"),
    )


def test_an_unfinished_stack_is_told_from_python_alone() -> None:
    lines = WRITTEN.splitlines(keepends=True)
    for end in range(len(lines)):
        assert parse_native("".join(lines[:end])) is None
    assert parse_native(lines[1] + "  _PyEval_EvalFrameDefault of /usr/bin/python3\n" + lines[-1]) == ()


def test_what_cannot_be_followed_to_python_is_shown_as_far_as_it_goes() -> None:
    assert parse_native("Native stack (most recent call first):\n  ? of ?\nEnd of native stack\n") == (
        NativeFrame("", "?"),
    )


def test_long_names_are_cut() -> None:
    frame = NativeFrame("f", "a.so")
    assert str(frame) == "native, in f of a.so"
    assert str(NativeFrame("", "a.so")) == "native, in a.so"
    written = f"Native stack (most recent call first):\n  {'f' * 500} of /a.so\nEnd of native stack\n"
    (cut,) = parse_native(written) or ()
    assert cut.function == "f" * 119 + "…"
