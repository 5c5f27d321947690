"""Each sentence of docs/operate/security.md that says what cannot happen has its tests here; the
others say what is not prevented, or are no claims. A new sentence without a test fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving.process.isolation import passed
from tests.handlers.user_code.confinement import test_rules

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operate" / "security.md").read_text("utf-8")
DEPENDENCIES = (ROOT / "docs" / "develop" / "dependencies.md").read_text("utf-8")
PROGRAMS = {*test_rules.BY_LANDLOCK, *test_rules.BY_SECCOMP, *test_rules.BY_SCOPE_OR_USER}
PROGRAMS |= {*test_rules.BY_USER}

# The beginning of a sentence, and the tests of what it says.
TESTS = {
    "A model's own Python, and pip for its": (
        "test_no_program_of_a_model test_a_program_of_a_model "
        "test_a_script_reaches_nothing_of_the_server_or_of_other_models"
    ),
    "Left are Python, system libraries, the": (
        "test_no_program_of_a_model test_a_program_of_a_model "
        "test_a_script_has_a_temporary_folder_of_its_own_that_goes_with_the_model "
        "test_nothing_of_root_is_left_but_reading"
    ),
    "What a machine cannot enforce is logged": "test_what_this_machine_cannot_keep_is_said",
    "A script finds no credentials and reaches": (
        "test_a_script_finds_no_credentials "
        "test_a_script_around_the_built_in_model_reaches_no_other"
    ),
    "Its processes end with it, at an unload, a": (
        "test_a_daemon_that_it_has_started_goes_with_it "
        "test_processes_of_a_program_that_ended_by_itself_end "
        "test_a_daemon_goes_with_the_worker_of_its_model_which_comes_back "
        "test_loads_that_never_end_are_given_up_with_all_that_they_have_started "
        "test_a_script_that_will_not_end_does_not_hold_up_a_stop"
    ),
    "Short of memory, the": "test_scripts_go_first_when_memory_runs_out_and_the_engine_last",
    "It cannot flood the log or send malformed": (
        "test_megabytes_of_output_stop_nothing_and_flood_no_log "
        "test_no_output_takes_more_of_the_log_than_its_limit "
        "test_unusual_errors_reach_the_client"
    ),
    "In a browser no answer of a": "test_a_browser_runs_no_answer_as_the_consoles_origin",
    "`SCRIPT_NETWORK=false` takes the network": (
        "test_isolation_can_be_widened_and_scripts_be_without_the_network_which_pip_keeps"
    ),
    "`SCRIPT_PATHS=/srv/lexicon:/srv/fonts` adds": (
        "test_isolation_can_be_widened_and_scripts_be_without_the_network_which_pip_keeps"
    ),
    "`ALLOW_MODEL_REQUIREMENTS` is off:": "test_requirements_are_refused_unless_they_are_allowed",
    "`RUN_AS_USER`, 10001 in the images, is": (
        "test_root_becomes_a_user_for_good_that_writes_where_the_server_must "
        "test_of_a_container_that_starts_as_root_one_process_stays_root_to_open_files"
    ),
    "One process stays root, to open files in": (
        "test_of_a_container_that_starts_as_root_one_process_stays_root_to_open_files "
        "test_only_plain_files_and_folders_below_the_given_ones_are_opened"
    ),
    "A model that only root": "test_a_closed_model_is_copied_once_and_an_open_one_used_in_place",
    "Root without the capability to change": "test_without_the_capability_the_way_out_is_named",
    "An archive cannot write outside its folder,": (
        "test_what_would_leave_the_folder_is_refused test_links_do_not_lead_out_of_a_store "
        "test_a_tree_too_deep_is_refused_before_it_is_made "
        "test_the_size_is_bounded_before_more_is_written "
        "test_what_the_engine_trusts_cannot_be_brought"
    ),
    "A refused one leaves nothing.": (
        "test_what_cannot_be_unpacked_or_is_too_large_leaves_nothing test_no_leftover_stops_a_start"
    ),
    "No pickle runs code.": (
        "test_a_pickle_that_would_call_something_is_refused test_npy_is_never_unpickled"
    ),
    "Files are parsed in a sandbox without": (
        "test_what_it_may_not_do test_how_it_ended "
        "test_a_call_past_its_deadline_ends_the_process "
        "test_adapters_that_do_not_fit_are_refused_and_concern_no_other"
    ),
    "Tokenizers and chat templates run in a": (
        "test_a_tokenizer_that_stalls_holds_up_no_other_model "
        "test_a_process_that_dies_costs_no_answer "
        "test_a_template_that_never_ends_is_ended_and_the_next_request_works "
        "test_a_template_that_fails_or_leaves_its_sandbox_is_refused"
    ),
    "*Not prevented*: models with the same": (
        "test_a_process_is_started_again_from_the_files_of_the_model_that_needs_it "
        "test_models_that_share_a_process_take_turns "
        "test_tokens_become_text_without_their_process"
    ),
    "A chat message cannot hold the model's": "test_a_message_with_a_control_token_is_refused",
    "ONNX graphs and MXNet symbols run in a": (
        "test_a_worker_of_tensors_is_confined test_a_broken_artifact_is_told_in_a_sentence"
    ),
    "Bodies, headers and gRPC messages are": (
        "test_a_body_that_is_too_large_is_413 "
        "test_an_announced_length_is_refused_before_the_body_comes "
        "test_what_the_parser_would_keep_is_bounded "
        "test_a_taken_port_ends_the_start_and_a_large_message_its_call "
        "test_a_client_that_does_not_speak_the_protocol_is_hung_up_on "
        "test_no_request_is_an_error_of_the_server "
        "test_what_ends_in_two_ways_is_refused_with_all_behind_it "
        "test_a_body_longer_than_any_prompt_is_refused_unread"
    ),
    "A form cannot end the shared JVM, and no": (
        "test_what_netty_could_not_take_is_refused "
        "test_a_form_that_netty_could_not_take_reaches_no_worker "
        "test_strings_that_log4j_once_looked_up_are_strings"
    ),
    "No bytes of a client reach": "test_a_clients_bytes_reach_none_of_what_has_advisories",
    "With the tokens set, no route but health": (
        "test_each_token_opens_what_is_its_own test_every_route_but_health_asks_for_its_token "
        "test_a_token_is_asked_for_and_ids_are_kept "
        "test_a_token_is_compared_whole_whatever_was_sent"
    ),
    "`INFERENCE_TOKEN` alone also closes": "test_the_token_for_calls_alone_closes_all",
    "A page of another site gets 403 on": (
        "test_a_page_of_another_site_has_no_effect test_no_route_with_an_effect_is_left_out"
    ),
    "DNS rebinding gets 403 where": "test_a_name_that_is_rebound_to_this_server_reaches_nothing",
    "Models come only from the store,": (
        "test_other_hosts_and_redirects_to_them_are_refused "
        "test_no_field_has_the_server_fetch_or_read_something_else"
    ),
    "Client text becomes neither a response": (
        "test_no_text_of_a_client_becomes_a_header_or_a_line_of_the_log "
        "test_a_client_cannot_steer_who_reads_the_log"
    ),
    "Answers hold no secrets and no signed query": (
        "test_the_secret_of_the_probe_is_not_told "
        "test_no_error_and_no_log_has_the_query_of_an_address"
    ),
    "Each [form](../api/requests.md#the-form-of-an-answer)": (
        "test_a_hostile_form_is_refused_or_stays_small "
        "test_a_form_that_takes_too_long_is_refused_then_refused_at_once "
        "test_a_form_that_takes_too_much_memory_is_refused "
        "test_a_form_that_is_compiled_delays_no_other_and_ends_with_its_request "
        "test_a_mask_that_is_late_ends_the_answers_of_its_form_only "
        "test_a_form_whose_process_is_killed_can_be_used_again"
    ),
    "The console shows models' text as text,": (
        "test_the_page_is_small_and_whole_and_asks_no_other_host "
        "test_a_call_is_copied_as_code_that_works test_what_it_shows_needs_a_token "
        "test_the_token_is_asked_for_and_kept_nowhere"
    ),
    "*Not prevented*: response times and `cached_tokens`": (
        "test_prefixes_are_shared_among_the_rows_of_one_adapter_only "
        "test_texts_are_those_without_the_cache"
    ),
    "*Not prevented* with": "test_texts_are_the_same_and_tokens_say_which_were_guessed",
    "With": (
        "test_no_route_lets_a_team_use_anothers_model "
        "test_no_field_or_header_lets_a_team_use_anothers_model "
        "test_grpc_denies_a_team_anothers_model test_lists_show_a_team_its_own_models_only"
    ),
    "Loading by hand needs `load`.": "test_loading_needs_the_right_and_a_name_that_matches",
    "An [alias](../api/requests.md#aliases) or": (
        "test_a_team_needs_an_aliass_name_and_all_of_its_models "
        "test_a_team_needs_a_models_name_and_the_base_that_it_needs "
        "test_a_team_needs_the_right_to_a_base_that_a_model_needs "
        "test_no_route_lets_a_team_use_anothers_model"
    ),
    "It needs the right to a base that a": (
        "test_a_team_needs_the_right_to_a_base_that_a_model_needs "
        "test_a_team_that_may_not_use_a_base_that_is_looked_up_gets_the_model_whole"
    ),
    "Requests a minute and in flight are": (
        "test_a_minutes_requests_may_come_at_once_and_then_at_the_rate "
        "test_a_stream_holds_its_place_until_its_end "
        "test_a_place_is_given_back_however_a_request_ends"
    ),
    "The file has hashes of tokens; neither": (
        "test_a_token_is_found_by_its_bytes_alone "
        "test_the_log_has_the_name_of_the_token_and_not_the_token "
        "test_what_a_team_used_is_counted_under_its_name "
        "test_a_wrong_entry_is_named_and_no_secret_is_repeated"
    ),
    "A wrong file stops a start; a running": (
        "test_a_wrong_file_ends_the_start_with_the_reason "
        "test_a_changed_file_takes_effect_and_a_wrong_one_keeps_the_tokens"
    ),
    "Only the gateway listens to the network,": (
        "test_only_the_gateway_listens_to_the_network test_other_users_cannot_reach_the_sockets "
        "test_another_user_cannot_connect"
    ),
    "*Not prevented*: root and other": "test_others_of_the_same_user_cannot_read_the_environment",
    "Passed are `PATH`, `HOME`, `USER`, `LANG`,": (
        "test_what_it_says_is_passed_is_passed test_workers_know_no_credentials"
    ),
    "Of these, names with `TOKEN`, `SECRET`,": (
        "test_scripts_get_what_they_read_and_a_secret_only_if_it_is_named"
    ),
    "`WORKER_VARIABLES=TOP_K,POEM_*` passes": (
        "test_scripts_get_what_they_read_and_a_secret_only_if_it_is_named"
    ),
    "Scripts get neither `PIP_*` nor the": (
        "test_a_script_gets_no_variables_of_the_server "
        "test_isolation_can_be_turned_off_and_pip_finds_only_what_it_needs"
    ),
}
# Prints which distributions there are modules of once these are imported.
LOADED = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
tops = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([
    package.metadata["Name"].lower().replace("_", "-")
    for package in importlib.metadata.distributions()
    if tops & {file.parts[0].partition(".")[0] for file in package.files or []}
]))
"""
# Ourselves; what puts itself into every process; and a back-port for Python 3.10.
UNTOLD = {"kogpt2-serving", "setuptools", "exceptiongroup"}
# A row of the table, and what `test_no_program_of_a_model` tries for it.
ROWS = {
    "read or change other models": "reads another model, reads another model by a program, "
    "changes another model, removes another model, lists the server's folder, "
    "links to another model, moves another model, opens files by number, "
    "truncates another model, truncates another model as it opens it for nothing",
    "change its own model's files": "changes its model, truncates its model, "
    "truncates its model as it reads",
    "read the environment or memory": "reads the server's environment, reads the server's memory, "
    "reads the server's memory by a call, traces the server",
    "signal the server's processes": "signals the server, signals everybody",
    "make itself less likely to be killed": "is less expendable",
    "connect to `mms.sock`": "connects to a socket of the server, connects half of a pair, "
    "sends by half of a pair, connects to an abstract socket, lists sockets by netlink, "
    "limits the server, has io_uring, mounts, makes a device, makes a user namespace, "
    "starts a process in a user namespace, starts a process in a user namespace by clone3, "
    "sets an attribute of another model, makes System V's memory, makes System V's semaphores, "
    "makes System V's queues, makes POSIX's queues",
    "change the mode, owner or times": "changes the mode of another model, slows the server down",
}
# What is said of the page, of kernels, or to whoever runs the server.
NO_CLAIMS = (
    "Who is trusted with what",
    "`tests/test_security_page.py` names",
    "| who | trusted with |",
    "| the operator",
    "| callers of the management port",
    "| a model's script |",
    "| a model's files |",
    "| clients |",
    "| it cannot |",
    "Put a proxy with TLS",
    "Set `INFERENCE_TOKEN` and `MANAGEMENT_TOKEN`",
    "Run it as a user of its own",
    "Mount the store read-only",
    "Close cloud metadata",
    "Limit requests per client",
    "SageMaker and `docker run --user 0` start",
    "`RUN_AS_USER=0` keeps root",
)
# What follows a *not prevented*.
NOT_PREVENTED = ("*Not prevented*",)


def sentences(page: str) -> list[str]:
    """Rows of tables, and of all else what a full stop ends."""
    found: list[str] = []
    for line in page.splitlines():
        if line.startswith("|"):
            found += [line] * bool(line.strip("| -"))
        elif line and not line.startswith(("#", "[한국어]")):
            found += re.split(r"(?<=\.)\s+(?=[A-Z*`])", line.removeprefix("- "))
    return found


def named(sentence: str) -> bool:
    return sentence.startswith((*TESTS, *ROWS, *NO_CLAIMS, *NOT_PREVENTED))


def test_each_sentence_has_a_test() -> None:
    bare = [s for s in sentences(PAGE) if not named(s) and not named(s.removeprefix("| "))]
    assert bare == []
    assert not named("A script cannot read the operator's mail.")


def test_nothing_is_kept_here_that_the_page_no_longer_says() -> None:
    said = [s.removeprefix("| ") for s in sentences(PAGE)] + sentences(PAGE)
    kept = (*TESTS, *ROWS, *NO_CLAIMS, *NOT_PREVENTED)
    assert [begin for begin in kept if not any(s.startswith(begin) for s in said)] == []


def test_the_tests_are_there() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    assert {name for names in TESTS.values() for name in names.split()} - defined == set()
    assert {what for row in ROWS.values() for what in row.split(", ")} == PROGRAMS


@pytest.mark.parametrize(
    ("process", "modules"),
    [
        ("gateway", ["serving.gateway"]),
        (
            "a model's texts, in a sandbox",
            ["engine.text.child", "engine.text.hugging_face", "engine.text.chat_template"],
        ),
        ("the workers' host", ["handlers.host", "handlers.handler_service"]),
    ],
)
def test_a_process_that_reads_clients_bytes_has_no_other_package(
    process: str, modules: list[str]
) -> None:
    rows = DEPENDENCIES.splitlines()
    (row,) = [line for line in rows if line.startswith(f"| {process} | ")]
    command = [sys.executable, "-c", LOADED, *modules]
    found = set(json.loads(subprocess.check_output(command, cwd=ROOT)))
    assert set(re.findall(r"`(.+?)`", row)) == found - UNTOLD


@pytest.mark.parametrize("language", ["", ".ko"])
def test_what_it_says_is_passed_is_passed(language: str) -> None:
    page = (ROOT / "docs" / "operate" / f"security{language}.md").read_text("utf-8")
    (line,) = [line for line in page.splitlines() if "`PATH`" in line and "`TZ`" in line]
    names = re.findall(r"`([A-Z][A-Z_]+\*?)`", line)
    assert len(names) > 15
    given = {name.replace("*", "X"): "1" for name in names}
    assert passed(given) == given
