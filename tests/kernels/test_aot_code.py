"""The readers of compiled kernels see what is wrong in small programs, and pass right ones."""

from __future__ import annotations

import pytest

from benchmarks.common.aot_barriers import Hazard, unordered_products, unordered_writes
from benchmarks.common.aot_code import Loop, pipelined_loops, turned_products
from benchmarks.common.aot_shared import GRANULE, Shared

LOOP = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x32x64xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %a[%c0] : !ttg.memdesc<{buffers}x32x64xbf16, #s> -> !ttg.memdesc<32>
    %t = ttg.async_copy_global_to_local %p, %first mask %m : tensor<32x64x!tt.ptr<bf16>> -> <32x64>
    %r = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (i32)  : i32 {{
      %w = ttg.async_wait %t {{num = {ahead} : i32}} loc(#loc1)
      %if = scf.if %more -> (i32) {{
        %b = ttg.memdesc_index %a[%i] : !ttg.memdesc<{buffers}x32x64xbf16, #s> -> !ttg.memdesc<32>
        %u = ttg.async_copy_global_to_local %q, %b mask %m : tensor<32x64x!tt.ptr<bf16>> -> <32x64>
        scf.yield %i : i32
      }} else {{
        scf.yield %i : i32
      }} loc(#loc2)
      scf.yield %if : i32
    }} loc(#loc3)
    %e = ttg.async_wait {{num = 0 : i32}}
"""


@pytest.mark.parametrize(("buffers", "ahead"), [(3, 2), (2, 0), (1, 0)])
def test_buffers_and_copies_in_flight_of_a_loop(buffers: int, ahead: int) -> None:
    assert pipelined_loops(LOOP.format(buffers=buffers, ahead=ahead)) == [Loop(buffers, ahead)]


def test_a_loop_around_a_pipelined_one_is_no_pipeline() -> None:
    inner = LOOP.format(buffers=3, ahead=2)
    outer = f"    %o = scf.for %g = %c0 to %n step %c1 -> (i32) : i32 {{\n{inner}\n    }}\n"
    assert pipelined_loops(outer) == [Loop(3, 2)]
    assert pipelined_loops("    %o = scf.for %g = %c0 to %n {\n    }\n") == []


def test_a_transposed_product_is_seen() -> None:
    layouts = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 8]}>\n"
        "#mma = #ttg.nvidia_mma<{versionMajor = 3}>\n"
    )
    line = "%t = tt.trans %x {order = array<i32: 1, 0>} : tensor<64x64xf32, #KIND> -> tensor<64x64>"
    assert turned_products(layouts + line.replace("KIND", "mma")) == [line.replace("KIND", "mma")]
    assert not turned_products(layouts + line.replace("KIND", "blocked"))


# Each thread writes 16 bytes; 256 threads fill 4 096, which a product reads through a descriptor.
PROGRAM = """
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 4;
    mov.b32 %r3, global_smem;
    add.s32 %r4, %r3, %r2;
    add.s32 %r5, %r4, 8192;
    bfe.u32 %r6, %r3, 4, 14;
    cvt.u64.u32 %rd1, %r6;
    or.b64 %rd2, %rd1, 4611686293305294848;
    mov.b32 %r7, 0;
$L__BB0_1:
    st.shared.v4.b32 [ %r4 + 0 ], { %r90, %r91, %r92, %r93 };
    fence.proxy.async.shared::cta;
    bar.sync 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1,%f2}, {%r81,%r82}, %rd2, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {between}
    add.s32 %r7, %r7, 1;
    setp.lt.s32 %p1, %r7, 8;
    @%p1 bra $L__BB0_1;
    ret;
"""


def test_a_write_behind_a_wait_needs_a_barrier_on_the_way_back() -> None:
    """With one warp group the wait is enough; with two the other may still read."""
    without = PROGRAM.replace("{between}", "")
    lines = without.splitlines()
    product = next(i for i, line in enumerate(lines, 1) if "mma_async" in line)
    write = next(i for i, line in enumerate(lines, 1) if "st.shared" in line)
    assert unordered_writes(without, 8) == [Hazard(product, write)]
    assert unordered_writes(without, 4) == []
    assert unordered_writes(PROGRAM.replace("{between}", "bar.sync 0;"), 8) == []


def test_a_barrier_on_one_of_two_paths_is_not_enough() -> None:
    between = "@%p9 bra $L__BB0_2;\n    bar.sync 0;\n$L__BB0_2:"
    assert len(unordered_writes(PROGRAM.replace("{between}", between), 8)) == 1


def test_a_write_to_another_buffer_needs_no_barrier() -> None:
    other = "st.shared.v4.b32 [ %r5 + 0 ], { %r90, %r91, %r92, %r93 };\n    bar.sync 0;"
    assert unordered_writes(PROGRAM.replace("{between}", other), 8) == []
    same = other.replace("%r5 + 0", "%r5 + -8192")
    assert len(unordered_writes(PROGRAM.replace("{between}", same), 8)) == 1


def test_an_address_that_is_not_known_may_be_any() -> None:
    unknown = "ld.global.b32 %r60, [%rd9];\n    st.shared.b32 [%r60], %r90;\n    bar.sync 0;"
    assert len(unordered_writes(PROGRAM.replace("{between}", unknown), 8)) == 1


RING = """
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, 1;
$L__BB0_1:
    add.s32 %r3, %r2, 1;
    setp.gt.s32 %p1, %r3, 1;
    selp.b32 %r2, 0, %r3, %p1;
    shl.b32 %r4, %r2, 13;
    add.s32 %r5, %r4, 65536;
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd1 + 0 ], 0x10, %r9;
"""


def test_the_number_of_a_buffer_has_the_values_of_its_loop() -> None:
    """Of a ring of two, begun at one: 65 536 and 8 KiB behind it, and nothing else."""
    written = Shared(RING, 4).written("cp.async.cg.shared.global [ %r5 + 0 ], [ %rd1 + 0 ], 0x10;")
    assert [int(at) * GRANULE for at in written.nonzero()[0]] == [65536, 65536 + 8192]


TENSOR = """
    st.shared.v4.b32 [ %r4 + 0 ], { %r90, %r91, %r92, %r93 };
    fence.proxy.async.shared::cta;
    {barrier}
    @%p12 tcgen05.mma.cta_group::1.kind::f16 [ %r57 + 0 ], %rd24, %rd22, %r22, %p11;
    ret;
"""


def test_a_product_in_tensor_memory_waits_for_all_threads() -> None:
    assert unordered_products(TENSOR.replace("{barrier}", "")) == [Hazard(5, 2)]
    assert unordered_products(TENSOR.replace("{barrier}", "bar.sync 0;")) == []
