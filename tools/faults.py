"""The faults that a run must survive, each by the tests that inject it: runs them and prints how many are survived, as JSON.

python tools/faults.py [--only K3,R1] [--list]      exit code 0 where all are survived

A fault is survived when each of its tests ran and passed. `total` counts the ids that ran, all of them without --only. A name that no
test has is an error before any test runs.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
T = "tests/training/"
RESUME, FAULTS, RUN = (f"{T}test_{name}.py::test_" for name in ("resume", "faults", "run"))
LAUNCH, RANKS = f"{T}launch/test_launch.py::test_", f"{T}launch/test_ranks.py::test_"
CHECKPOINT, FOLDER, MODEL = (
    "tests/storage/test_checkpoint.py::test_",
    "tests/storage/test_atomic.py::test_",
    "tests/storage/test_model_folder.py::test_",
)
INPUT = "tests/test_bad_input.py::test_"
BAD = f"{INPUT}a_mistake_ends_with_its_exit_code_and_one_sentence"
FIT = f"{INPUT}what_does_not_fit_a_trained_model_ends_with_its_exit_code_and_one_sentence"
OVERRIDES = "tests/cli/compose/test_bad_overrides.py::test_bad_override_ends_with_one_sentence_and_exit_code_2"
FILES, PREPARE, CHAT, SANDBOX = (
    "tests/data/sources/test_files.py::test_",
    "tests/data/store/test_prepare.py::test_",
    "tests/data/tokenizer/test_chat.py::test_",
    "tests/data/tokenizer/test_sandbox.py::test_",
)
LOGGING, CONSOLE, SWEEP = (
    f"{T}callbacks/test_loggers.py::test_",
    f"{T}callbacks/test_console.py::test_",
    "tests/cli/compose/test_multirun.py::test_",
)
STOPPED = f"{RESUME}a_run_that_was_stopped_four_times_is_bitwise_the_run_left_alone"

# id -> what is injected, and the tests that do it
REGISTRY: dict[str, tuple[str, list[str]]] = {
    "K1": ("SIGKILL at each point of a save", [
        f"{RESUME}a_killed_run_is_bitwise_the_run_left_alone",
        f"{CHECKPOINT}a_kill_at_any_point_leaves_a_valid_checkpoint",
    ]),
    "K3": ("a truncated file", [
        f"{RESUME}a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used",
        f"{FOLDER}any_damage_to_any_file_is_rejected_and_named",
        f"{CHECKPOINT}damage_is_named_and_the_previous_checkpoint_is_used",
    ]),
    "K4": ("a flipped bit", [f"{RESUME}a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used", f"{FIT}[flipped bit]"]),
    "K5": ("a missing file", [
        f"{RESUME}a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used",
        f"{CHECKPOINT}damage_is_named_and_the_previous_checkpoint_is_used",
    ]),
    "K6": ("no space left mid save", [
        f"{FAULTS}a_full_disk_within_a_save_keeps_the_checkpoints_before",
        f"{FAULTS}a_full_disk_behind_a_save_keeps_that_save",
        f"{FAULTS}a_write_that_the_system_refuses_keeps_the_checkpoints_before",
        f"{LAUNCH}the_end_of_one_rank_ends_all_and_is_told_with_the_rank[finds no space]",
    ]),
    "K7": ("a disk too small at the start", [f"{FAULTS}a_disk_too_small_for_the_checkpoints_is_told_before_the_first_step"]),
    "K8": ("a run folder that cannot be written", [
        f"{FAULTS}a_run_folder_that_cannot_be_made_is_exit_code_5",
        f"{FAULTS}a_folder_that_becomes_unwritable_keeps_the_checkpoints_before",
    ]),
    "K10": ("two processes in one run folder", [
        f"{RUN}a_second_process_in_a_run_folder_is_refused_with_pid_and_host",
        f"{FOLDER}a_second_process_is_refused_with_pid_and_host_and_a_stale_lock_is_recovered",
    ]),
    "K11": ("a kill between save and prune", [
        f"{CHECKPOINT}a_kill_at_any_point_leaves_a_valid_checkpoint",
        f"{RESUME}a_killed_run_is_bitwise_the_run_left_alone",
    ]),
    "K13": ("SIGTERM mid step", [
        f"{RUN}a_signal_finishes_the_step_saves_and_tells_how_to_resume",
        f"{RUN}a_second_signal_exits_at_once",
        f"{LAUNCH}a_signal_to_the_launcher_ends_all_ranks_behind_the_same_step_which_is_saved",
    ]),
    "K14": ("SIGINT mid step", [
        f"{RUN}a_signal_finishes_the_step_saves_and_tells_how_to_resume",
        f"{SWEEP}a_signal_ends_the_running_job_and_the_sweep",
    ]),
    "K15": ("SIGUSR1 from SLURM", [
        f"{LAUNCH}sigusr1_saves_and_puts_the_job_back_into_the_queue_once",
        f"{T}launch/test_cluster.py::test_the_sbatch_file_saves_at_sigusr1_asks_for_the_queue_once_and_goes_on",
    ]),
    "R1": ("stop at five places and resume", [STOPPED]),
    "R2": ("the same with loader workers", [f"{RESUME}loader_workers_change_nothing_in_a_resumed_run"]),
    "R3": ("the same with two processes", [f"{RANKS}a_killed_run_of_several_ranks_is_bitwise_the_run_left_alone"]),
    "R4": ("other numbers of processes", [f"{RANKS}a_run_goes_on_under_another_strategy_and_number_of_ranks"]),
    "R5": ("two stops in one run", [STOPPED]),
    "R8": ("a missing optimizer state", [f"{RESUME}a_missing_optimizer_state_is_refused_unless_a_fresh_one_is_asked_for"]),
    "R9": ("changed data", [f"{RESUME}changed_data_is_named"]),
    "R10": ("another config", [
        f"{RESUME}another_config_is_refused_with_the_difference",
        f"{RESUME}more_steps_go_on_and_less_are_refused",
    ]),
    "R11": ("another width", [f"{RESUME}another_width_is_refused_by_its_name_before_any_weight_is_looked_at"]),
    "R12": ("another format", [
        f"{RESUME}a_checkpoint_of_the_future_is_refused_by_number",
        f"{CHECKPOINT}a_format_from_the_future_is_refused_by_number",
    ]),
    "R13": ("resume=must in an empty folder", [f"{RESUME}must_needs_a_checkpoint_and_auto_starts_and_says_so"]),
    "R14": ("schedule, average, early stopping", [
        STOPPED,
        f"{RESUME}early_stopping_counts_on_after_a_resume_and_does_not_train_past_its_end",
    ]),
    "D1": ("an empty file", [f"{BAD}[empty file]"]),
    "D2": ("an empty folder", [f"{BAD}[empty folder]"]),
    "D3": ("only blank lines", [f"{BAD}[blank lines]"]),
    "D4": ("a corpus smaller than a row", [f"{BAD}[shorter than a row]"]),
    "D5": ("50 MB on one line", [f"{PREPARE}a_line_of_50_mb_stays_below_1500_mb_of_memory"]),
    "D6": ("invalid UTF-8", [f"{BAD}[invalid UTF-8]", f"{FILES}invalid_utf8_is_named_by_file_and_byte_or_skipped_and_counted"]),
    "D8": ("broken records", [f"{BAD}[broken jsonl]", f"{FILES}a_bad_line_is_named_by_file_and_line_or_skipped_and_counted"]),
    "D9": ("cut archives", [f"{FILES}a_truncated_archive_is_named", "tests/data/sources/test_hub.py::test_a_parquet_file_cut_in_half_is_named"]),
    "D10": ("odd folders", [
        f"{FILES}a_folder_means_its_readable_files_in_order_without_hidden_and_linked_ones",
        f"{FILES}an_unreadable_file_is_named",
    ]),
    "D11": ("a token id beyond the vocabulary", [f"{FIT}[token id beyond the vocabulary]"]),
    "D12": ("a tokenizer replaced after preparing", [f"{RESUME}a_changed_tokenizer_is_named"]),
    "D13": ("another tokenizer of the same size", [f"{FIT}[replaced tokenizer]"]),
    "D14": ("a vocabulary of another size", [f"{FIT}[larger tokenizer]", f"{BAD}[vocabulary below the tokenizer's]"]),
    "D15": ("special tokens spelt in text", ["tests/data/tokenizer/test_tokenizer.py::test_text_that_spells_a_special_token_is_text"]),
    "D16": ("chats with nothing to learn", [f"{CHAT}a_long_chat_loses_its_end_and_one_without_anything_to_learn_is_dropped"]),
    "D17": ("validation in training", [
        f"{PREPARE}documents_in_both_splits_are_counted_and_reported",
        f"{PREPARE}a_validation_that_is_mostly_in_training_is_refused",
    ]),
    "D18": ("a stale or half cache", [
        f"{PREPARE}changed_code_is_another_cache_entry",
        f"{PREPARE}what_a_killed_process_left_is_removed_and_built_anew",
    ]),
    "D19": ("two processes build one cache", [f"{PREPARE}of_two_processes_one_builds_and_the_other_waits"]),
    "D20": ("a killed loader worker", [f"{FAULTS}a_killed_loader_worker_is_named_and_the_next_start_goes_on"]),
    "C2": (
        "wrong types and ranges",
        [f"{OVERRIDES}[{case}]" for case in ("wrong type", "out of range", "NaN", "string for int", "list for scalar")],
    ),
    "C3": ("numbers that do not fit", [
        f"{OVERRIDES}[heads do not divide]",
        f"{OVERRIDES}[warm-up longer than the run]",
        f"{LAUNCH}what_cannot_be_trained_so_is_refused_by_the_config",
    ]),
    "C4": ("an option that is not used", [f"{OVERRIDES}[key that the chosen kind lacks]"]),
    "C5": ("an unknown option", [f"{OVERRIDES}[unknown option]", f"{OVERRIDES}[unknown slot option]"]),
    "C6": ("every shipped config", [
        "tests/test_shipped.py::test_every_option_passes_a_check",
        "tests/test_shipped.py::test_every_recipe_passes_a_check",
        "tests/cli/compose/test_recipes.py::test_recipe_run_line_and_shrink_line_compose",
    ]),
    "C7": ("a secret in the environment", [f"{FAULTS}a_secret_of_the_environment_is_nowhere_in_the_run_folder"]),
    "C8": ("a missing extra", [f"{INPUT}a_missing_extra_is_told_with_the_command_that_installs_it"]),
    "N1": ("a loss that is not finite", [
        f"{FAULTS}a_run_that_diverges_ends_with_exit_code_4_and_can_be_resumed_to_the_same_end",
        f"{T}launch/test_two_processes.py::test_several_processes_train_as_one[fsdp, few]",
    ]),
    "N2": ("an infinite gradient", [
        f"{FAULTS}an_infinite_gradient_takes_no_step_and_names_the_rows",
        f"{FAULTS}skipped_steps_change_nothing_name_their_rows_and_are_counted",
        f"{FAULTS}one_more_bad_step_in_a_row_than_allowed_ends_the_run",
    ]),
    "N3": ("NaN in the weights at a save", [
        f"{FAULTS}broken_weights_are_not_saved",
        f"{FAULTS}a_loss_on_held_out_text_that_is_not_finite_is_not_saved",
    ]),
    "N4": ("ten times the loss", [
        f"{FAULTS}a_leap_of_the_loss_is_told_and_takes_the_run_back_where_that_is_wanted",
        f"{RANKS}a_leap_of_the_loss_takes_all_ranks_back_together",
    ]),
    "N5": ("memory runs out", [
        f"{FAULTS}a_batch_that_does_not_fit_in_memory_is_exit_code_5_with_its_size",
        f"{LAUNCH}the_end_of_one_rank_ends_all_and_is_told_with_the_rank[runs out of memory]",
    ]),
    "P1": ("a rank raises", [f"{LAUNCH}the_end_of_one_rank_ends_all_and_is_told_with_the_rank[raises]"]),
    "P2": ("a rank is killed", [
        f"{LAUNCH}the_end_of_one_rank_ends_all_and_is_told_with_the_rank[is killed]",
        f"{LAUNCH}ranks_end_and_save_when_their_launcher_is_killed",
    ]),
    "P4": ("uneven batches", [f"{LAUNCH}what_cannot_be_trained_so_is_refused_by_the_config"]),
    "P5": ("a port in use", [f"{LAUNCH}a_port_in_use_is_no_matter"]),
    "P6": ("a sweep with failing jobs", [f"{SWEEP}failed_and_killed_jobs_stop_nothing_and_only_they_run_again"]),
    "P7": ("a sweep of two-process jobs", [f"{LAUNCH}a_sweep_of_runs_of_two_ranks_runs_each_once"]),
    "L1": ("a bad wandb server", [f"{LOGGING}a_bad_wandb_server_never_holds_up_the_run_and_leaves_no_process"]),
    "L2": ("metrics deleted", [f"{RUN}metrics_deleted_during_a_run_start_again_with_one_warning"]),
    "L3": ("odd terminals", [
        f"{RUN}a_closed_stdout_does_not_end_a_run",
        f"{CONSOLE}a_terminal_gets_colour_and_whole_lines_at_any_width",
        f"{CONSOLE}no_escape_codes_off_a_terminal_even_if_colour_is_forced",
    ]),
    "S1": ("a malicious pickle", [
        f"{MODEL}a_pickle_is_refused_by_name_and_never_run",
        "tests/hf/test_verbs.py::test_a_pickle_is_refused_and_not_opened",
    ]),
    "S2": ("_target_ in a checkpoint's config", [f"{FAULTS}a_config_that_names_code_is_refused_and_runs_nothing"]),
    "S3": ("python tags in yaml", [f"{T}launch/test_worker.py::test_a_config_that_is_none_is_refused_and_runs_nothing"]),
    "S4": ("code in a model folder", ["tests/hf/test_verbs.py::test_code_of_the_model_is_never_run"]),
    "S5": ("a hostile chat template", [
        f"{SANDBOX}no_template_reaches_what_python_keeps_in_attributes",
        f"{SANDBOX}a_template_that_takes_too_much_is_ended_and_its_process_with_it",
        f"{SANDBOX}a_template_of_a_megabyte_is_refused",
    ]),
    "S9": ("odd run names", [f"{OVERRIDES}[run name that leaves the folder]", f"{OVERRIDES}[run name too long]"]),
    "S10": ("no network, no home", [
        f"{FAULTS}a_run_needs_neither_a_network_nor_a_home",
        f"{FAULTS}a_process_that_is_cut_off_from_every_network_trains",
    ]),
}  # fmt: skip


class Outcomes:
    """A pytest plugin: which tests there are, and what became of each, by node id."""

    def __init__(self) -> None:
        self.by_test: dict[str, bool] = {}
        self.found: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        """All that were asked for, before one runs."""
        self.found = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test has passed when none of its phases failed and its call was not skipped."""
        if report.when == "call" or not report.passed:
            self.by_test[report.nodeid] = self.by_test.get(report.nodeid, True) and report.passed

    def passed(self, selector: str) -> bool:
        """All cases of it ran and passed."""
        cases = [passed for test, passed in self.by_test.items() if _means(selector, test)]
        return bool(cases) and all(cases)

    def unknown(self, selectors: Iterable[str]) -> list[str]:
        """Those that mean no test."""
        return [selector for selector in selectors if not any(_means(selector, test) for test in self.found)]


def _means(selector: str, test: str) -> bool:
    return test == selector or test.startswith(f"{selector}[")


def unknown(selectors: Iterable[str]) -> list[str]:
    """Those that mean no test, by a collection of all of their files: pytest itself would run nothing and not say which."""
    outcomes, files = Outcomes(), dict.fromkeys(selector.partition("::")[0] for selector in selectors)
    pytest.main(["-qq", "--collect-only", "-p", "no:cacheprovider", *files], plugins=[outcomes])
    return outcomes.unknown(selectors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="ids, separated by commas")
    parser.add_argument("--list", action="store_true", help="print ids and what they inject")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(REGISTRY)
    if strange := [name for name in chosen if name not in REGISTRY]:
        parser.error(f"there is no fault {', '.join(strange)}; --list shows all")
    if options.list:
        print("\n".join(f"{name:<4} {REGISTRY[name][0]}" for name in chosen))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    outcomes, selectors = Outcomes(), list(dict.fromkeys(test for name in chosen for test in REGISTRY[name][1]))
    with contextlib.redirect_stdout(sys.stderr):
        if nameless := unknown(selectors):
            parser.error(f"no test is called {', '.join(nameless)}")
        pytest.main(["-q", "--show-capture=no", "-p", "no:cacheprovider", *selectors], plugins=[outcomes])
    failed = {name: [test for test in REGISTRY[name][1] if not outcomes.passed(test)] for name in chosen}
    lost = {name: tests for name, tests in failed.items() if tests or not REGISTRY[name][1]}
    print(json.dumps({"survived": len(chosen) - len(lost), "total": len(chosen), "not survived": lost}, indent=1))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
