"""The ten things that a DSpark draft must do (specs/dspark.md section 9), and the tests that hold each of them."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFORMANCE: dict[str, tuple[str, ...]] = {
    "1 parameter count, keys, shapes, bfloat16": (
        "export/test_draft_folder.py::test_parameter_counts_are_those_of_published_drafts",
        "export/test_draft_folder.py::test_the_file_holds_exactly_the_canonical_tensors_in_bfloat16",
        "draft/test_model.py::test_names_shapes_and_counts_are_those_of_the_published_checkpoint",
    ),
    "2 config: types, forbidden keys, taps, mask token": (
        "export/test_draft_folder.py::test_config_json_says_what_runtimes_read_and_nothing_that_misleads_them",
        "export/test_draft_folder.py::test_a_mask_token_that_means_something_is_refused",
        "export/test_layouts.py::test_two_hundred_mutated_configs_end_in_one_clear_error_or_mean_what_they_say",
    ),
    "3 leaks": (
        "draft/test_model.py::test_a_block_depends_on_all_taps_before_its_anchor_and_on_no_other",
        "draft/test_model.py::test_changing_later_taps_or_another_block_leaves_a_block_unchanged_bit_for_bit",
    ),
    "4 alignment: of the label shifts -1, 0, +1 only 0 wins": (
        "train/test_objective.py::test_the_teacher_of_a_slot_predicts_the_slots_label_and_no_neighbour",
        "decode/test_teacher_forced.py::test_a_shift_by_one_is_seen",
    ),
    "5 taps are layer outputs": ("target/test_transformers_target.py::test_a_tap_is_the_output_of_its_layer",),
    "6 rope at positions 0, 7, 4095, 200000": (
        "draft/test_backbone.py::test_positions_are_turned_as_transformers_does",
        "draft/test_backbone.py::test_the_drafts_rotation_is_right_at_far_positions_also_for_bfloat16_weights",
    ),
    "7 Markov bias of a whole block and slot by slot": (
        "draft/test_markov.py::test_whole_blocks_equal_slot_by_slot",
        "draft/test_proposal.py::test_drafting_the_text_itself_equals_the_training_pass",
    ),
    "8 a context cache grown by random rounds": (
        "draft/test_proposal.py::test_a_cache_grown_by_random_rounds_equals_one_filled_at_once",
    ),
    "9 committed text follows the target": (
        "decode/test_lossless.py::test_what_is_committed_follows_the_target",
        "decode/test_lossless.py::test_two_per_cent_too_many_acceptances_are_noticed",
    ),
    "10 the ratio form is what decoding accepts, value and gradient": (
        "train/test_objective_toy.py::test_the_ratio_form_over_every_text_is_exactly_what_speculative_decoding_accepts",
        "train/test_objective_toy.py::test_the_ratio_form_on_sampled_text_agrees_with_monte_carlo_speculative_decoding",
        "train/test_objective.py::test_the_gradient_of_a_term_is_its_finite_difference",
    ),
}


@pytest.mark.parametrize("item", CONFORMANCE)
def test_what_a_draft_must_do_has_its_tests(item: str) -> None:
    for place in CONFORMANCE[item]:
        path, name = place.split("::")
        tree = ast.parse((HERE / path).read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert found, f"{place}: gone; the list names a test that holds this item"
        skips = [ast.unparse(mark) for mark in found[0].decorator_list if "skip" in ast.unparse(mark)]
        assert not skips, f"{place}: may be skipped ({skips[0]})"
