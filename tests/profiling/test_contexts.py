"""Which context an instant has: nesting, precedence, rounding."""

import pytest

from clusterkv_ops.profiling.contexts import segments
from clusterkv_ops.profiling.phases import kernel_phase, range_rule
from clusterkv_ops.profiling.trace import Range

CALLS = frozenset({"prefill", "extend", "decode"})


def cut(*ranges):
    """(start, end, phase, layer, waits_for) of each segment of a thread."""
    made = segments([Range(*item, 0) for item in ranges], CALLS)
    return [(s.start, s.end, s.context.phase, s.context.layer, s.context.waits_for) for s in made]


def test_the_drawing_of_the_module():
    assert cut(
        (0, 40, "clusterkv.decode"),
        (4, 33, "clusterkv.layer.2"),
        (6, 12, "aten::mm"),
        (15, 25, "clusterkv.selection"),
    ) == [
        (0, 4, None, None, None),
        (4, 6, None, 2, None),
        (6, 12, "linear", 2, None),
        (12, 15, None, 2, None),
        (15, 25, "selection", 2, None),
        (25, 33, None, 2, None),
        (33, 40, None, None, None),
    ]


def test_own_phases_win_inside_and_a_models_outermost_operator_wins():
    assert cut((0, 10, "clusterkv.recall"), (2, 5, "aten::mm")) == [(0, 10, "recall", None, None)]
    assert cut((0, 10, "aten::scaled_dot_product_attention"), (2, 5, "aten::bmm")) == [
        (0, 10, "attention", None, None)
    ]
    assert cut((0, 10, "clusterkv.attention"), (2, 5, "clusterkv::recall")) == [
        (0, 2, "attention", None, None),
        (2, 5, "recall", None, None),
        (5, 10, "attention", None, None),
    ]


def test_an_operator_inside_the_range_of_its_phase_is_not_a_second_piece():
    name = "clusterkv::select_clusters"
    assert cut((0, 10, "clusterkv.selection"), (0, 10, name)) == [(0, 10, "selection", None, None)]


def test_a_wait_is_no_phase():
    assert cut((0, 10, "clusterkv.decode"), (3, 7, "clusterkv.wait.clustering"))[1] == (
        3,
        7,
        None,
        None,
        "clustering",
    )


def test_siblings_that_overlap_by_rounding_stay_siblings():
    assert cut(
        (0, 101, "aten::mm"), (100, 200, "clusterkv.recall"), (110, 120, "aten::copy_")
    ) == [
        (0, 101, "linear", None, None),
        (101, 200, "recall", None, None),
    ]


def test_ranges_may_come_in_any_order_and_leave_gaps():
    assert cut((50, 60, "aten::mm"), (0, 10, "aten::mm")) == [
        (0, 10, "linear", None, None),
        (50, 60, "linear", None, None),
    ]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("clusterkv::assign_clusters", "clustering"),
        ("clusterkv::update_centroids", "clustering"),
        ("clusterkv::cluster_keys", "clustering"),
        ("clusterkv::extend_index_", "clustering"),
        ("clusterkv::select_clusters", "selection"),
        ("clusterkv::recall", "recall"),
        ("clusterkv::selected_attention", "attention"),
        ("clusterkv::merge_states", "attention"),
        ("clusterkv.offload", "offload"),
        ("clusterkv.append", "other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::addmm", "linear"),
        ("aten::linear", "linear"),
        ("aten::bmm", "linear"),
        ("mkldnn::_linear_pointwise", "linear"),
        ("mkl::_mkl_linear", "linear"),
        ("aten::add", None),
        ("aten::mm_like_nothing", None),
        ("clusterkv.unheard_of", None),
    ],
)
def test_every_name_has_its_phase(name, phase):
    assert range_rule(name).phase == phase


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("clusterkv_select_clusters_kernel<float, 128>", "selection"),
        ("void clusterkv::clusterkv_recall_gather<int4>(int*)", "recall"),
        ("clusterkv_selected_attention<bf16>", "attention"),
        ("clusterkv_assign_clusters", "clustering"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("ampere_sgemm_128x64_nn", "linear"),
        ("Cijk_Ailk_Bljk_BBS_BH", "linear"),
        ("triton_poi_fused_rope_0", None),
    ],
)
def test_every_kernel_has_its_phase(name, phase):
    assert kernel_phase(name) == phase


def test_operators_of_the_package_are_all_in_the_table():
    """A new operator must be given a phase."""
    from clusterkv_ops.schemas import SCHEMAS

    assert [name for name in SCHEMAS if range_rule(f"clusterkv::{name}").phase is None] == []
