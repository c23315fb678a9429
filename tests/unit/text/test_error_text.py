"""Texts of exceptions."""

from __future__ import annotations

import pytest

from ring_notebook.text.error_text import cause_text

OF_A_CALLBACK = """INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):
  File "train.py", line 11, in <module>
  File "train.py", line 6, in augment
ValueError: no such image"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError("k"), "KeyError: 'k'"),
        (ValueError(), "ValueError"),
        (RuntimeError("two\n  lines"), "RuntimeError: two lines"),
        (RuntimeError(OF_A_CALLBACK), "ValueError: no such image"),
        (RuntimeError("Traceback (most recent call last):"), "RuntimeError: Traceback (most recent call last):"),
    ],
)
def test_the_cause_is_what_a_callback_raised(error: BaseException, cause: str) -> None:
    assert cause_text(error) == cause
