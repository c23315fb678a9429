"""TensorFlow and Keras on ranks: `make test-tensorflow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.case_jobs import cases, check

TENSORFLOW, KERAS = (Path(__file__).with_name(f"{name}_cases.py") for name in ("tensorflow", "keras"))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases(TENSORFLOW))
def test_tensorflow(case: str, size: int) -> None:
    check(TENSORFLOW, case, size)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch", "tf_keras"])
@pytest.mark.parametrize("case", cases(KERAS))
@pytest.mark.parametrize("size", [2, 3])
def test_keras(case: str, size: int, backend: str) -> None:
    if backend == "tf_keras":
        check(KERAS, case, size, TF_USE_LEGACY_KERAS="1")
    else:
        check(KERAS, case, size, KERAS_BACKEND=backend)
