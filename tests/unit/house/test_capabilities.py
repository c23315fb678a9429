"""What pages say the package can do and was tried with is what the lists of the code, and of the tests, have."""

from __future__ import annotations

import re
from pathlib import Path

from harness.doc_tables import table
from ring_notebook.frameworks import BUILT_IN
from ring_notebook.launch.lent_places import LENDERS

ROOT = Path(__file__).parents[3]
SPELLED = {
    "torch": "PyTorch",
    "keras": "Keras",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "ray": "Ray",
    "dask": "Dask",
    "spark": "Spark",
    "k8s": "Kubernetes",
}
FRAMEWORKS = [SPELLED[framework.name] for framework in BUILT_IN]
ENGINES = [SPELLED[name] for name in LENDERS]
PROJECT = (ROOT / "pyproject.toml").read_text()
_OPTIONAL = PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
EXTRAS = set(re.findall(r"^([a-z\d]+) = \[", _OPTIONAL, re.MULTILINE))


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_comparison_names_all_frameworks_and_engines() -> None:
    rows = {row[0]: row[1] for row in table("comparison.md", "| | Ring Notebook | Horovod 0.28 |")}
    assert rows["Frameworks"] == ", ".join(FRAMEWORKS)
    assert rows["Places of other engines"] == ", ".join(ENGINES)


def test_the_page_of_engines_has_a_row_for_each() -> None:
    assert [row[0] for row in table("engines.md", "| | place of a rank |")] == ENGINES


def test_the_readme_names_all_frameworks_and_engines() -> None:
    assert [name for name in (*FRAMEWORKS, *ENGINES) if name not in page("README.md")] == []


def test_the_page_of_other_frameworks_has_a_row_for_each_face() -> None:
    faces = re.findall(
        r"`(ring_notebook\.\w+)`", "".join(row[1] for row in table("keras.md", "| In place of | import |"))
    )
    assert sorted(faces) == sorted(framework.face for framework in BUILT_IN if framework.name != "torch")


# What of the table in docs/jax.md which cases of tests/jax show.
JAX_CASES = {
    "`jit`, `scan`, `cond`, `while_loop`, `checkpoint`, `lower().compile()`": [
        "case_many_calls_of_one_program_keep_their_order",
        "case_programs_that_are_compiled_ahead_of_time",
    ],
    "`jax.export`": ["case_an_export_is_refused"],
    "`grad`, `jvp`, `linearize`, `hessian`": ["case_gradients", "case_forward_mode_and_second_derivatives"],
    "`vmap`": ["case_a_batch_is_one_collective"],
    "keys of random numbers": ["case_keys_of_random_numbers"],
    "complex numbers": ["case_complex_numbers_are_added_up_and_have_gradients"],
    "float8, float4, integers of 2 and 4 bits": ["case_every_dtype_moves"],
    "uint16, uint32, uint64": ["case_dtypes_of_one_tree_stay", "case_every_dtype_moves"],
    "several devices in a rank": [
        "case_sharded_arrays_outside_of_compiled_functions",
        "case_sharded_arrays_in_compiled_functions",
        "case_mapped_functions_reduce_each_part_with_those_of_other_ranks",
        "case_a_step_in_a_mapped_function_has_equal_weights_on_all_devices",
        "case_pmap",
    ],
    "`jax.distributed`": [
        "test_jax_distributed_beside_our_collectives",
        "case_a_rank_that_starts_another_program_is_named_at_once",
        "test_a_wait_in_jax_for_a_rank_that_does_not_come_has_a_name_and_an_end",
    ],
    "optax": [
        "case_states_of_optax",
        "case_a_distributed_optimizer_of_optax_is_of_its_type",
        "case_what_an_optimizer_decides_by_the_loss_is_the_same_on_all_ranks",
    ],
    "Equinox": ["case_equinox", "case_equinox_with_states_and_numbers"],
    "flax.linen": ["case_flax_linen"],
    "flax.nnx": ["case_flax_nnx_with_random_numbers"],
}


def test_every_row_of_the_page_of_jax_has_cases() -> None:
    assert [row[0] for row in table("jax.md", "| With | |")] == [*JAX_CASES]
    written = "".join(path.read_text() for path in (ROOT / "tests" / "jax").glob("*.py"))
    assert [name for names in JAX_CASES.values() for name in names if f"def {name}(" not in written] == []


def test_extras_are_those_of_the_page_of_installing() -> None:
    text = page("docs/install.md")
    told = {name for names in re.findall(r"ring-notebook\[([\w,]+)\]", text) for name in names.split(",")}
    assert EXTRAS - {"dev", "test"} - told - set(re.findall(r"`([a-z]+)`", text)) == set()


def tried_with(name: str) -> str:
    """The version that a page about moving from another library names."""
    return re.findall(r"\(tried with ([\d.]+)", page(f"docs/from-{name}.md"))[0]


def test_versions_that_were_tried_are_those_that_tests_install() -> None:
    installed = "".join(one.read_text() for one in ROOT.glob("tests/*/requirements.txt"))
    pins = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", installed, re.MULTILINE))
    pages = {"accelerate": "accelerate", "lightning": "lightning", "ray": "ray-train"}
    assert {library: tried_with(name) for library, name in pages.items()} == {name: pins[name] for name in pages}


def test_the_oldest_torch_and_python_are_those_of_the_package() -> None:
    text = page("docs/install.md")
    assert re.findall(r"Python ([\d.]+) or newer", text)[0] == re.findall(r'requires-python = ">=([\d.]+)', PROJECT)[0]
    assert re.findall(r"must be ([\d.]+) or newer", text)[0] == re.findall(r'"torch>=([\d.]+)', PROJECT)[0]
