"""Every row and every bulleted name of the reference API, with the tests that check it.

`test_reference_rows.py` checks that each test exists, and that each test of the modules of names is in a row. The name
of a module is that of its file, without the folder.
"""

from __future__ import annotations

from typing import Final

A: Final = "test_names_generation_a"
B: Final = "test_names_generation_b"
T: Final = "test_transports_names"
U: Final = "test_updaters_names"
R: Final = "test_names_ray"
S: Final = "test_names_a"

#: Each row, named as in the reference, with its tests by module.
ROWS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    # ------------------------------------------------------------------------------------ in general
    "every public name imports from weightsync": {"test_public_names": ("test_every_public_name_imports",)},
    "every error type that the reference documents stays a base": {
        "test_tree": ("test_errors_keep_their_documented_base_classes",)
    },
    "a SyncReport where the reference returns None": {
        B: ("test_send_is_applied_in_the_background_and_returns_a_report",),
        A: ("test_no_scheme_succeeds_without_anything",),
    },
    "signatures are verbatim, ours add keyword-only arguments": {
        S: ("test_signatures_are_the_references_with_keyword_only_additions", "test_defaults_are_the_references"),
        "test_signatures": (
            "test_every_difference_is_in_the_reviewed_table",
            "test_members_listed_as_added_differ_only_by_keywords",
            "test_no_public_name_of_torchrl_is_missing",
        ),
    },
    "the names of torchrl.weight_update.llm": {
        "test_llm_names": (
            "test_every_name_of_torchrls_llm_is_here",
            "test_every_member_of_torchrls_llm_is_here_and_takes_the_same_calls",
            "test_a_program_for_torchrls_sglang_runs",
            "test_an_update_that_fails_is_raised_and_no_collector_is_told",
            "test_the_transport_of_sglang_works_alone",
            "test_what_cannot_work_is_refused",
            "test_the_engine_is_told_what_the_scheme_of_sglang_was_given",
            "test_a_program_for_torchrls_vllm_runs_with_a_carrier",
            "test_the_carrier_is_made_for_the_group_that_the_scheme_of_vllm_was_given",
            "test_versions_in_a_directory_are_read_whole_and_once",
            "test_each_end_has_its_own_path_to_the_directory_which_the_trainer_makes",
            "test_a_poll_waits_for_a_version_that_is_yet_to_come",
            "test_a_directory_that_was_emptied_holds_nothing_until_its_next_trainer_has_written",
            "test_a_directory_that_was_emptied_unseen_has_another_version_of_the_same_number",
            "test_a_directory_that_is_emptied_during_a_poll_holds_nothing",
            "test_a_version_counts_as_loaded_only_once_the_prefix_cache_was_reset",
            "test_a_version_that_is_being_written_is_not_read",
            "test_a_dtype_that_no_reader_could_load_is_refused_and_the_newest_version_stays",
            "test_versions_that_two_threads_write_each_have_a_directory_of_their_own",
            "test_a_child_that_is_forked_during_a_write_does_not_keep_the_directory_locked",
            "test_a_process_writes_no_version_while_another_does",
            "test_an_argument_of_another_type_is_refused_when_it_is_given",
            "test_numpys_numbers_and_paths_are_taken",
            "test_every_dtype_that_is_written_is_read",
            "test_a_version_that_is_removed_while_it_is_read_is_left_for_the_newest",
            "test_a_version_that_is_removed_while_an_engines_workers_load_it_does_not_count_as_loaded",
            "test_an_engine_with_workers_of_its_own_is_told_which_directory_to_load",
        ),
    },
    # ---------------------------------------------------------------------------- A: WeightSyncScheme
    "A WeightSyncScheme.init_on_sender": {
        A: (
            "test_init_on_sender_takes_everything_from_its_context",
            "test_init_on_sender_takes_the_same_by_keyword",
            "test_init_on_sender_names_what_is_missing_or_contradictory",
            "test_init_holds_its_context_weakly",
        ),
        S: ("test_initialised_from_contexts", "test_what_init_on_sender_misses_is_named"),
    },
    "A WeightSyncScheme.init_on_worker": {
        A: (
            "test_init_on_worker_takes_pipe_and_model_from_its_context_or_by_keyword",
            "test_init_on_worker_resolves_its_model_id_lazily",
        ),
        S: ("test_what_init_on_worker_misses_is_named", "test_a_worker_without_model_and_context_is_refused"),
    },
    "A WeightSyncScheme.get_sender, get_receiver": {
        A: (
            "test_get_sender_and_get_receiver_before_their_inits_are_runtime_errors",
            "test_get_sender_and_get_receiver_give_the_sides",
        ),
    },
    "A WeightSyncScheme.create_transport, create_sender, create_receiver": {
        A: ("test_create_sender_and_create_receiver_are_wired_by_hand",),
        T: ("test_create_transport_takes_a_pipe_by_position_or_keyword",),
        "test_facades": ("test_fault_05_sends_of_a_transport_without_a_peer_raise",),
    },
    "A WeightSyncScheme.prepare_weights": {
        A: (
            "test_prepare_weights_with_none_and_no_model_is_an_error",
            "test_prepare_weights_takes_paths_modules_and_what_is_ready",
            "test_prepare_weights_takes_a_strategy_by_its_name",
            "test_the_models_weights_are_read_anew_at_each_send",
        ),
        S: (
            "test_none_means_the_registered_model_in_the_documented_order",
            "test_only_policy_falls_back_to_the_fallback_policy",
        ),
    },
    "A WeightSyncScheme pickling": {A: ("test_pickling_a_scheme_strips_its_sides",)},
    "A WeightSyncScheme.strategy": {A: ("test_strategy_is_equal_to_its_name_and_hashes_like_it",)},
    "A model paths": {
        A: (
            "test_model_paths_are_attributes_and_integer_indices",
            "test_a_model_path_that_does_not_resolve_is_an_attribute_error_that_names_the_part",
            "test_a_model_path_without_a_context_is_a_value_error",
        ),
        S: ("test_a_path_on_a_collected_context_is_a_value_error",),
    },
    "A a subclass that overrides no init": {S: ("test_a_subclass_without_init_is_not_implemented",)},
    "A default strategies": {A: ("test_default_strategies_are_those_of_generation_a",)},
    # ------------------------------------------------------------------------------ A: WeightStrategy
    "WeightStrategy.extract_weights": {
        A: (
            "test_extract_weights_of_each_source_to_each_format",
            "test_extract_weights_of_other_types_is_a_value_error",
        ),
    },
    "WeightStrategy.apply_weights": {
        A: (
            "test_apply_weights_to_each_destination_in_each_format",
            "test_apply_weights_of_other_types_is_a_value_error",
            "test_apply_weights_that_do_not_fit_is_a_key_error_and_changes_nothing",
        ),
    },
    # -------------------------------------------------------------------------------- A: WeightSender
    "A WeightSender.send": {
        A: (
            "test_send_dispatches_to_all_first_and_returns_when_all_acked",
            "test_send_takes_worker_ids_none_an_int_or_a_list",
            "test_send_to_an_unknown_id_is_a_value_error",
            "test_send_and_send_async_while_one_is_pending_are_runtime_errors",
        ),
    },
    "A WeightSender.send_async": {
        A: ("test_send_async_returns_with_what_is_pending",),
        T: ("test_send_async_over_a_users_transport_that_cannot_is_a_runtime_error",),
    },
    "A WeightSender.wait_async": {
        A: (
            "test_wait_async_blocks_until_all_targets_acked",
            "test_wait_async_with_none_pending_is_a_runtime_error",
        ),
    },
    "A WeightSender.update_weights": {A: ("test_update_weights_sends_to_all",)},
    "A WeightSender(scheme), register_worker, set_context and their aliases": {
        A: ("test_weight_sender_is_made_of_a_scheme_and_wired_with_the_underscored_names_too",),
        S: ("test_underscored_names_are_aliases",),
    },
    "A WeightSender pickling": {A: ("test_pickling_a_sender_drops_its_context_and_what_is_pending",)},
    # ------------------------------------------------------------------------------ A: WeightReceiver
    "A WeightReceiver.receive": {
        A: (
            "test_receive_is_true_with_an_update_and_false_without",
            "test_receive_without_a_model_is_a_value_error",
            "test_receive_is_true_on_shared_memory_too",
        ),
    },
    "A WeightReceiver.apply_weights": {
        A: (
            "test_apply_weights_acks_a_pending_update_if_these_are_its_weights",
            "test_apply_weights_refuses_a_pending_update_that_is_another",
            "test_apply_weights_with_nothing_pending_acks_nothing",
        ),
    },
    "A WeightReceiver(scheme), register_model, register_worker_transport, set_context": {
        A: ("test_register_model_takes_an_object_or_a_path",),
        S: ("test_a_low_level_receiver_resolves_a_path_on_its_context",),
    },
    "A WeightReceiver pickling": {A: ("test_pickling_a_receiver_drops_its_context",)},
    # ---------------------------------------------------------------------------------- transports
    "TransportBackend": {
        T: (
            "test_transport_backend_is_a_protocol_of_its_methods",
            "test_a_users_transport_works_under_send",
            "test_a_users_transport_that_raises_fails_its_worker_alone",
        ),
        B: ("test_transport_backend_takes_weights_without_a_model_id",),
    },
    "A MPTransport": {
        T: ("test_mp_transport_check_connection_says_whether_the_pipe_is_open",),
        "test_facades": (
            "test_one_thread_drives_both_ends",
            "test_send_weights_returns_when_the_ack_has_arrived",
            "test_fault_02_a_wait_ends_at_its_timeout_and_a_later_wait_accepts_the_late_ack",
            "test_wait_ack_and_send_ack_without_a_pending_update_raise_state_error",
            "test_receive_weights_returns_none_at_its_timeout",
            "test_check_ack_raises_runtime_error_for_another_ack_text",
            "test_check_ack_accepts_the_expected_ack_text",
        ),
    },
    "A MPTransport.pipe": {
        T: (
            "test_mp_transport_pipe_yields_what_worker_loops_expect",
            "test_mp_transport_behind_a_receiver_as_worker_loops_have_it",
        ),
        "test_facades_pipes": (
            "test_fault_06_user_messages_keep_their_order_and_are_unchanged",
            "test_the_transport_of_a_receiver_behaves_like_torchrls_in_a_worker_loop",
        ),
    },
    "A SharedMemTransport": {
        T: (
            "test_shared_mem_transport_without_workers_is_a_copy_target",
            "test_shared_mem_transport_register_weights_makes_a_copy_target",
            "test_shared_mem_transport_with_auto_register_off_is_a_key_error_that_lists_the_known",
            "test_shared_mem_transport_hands_weights_to_its_workers_over_their_pipes",
            "test_shared_mem_transport_receives_and_acks_as_a_worker",
        ),
    },
    "A, B RayTransport": {
        R: (
            "test_ray_transport_receives_nothing",
            "test_ray_transport_without_ray_is_an_import_error",
            "test_fault_12_a_worker_that_failed_is_not_updated",
        ),
        "test_ray_facades": (
            "test_ray_transport_sends_to_a_plain_collector",
            "test_ray_transport_of_generation_b_sends_to_an_actor_with_a_receiver",
        ),
        "test_facades": ("test_fault_05_sends_of_a_transport_without_a_peer_raise",),
    },
    "A RayActorTransport": {
        R: (
            "test_ray_actor_transport_acks_do_nothing",
            "test_ray_actor_transport_async_and_wait_ack",
            "test_ray_actor_transport_without_an_actor_is_not_connected",
        ),
        "test_ray_facades": (
            "test_ray_actor_transport_calls_the_given_update_method",
            "test_ray_actor_transport_refuses_an_unknown_update_method",
        ),
    },
    "A RPCTransport": {
        "test_facades": (
            "test_fault_05_sends_of_a_transport_without_a_peer_raise",
            "test_an_rpc_transport_without_calls_receives_nothing",
        ),
        "test_rpc_transport": (
            "test_send_weights_updates_the_collector",
            "test_the_asynchronous_form_is_awaited_by_wait_ack",
            "test_a_collector_that_raises_is_reported",
        ),
    },
    "A DistributedTransport": {
        "test_facades": (
            "test_fault_05_sends_of_a_transport_without_a_peer_raise",
            "test_one_thread_drives_both_ends",
            "test_wait_ack_and_send_ack_without_a_pending_update_raise_state_error",
        ),
        "test_store_facades": (
            "test_an_unknown_instruction_raises_value_error",
            "test_check_connection_tells_whether_the_user_has_a_process_group",
            "test_torchrls_keys_are_written_as_hints",
            "test_a_worker_loop_written_for_torchrl_receives_each_update_once",
        ),
    },
    "B DistributedTransport": {
        "test_facades": (
            "test_fault_05_sends_of_a_transport_without_a_peer_raise",
            "test_receive_weights_returns_none_at_its_timeout",
            "test_the_setup_methods_of_a_distributed_transport_do_nothing",
        ),
        "test_store_facades": (
            "test_generation_b_receives_into_its_buffer",
            "test_initial_weights_need_no_signalling_by_the_caller",
        ),
    },
    "A RayModuleTransformSender, RayModuleTransformReceiver": {
        R: (
            "test_ray_module_transform_scheme_sends_to_one_shared_actor",
            "test_ray_module_transform_sender_finds_its_actor_on_first_use",
            "test_ray_module_transform_sender_with_several_actors_is_a_value_error",
            "test_ray_module_transform_receiver_applies_locally",
        ),
        "test_ray_facades": (
            "test_the_module_scheme_finds_its_actor_in_each_way",
            "test_the_receiver_of_the_module_scheme_runs_in_the_actor",
        ),
    },
    # ------------------------------------------------------------------------------------- schemes
    "SharedMemWeightSyncScheme.register_shared_weights, policy_weights": {
        A: ("test_shared_mem_scheme_registers_weights_and_shows_them",),
        S: ("test_with_auto_register_off_an_unregistered_model_is_a_key_error_that_lists_the_known",),
    },
    "NoWeightSyncScheme": {
        A: ("test_no_scheme_succeeds_without_anything",),
        B: ("test_no_scheme_needs_nothing_in_generation_b_either",),
        T: ("test_the_transport_that_sends_nothing_is_closed_like_any_other",),
    },
    "what each scheme's init takes besides": {
        R: (
            "test_ray_scheme_takes_its_workers_from_context_or_keywords",
            "test_ray_scheme_counts_its_collectors",
            "test_evidence_of_plain_actors_is_the_call",
        ),
        T: (
            "test_rpc_scheme_names_what_its_sender_misses",
            "test_distributed_scheme_names_what_its_sides_miss",
        ),
        "test_facades": ("test_fault_05_sends_of_a_transport_without_a_peer_raise",),
        "test_store_sends": ("test_missing_and_invalid_arguments_are_named_in_the_error",),
        "test_rpc_scheme": ("test_a_context_gives_what_is_not_given",),
        "test_ray_scheme": ("test_an_actor_may_initialise_its_own_scheme",),
    },
    # ------------------------------------------------------------------------------------ updaters
    "WeightUpdaterBase.push_weights": {
        U: (
            "test_push_weights_takes_a_module_a_tensordict_a_dict_or_none",
            "test_worker_ids_are_ints_or_devices_one_or_a_list",
            "test_an_unknown_worker_id_is_a_value_error",
            "test_a_worker_whose_sync_raises_fails_alone_and_is_reported",
        ),
    },
    "WeightUpdaterBase.__call__": {U: ("test_calling_an_updater_is_push_weights",)},
    "WeightUpdaterBase.register_collector, collector, collectors": {
        U: ("test_register_collector_holds_one_collector_weakly",),
    },
    "WeightUpdaterBase.register_post_hook, post_hooks": {
        U: (
            "test_post_hooks_are_called_in_order_after_the_push",
            "test_fault_13_an_updater_does_not_push_from_inside_its_own_hook",
        ),
    },
    "WeightUpdaterBase.init": {U: ("test_init_does_nothing",)},
    "WeightUpdaterBase.increment_version": {
        U: ("test_increment_version_is_handed_to_the_registered_collector",),
    },
    "WeightUpdaterBase.all_worker_ids": {
        U: ("test_all_worker_ids_is_none_by_default_and_then_there_is_one_nameless_worker",),
    },
    "WeightUpdaterBase.from_policy": {U: ("test_from_policy_is_none_by_default",)},
    "WeightUpdaterBase, to override": {
        U: (
            "test_get_server_weights_maybe_map_weights_and_skip_update_are_overridden",
            "test_all_skipped_is_a_normal_return",
        ),
    },
    "VanillaWeightUpdater": {
        U: (
            "test_vanilla_weight_updater_writes_its_policys_weights",
            "test_vanilla_weight_updater_takes_a_getter",
            "test_vanilla_weight_updater_without_weights_is_an_error_and_no_silence",
        ),
    },
    "MultiProcessedWeightUpdater": {
        U: (
            "test_multi_processed_weight_updater_writes_each_workers_weights",
            "test_multi_processed_weight_updater_takes_devices_for_ids",
        ),
    },
    "RayWeightUpdater": {
        R: ("test_fault_12_ray_weight_updater_looks_at_its_futures",),
        "test_updaters_ray": (
            "test_all_collectors_get_the_weights_through_one_ray_put",
            "test_max_interval_pushes_are_skipped_between_two_calls_and_never_the_first",
            "test_each_worker_has_its_own_interval_even_if_named_in_the_push",
            "test_a_negative_interval_counts_as_zero",
        ),
    },
    "RemoteModuleWeightUpdater": {U: ("test_remote_module_weight_updater_must_be_given_weights",)},
    # ---------------------------------------------------------------------------------- generation B
    "B init_on_sender, its forms": {
        B: (
            "test_init_on_sender_in_each_form_and_connect_brings_the_first_weights",
            "test_init_on_sender_takes_a_multiprocessing_context",
            "test_init_on_sender_with_a_form_that_is_incomplete_or_contradictory_is_a_value_error",
        ),
    },
    "B init_on_receiver": {B: ("test_init_on_receiver_takes_its_model_from_its_context",)},
    "B connect": {
        B: (
            "test_connect_twice_is_a_runtime_error_on_both_sides",
            "test_connect_before_any_init_is_a_runtime_error",
            "test_connect_with_the_other_sides_argument_is_a_runtime_error",
            "test_connect_takes_the_first_weights",
        ),
    },
    "B send": {
        B: (
            "test_send_is_applied_in_the_background_and_returns_a_report",
            "test_send_takes_worker_ids",
            "test_send_takes_weights_of_each_kind",
            "test_send_before_init_or_connect_is_a_runtime_error",
        ),
    },
    "B receive": {
        B: (
            "test_receive_is_none_when_nothing_comes_and_the_weights_when_something_does",
            "test_receive_before_init_is_a_runtime_error",
        ),
    },
    "B apply_weights": {
        B: (
            "test_apply_weights_by_hand_on_the_receiver",
            "test_apply_weights_before_init_or_on_the_sender_is_a_runtime_error",
        ),
    },
    "B shutdown": {
        B: ("test_shutdown_is_final_and_allowed_twice", "test_shutdown_before_any_init_is_allowed"),
    },
    "what a TorchRL collector does with a scheme": {
        "test_torchrl_collectors": (
            "test_weightsync_schemes_are_instances_of_torchrls_scheme",
            "test_a_collectors_workers_act_with_the_sent_weights",
        ),
        "test_rpc_generation_b": ("test_torchrls_own_rpc_collector_runs_on_our_scheme",),
    },
    "B properties": {
        B: (
            "test_properties_on_the_sender",
            "test_properties_on_the_receiver",
            "test_sender_transports_are_those_of_the_workers",
            "test_there_is_no_shared_transport_since_each_worker_has_a_link_of_its_own",
            "test_context_and_model_can_be_set_as_torchrls_collectors_set_them",
            "test_a_pickled_scheme_is_initialised_on_neither_side",
        ),
    },
    "B from_backend, register_weight_sync_backend": {
        B: (
            "test_from_backend_makes_each_scheme",
            "test_from_backend_hands_its_arguments_on",
            "test_register_weight_sync_backend_adds_a_name",
        ),
    },
    "B sync=, the background receiver": {
        B: (
            "test_sync_false_returns_before_the_workers_have_answered",
            "test_the_receiver_hands_on_to_its_sub_collectors",
        ),
    },
    "B constructors": {
        B: ("test_constructors_take_generation_bs_arguments",),
        "test_facades": ("test_one_thread_drives_both_ends",),
    },
    "B InitialSyncTransport": {B: ("test_initial_sync_transport_is_a_protocol_of_its_two_methods",)},
    "B extra state, LoRA": {B: ("test_extra_state_travels", "test_lora_modules_are_merged_on_a_copy")},
}

#: The prefixes of the names of the tests of the fifteen faults, and the modules of these tests.
FAULTS: Final = tuple(f"test_fault_{number:02}_" for number in range(1, 16))
FAULTS_IN: Final = ("test_fifteen_faults", "test_facades", T, U, R)
