"""What the core declares of CUDA and NCCL by hand, against NVIDIA's headers: functions, layouts and numbers."""

from __future__ import annotations

import re
from pathlib import Path

from harness.programs import ran

NATIVE = Path(__file__).parents[2] / "native"

# Whether a call through the one declaration passes what the other one takes.
ALIKE = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
template <class A> constexpr int kind() {
    return std::is_pointer_v<A> ? 1 : std::is_integral_v<A> || std::is_enum_v<A> ? 2 : std::is_class_v<A> ? 3 : 4;
}
template <class A, class B> struct Passed {
    static constexpr bool value = kind<A>() == kind<B>() && sizeof(A) == sizeof(B);
};
template <class... A> struct List {};
template <class A, class B> struct All : std::false_type {};
template <> struct All<List<>, List<>> : std::true_type {};
template <class A, class... As, class B, class... Bs> struct All<List<A, As...>, List<B, Bs...>>
    : std::bool_constant<Passed<A, B>::value && All<List<As...>, List<Bs...>>::value> {};
template <class A, class B> struct Alike : std::false_type {};
template <class R, class... A, class S, class... B> struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<Passed<R, S>::value && All<List<A...>, List<B...>>::value> {};
int failed = 0;
void same(long own, long theirs, const char* what) {
    if (own == theirs) return;
    std::printf("%s: %ld here, %ld there\\n", what, own, theirs);
    failed = 1;
}
#define SAME(own, theirs) same(static_cast<long>(own), static_cast<long>(theirs), #own " and " #theirs)
"""

# NCCL's header wants the runtime's, of which it uses the name of a stream.
RUNTIME = "typedef struct CUstream_st* cudaStream_t;\n"

CUDA = """
    SAME(sizeof(ring::DeviceUuid), sizeof(CUuuid));
    SAME(ring::Driver::kNotReady, CUDA_ERROR_NOT_READY);
    SAME(ring::Driver::kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    SAME(ring::kNonBlocking, CU_STREAM_NON_BLOCKING);
    SAME(ring::kWithoutTiming, CU_EVENT_DISABLE_TIMING);
    SAME(ring::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
"""

NCCL = """
    const ring::NcclConfig own;
    ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    SAME(sizeof(ring::NcclId), sizeof(ncclUniqueId));
    SAME(own.size <= theirs.size, true);
    SAME(own.magic, theirs.magic);
    SAME(own.version <= theirs.version, true);
    SAME(own.cga_cluster_size, theirs.cgaClusterSize);
    SAME(own.split_share, theirs.splitShare);
#define PLACE(name, other) SAME(offsetof(ring::NcclConfig, name), offsetof(ncclConfig_t, other))
    PLACE(size, size); PLACE(magic, magic); PLACE(version, version); PLACE(blocking, blocking);
    PLACE(cga_cluster_size, cgaClusterSize); PLACE(min_ctas, minCTAs); PLACE(max_ctas, maxCTAs);
    PLACE(net_name, netName); PLACE(split_share, splitShare);
    SAME(ring::Nccl::kSuccess, ncclSuccess);
    SAME(ring::Nccl::kInProgress, ncclInProgress);
    SAME(ring::Nccl::kOldest <= NCCL_VERSION_CODE, true);
    SAME(ring::kNcclAverage, ncclAvg);
    SAME(ring::kNcclBytes, ncclUint8);
    SAME(ring::nccl_reduction(ring::ReduceOp::Sum), ncclSum);
    SAME(ring::nccl_reduction(ring::ReduceOp::Product), ncclProd);
    SAME(ring::nccl_reduction(ring::ReduceOp::Min), ncclMin);
    SAME(ring::nccl_reduction(ring::ReduceOp::Max), ncclMax);
#define TYPE(name, other) SAME(ring::nccl_dtype(ring::DType::name).value(), other)
    TYPE(Int8, ncclInt8); TYPE(UInt8, ncclUint8); TYPE(Int32, ncclInt32); TYPE(Int64, ncclInt64);
    TYPE(UInt32, ncclUint32); TYPE(UInt64, ncclUint64);
    TYPE(Float16, ncclFloat16); TYPE(Float32, ncclFloat32); TYPE(Float64, ncclFloat64); TYPE(BFloat16, ncclBfloat16);
    SAME(ring::nccl_dtype(ring::DType::Int16).has_value(), false);
    SAME(ring::nccl_dtype(ring::DType::UInt16).has_value(), false);
    SAME(ring::nccl_dtype(ring::DType::Bool).has_value(), false);
"""


def functions(header: str, holder: str) -> str:
    """An assertion for each function that the header declares."""
    names = re.findall(r"    X\([^,]+, (\w+), ", (NATIVE / "include" / "ring" / "device" / header).read_text())
    assert len(names) > 15
    check = 'static_assert(Alike<decltype(ring::{0}::{1}), decltype(&::{1})>::value, "{1}");\n'
    return "".join(check.format(holder, name) for name in names)


def check(tmp_path: Path, own: str, header: str, asserted: str, checks: str, include: Path) -> str:
    """What the compiler, or else the program, says of declarations that differ."""
    # Our source first: it must not come to depend on a header of NVIDIA's. With it come its private numbers.
    program = (
        f'{ALIKE}\n#include "{own}"\n#include <{header}>\n{asserted}\nint main() {{{checks}    return failed;\n}}\n'
    )
    source, binary = tmp_path / "declarations.cpp", tmp_path / "declarations"
    source.write_text(program)
    for name in ("cuda_runtime.h", "cuda_fp16.h"):
        (tmp_path / name).write_text(RUNTIME)
    beside = [NATIVE / "src" / "device" / "driver.cpp"] if header == "cuda.h" else []
    folders = [f"-I{folder}" for folder in (tmp_path, NATIVE / "include", NATIVE / "src", include)]
    built = ran(["c++", "-std=c++17", *folders, str(source), *map(str, beside), "-o", str(binary), "-ldl"])
    if built.returncode:
        return "\n".join(line for line in built.stderr.splitlines() if "error" in line or "undefined" in line)
    return ran([binary]).stdout


def test_the_driver(cuda: Path, tmp_path: Path) -> None:
    asserted = functions("driver.hpp", "Driver")
    assert check(tmp_path, "device/device_context.cpp", "cuda.h", asserted, CUDA, cuda) == ""


def test_errors_that_last(cuda: Path) -> None:
    """Those of which the header says that the process must be terminated and relaunched."""
    entries = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*CUDA_ERROR_\w+\s*=\s*(\d+)", (cuda / "cuda.h").read_text(), re.S)
    lasting = {int(number) for text, number in entries if "relaunched" in " ".join(text.split())}
    own = re.search(r"kLasting\[\] = \{(.*?)\}", (NATIVE / "src" / "device" / "driver.cpp").read_text(), re.DOTALL)
    assert own is not None
    assert lasting, "the header says it in other words"
    assert lasting <= {int(number) for number in own[1].split(",")}


def test_nccl(nccl: Path, tmp_path: Path) -> None:
    asserted = functions("nccl.hpp", "Nccl")
    assert check(tmp_path, "device/nccl.cpp", "nccl.h", asserted, NCCL, nccl / "include") == ""


def test_a_declaration_that_differs_is_noticed(cuda: Path, tmp_path: Path) -> None:
    wrong = 'static_assert(Alike<int (*)(void*, void*), decltype(&::cuEventCreate)>::value, "cuEventCreate");'
    assert "cuEventCreate" in check(tmp_path, "device/device_context.cpp", "cuda.h", wrong, CUDA, cuda)
    assert "1 here" in check(
        tmp_path, "device/device_context.cpp", "cuda.h", "", "SAME(1, CUDA_ERROR_NOT_READY);", cuda
    )
