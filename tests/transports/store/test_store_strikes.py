"""kill -9 and SIGSTOP over torch.distributed (a store, and gloo pairs), of worker and trainer, at each point (G10)."""

from __future__ import annotations

from typing import Any

import judging
import pytest
from fleet import Crew
from judging import some
from store_field import StoreField
from striking import At, TrainerAt

pytestmark = pytest.mark.slow


@pytest.fixture
def field(crew: Crew, store: Any) -> StoreField:
    return StoreField(crew, store.port)


@pytest.mark.parametrize("at", some(At, At.PAYLOAD, At.APPLIED, At.OUTSTANDING))
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(field: StoreField, at: At) -> None:
    judging.a_killed_worker_is_lost_and_the_others_are_served(field, at)


@pytest.mark.parametrize("at", some(At, At.PAYLOAD, At.APPLIED))
def test_g10_a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field: StoreField, at: At) -> None:
    judging.a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field, at)


@pytest.mark.parametrize("at", some(TrainerAt, TrainerAt.PAYLOAD, TrainerAt.ANSWERED))
def test_g10_a_killed_trainer_leaves_whole_weights_and_room_for_the_next(field: StoreField, at: TrainerAt) -> None:
    judging.a_killed_trainer_leaves_whole_weights_and_room_for_the_next(field, at)


@pytest.mark.parametrize("at", some([TrainerAt.DISPATCH, TrainerAt.PAYLOAD, TrainerAt.ANSWERED], TrainerAt.PAYLOAD))
def test_g10_a_stopped_trainer_holds_nobody_up_and_goes_on(field: StoreField, at: TrainerAt) -> None:
    judging.a_stopped_trainer_holds_nobody_up_and_goes_on(field, at)


@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_an_adapter_that_raises_loses_its_link_with_the_reason(field: StoreField, where: str) -> None:
    judging.an_adapter_that_raises_loses_its_link_with_the_reason(field, where)
