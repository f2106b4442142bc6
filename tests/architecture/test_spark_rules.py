"""The rules of the Spark source, and the tests that fail where one of them is not kept.

A1 positions · A2 offsets and replay · A3 looking for the tip · A4 short cuts for executors ·
A5 budgets · A6 exact reading · A7 children · A8 catch-up · A9 AvailableNow · A10 no cache on
executors (nothing of a former task is used: a range's rows come from its own reads and hints).
"""

import re

from tests.architecture.sources import text_of_tests

PROVEN_BY = {
    "A1": (
        "test_a_position_comes_back_from_its_text",
        "test_positions_have_one_order",
        "test_a_batch_in_catch_up_ends_before_a_record_never_after_it",
    ),
    "A2": (
        "test_batch_zero_is_replayed_from_its_end_alone",
        "test_a_first_batch_that_failed_is_read_again_as_it_was",
        "test_two_actions_on_one_batch_read_the_same_rows",
        "test_a_failed_task_is_tried_again_and_its_rows_come_once",
        "test_an_offset_comes_back_and_has_one_text",
        "test_no_news_give_the_start_itself",
        "test_a_stream_that_was_created_again_is_refused",
        "test_drivers_killed_again_and_again_read_every_record_exactly_once",
    ),
    "A3": (
        "test_asking_again_and_again_reads_once_a_poll",
        "test_a_gap_is_walked_once_and_then_costs_one_call_a_poll",
        "test_a_busy_shard_is_looked_at_by_time_and_handed_over_by_iterator",
        "test_records_stamped_ahead_of_time_do_not_stall_the_shard",
        "test_a_time_that_leads_back_to_the_position_is_no_answer_at_the_tip",
        "test_a_wrong_clock_of_the_driver_neither_asks_for_the_future_nor_delays",
        "test_the_source_asks_a_hundred_shards_in_two_rounds",
    ),
    "A4": (
        "test_a_quiet_shard_costs_one_call_a_poll_and_its_rows_travel",
        "test_a_token_that_stands_elsewhere_changes_no_row",
        "test_rows_of_the_driver_need_no_request",
    ),
    "A5": (
        "test_a_shards_calls_keep_to_their_rate",
        "test_throttles_lengthen_the_tick_and_quiet_brings_it_back",
        "test_a_shard_rests_for_bytes_read_twice_and_after_failures_whatever_is_longer",
        "test_ticks_lengthen_by_half_after_throttles_and_shorten_by_a_tenth_of_a_second",
    ),
    "A6": (
        "test_neither_empty_pages_nor_zero_lag_nor_time_end_a_range",
        "test_a_null_iterator_before_the_bound_is_an_error",
        "test_a_trimmed_position_is_a_loss_if_the_tip_was_seen_longer_ago_than_the_retention",
        "test_a_shard_that_left_the_listing_unread_is_a_loss",
        "test_a_start_at_the_horizon_only_warns_when_the_horizon_has_moved",
    ),
    "A7": (
        "test_a_child_of_a_merge_waits_for_both_parents",
        "test_a_grandchild_waits_while_the_generation_between_is_not_listed",
        "test_children_are_read_in_the_batch_they_enter_from_their_first_records_on",
        "test_an_ended_parent_that_left_the_listing_goes_once_the_rest_covers_everything",
        "test_rows_in_are_rows_out",
    ),
    "A8": (
        "test_a_dense_and_a_sparse_shard_stay_together_in_catch_up",
        "test_a_dense_and_a_sparse_shard_in_catch_up_lose_nothing_to_the_watermark",
        "test_a_window_doubles_after_a_quick_batch_and_halves_after_a_slow_one",
        "test_a_limit_holds_for_closed_shards_too",
    ),
    "A9": (
        "test_available_now_reads_what_is_there_and_ends",
        "test_available_now_ends_while_records_still_come",
        "test_available_now_ends_while_the_stream_is_resharded",
    ),
    "A10": ("test_a_range_gives_the_same_records_whatever_goes_wrong",),
}


def test_every_rule_of_the_source_has_its_tests():
    there = set(re.findall(r"^\s*def (test_\w+)\(", text_of_tests("test_*.py"), re.MULTILINE))

    assert [
        f"{rule}: {name}"
        for rule, names in PROVEN_BY.items()
        for name in names
        if name not in there
    ] == []
